// What every binding (`*_binding.cc`, compiled by the host compiler) shares: operand checks, the device guard, the
// stream of a device, the launch check and the export of a library's two symbols. No kernel includes this file.
//
//   void run(ffi::TensorView y, ffi::TensorView x) {
//     check_tensor(y, "y", kF32, 2);
//     check_tensor(x, "x", kBF16, 2);
//     const DLDevice device = cuda_device(y, "y");
//     check_device(x, "x", device);
//     if (y.numel() == 0) return;                     // a zero-sized grid is a launch error
//     DeviceGuard guard(device);                      // before the launch, on the operands' device
//     launch_scale({data<float>(y), data<const void>(x), y.size(0)}, stream_of(device));
//     check_launch("scale");
//   }
//   CAKE_EXPORT_RUN(cake::example::run);
//
// Messages have the form "argument is GOT; needs WANTED"; the Python function that was called is named by its caller.
// A binding allocates nothing, reads no device memory and never synchronizes: it may run while a graph is captured.
#pragma once

#include <cuda_runtime_api.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <cstdint>

namespace cake {

namespace ffi = ::tvm::ffi;

inline constexpr DLDataType kBF16{kDLBfloat, 16, 1};
inline constexpr DLDataType kF32{kDLFloat, 32, 1};
inline constexpr DLDataType kI32{kDLInt, 32, 1};
inline constexpr DLDataType kI64{kDLInt, 64, 1};
inline constexpr DLDataType kU8{kDLUInt, 8, 1};  // scratch from the workspace pool

// The address of the first element, null for an empty tensor. The caller has checked the dtype.
template <typename T>
T* data(const ffi::TensorView& view) {
  return static_cast<T*>(view.data_ptr());
}

// ValueError unless `view` has this dtype and rank.
inline void check_tensor(const ffi::TensorView& view, const char* name, DLDataType dtype, int rank) {
  if (view.dtype() != dtype) {
    TVM_FFI_THROW(ValueError) << name << " is " << view.dtype() << "; needs " << dtype;
  }
  if (view.ndim() != rank) {
    TVM_FFI_THROW(ValueError) << name << " has " << view.ndim() << " dimensions; needs " << rank;
  }
}

// ValueError unless the dimension `dim` has `wanted` elements.
inline void check_size(const ffi::TensorView& view, const char* name, int dim, int64_t wanted) {
  if (view.size(dim) != wanted) {
    TVM_FFI_THROW(ValueError) << name << ".shape[" << dim << "] is " << view.size(dim) << "; needs " << wanted;
  }
}

// ValueError unless the elements are packed in row-major order.
inline void check_dense(const ffi::TensorView& view, const char* name) {
  if (!view.IsContiguous()) TVM_FFI_THROW(ValueError) << name << " is not contiguous; needs dense row-major elements";
}

// ValueError unless the first element starts at a multiple of `bytes`.
inline void check_aligned(const ffi::TensorView& view, const char* name, int bytes) {
  const auto misplaced = reinterpret_cast<uintptr_t>(view.data_ptr()) % static_cast<uintptr_t>(bytes);
  if (misplaced != 0) {
    TVM_FFI_THROW(ValueError) << name << " starts " << misplaced << " bytes past a multiple of " << bytes << "; needs "
                              << bytes << "-byte alignment";
  }
}

// The CUDA device of `view`; ValueError for a tensor elsewhere, whose address a kernel could not read.
inline DLDevice cuda_device(const ffi::TensorView& view, const char* name) {
  const DLDevice device = view.device();
  if (device.device_type != kDLCUDA) {
    TVM_FFI_THROW(ValueError) << name << " is on DLPack device type " << static_cast<int>(device.device_type)
                              << "; needs a CUDA tensor";
  }
  return device;
}

// ValueError unless `view` is on `device`: all tensors of one call share one device and its current stream.
inline void check_device(const ffi::TensorView& view, const char* name, DLDevice device) {
  const DLDevice got = view.device();
  if (got.device_type != device.device_type || got.device_id != device.device_id) {
    TVM_FFI_THROW(ValueError) << name << " is on device (" << static_cast<int>(got.device_type) << ", " << got.device_id
                              << "); needs (" << static_cast<int>(device.device_type) << ", " << device.device_id
                              << "), as the other operands";
  }
}

// RuntimeError naming `what` unless `status` is success. The pending error is consumed first: it would otherwise be
// reported by the next CUDA call of the process, which had no part in it.
inline void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  TVM_FFI_THROW(RuntimeError) << what << ": " << cudaGetErrorName(status) << " (" << static_cast<int>(status)
                              << "): " << cudaGetErrorString(status);
}

// After a launch: RuntimeError naming the kernel when the launch was refused.
inline void check_launch(const char* kernel) { check_cuda(cudaGetLastError(), kernel); }

// Makes `device` current and restores the caller's device. The destructor cannot throw: it may run while an error of
// the launch is being unwound.
class DeviceGuard {
 public:
  explicit DeviceGuard(DLDevice device) {
    check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
    if (previous_ == device.device_id) return;
    check_cuda(cudaSetDevice(device.device_id), "cudaSetDevice");
    switched_ = true;
  }
  ~DeviceGuard() {
    if (switched_ && cudaSetDevice(previous_) != cudaSuccess) (void)cudaGetLastError();
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool switched_ = false;
};

// The current stream of `device`, which tvm-ffi takes from torch for the first CUDA tensor of the call.
inline cudaStream_t stream_of(DLDevice device) {
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
}

// Toolkit of the headers this library was compiled with, 13000 for CUDA 13.0: the loader compares it with the sidecar.
inline int64_t build_cuda_version() { return CUDART_VERSION; }

}  // namespace cake

// The only two symbols a library exports; once per library, outside of every namespace.
#define CAKE_EXPORT_RUN(function)               \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, function); \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(build_cuda_version, ::cake::build_cuda_version)
