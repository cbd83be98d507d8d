// Kernel launches from the host, for kernels that take one struct by value.
#pragma once

#include <cuda_runtime_api.h>

namespace cake {

inline constexpr int kDefaultShared = 48 * 1024;  // bytes of dynamic shared memory that every kernel may have

struct Shape {
  unsigned grid;
  unsigned threads;
  int shared = 0;  // bytes, dynamic
  int most = 0;    // the most of all launches of the kernel on this device, where they differ above kDefaultShared
};

// Bytes of shared memory that one CTA of the current device can have, static and dynamic together; 0 when the device
// does not answer, the error is then pending.
inline int shared_limit() {
  int device = 0, bytes = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  return cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) == cudaSuccess ? bytes : 0;
}

// Multiprocessors of the current device, the CTAs of a grid that deals its work out; 1 when the device does not answer.
inline int multiprocessors() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 1;
  return cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess ? count : 1;
}

// Lets a kernel have more than kDefaultShared bytes on the current device. The driver is asked once by every thread,
// not at every launch. Always the same number for a kernel and device: another thread may launch it with more between
// this call and its own launch.
inline cudaError_t allow_shared(const void* kernel, int bytes) {
  struct Known {
    const void* kernel;
    int device, bytes;
  };
  constexpr int kRemembered = 16;  // more kernels than a library has instances in use, or they are told again
  static thread_local Known known[kRemembered] = {};
  static thread_local int next = 0;
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  for (const Known& one : known) {
    if (one.kernel == kernel && one.device == device && one.bytes == bytes) return cudaSuccess;
  }
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status == cudaSuccess) known[next++ % kRemembered] = {kernel, device, bytes};
  return status;
}

template <typename P>
cudaError_t launch(void (*kernel)(P), const Shape& shape, cudaStream_t stream, const P& p,
                   cudaLaunchAttribute* attribute = nullptr) {
  if (shape.shared > kDefaultShared) {
    const int bytes = shape.most > shape.shared ? shape.most : shape.shared;
    const cudaError_t allowed = allow_shared(reinterpret_cast<const void*>(kernel), bytes);
    if (allowed != cudaSuccess) return allowed;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(shape.grid);
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared);
  config.stream = stream;
  config.attrs = attribute;
  config.numAttrs = attribute != nullptr ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, p);
}

// Whether all that nvcc compiles this file for is sm_90 or later; it tells the host compiler, too.
#ifdef __CUDA_ARCH_LIST__
constexpr int kArchs[] = {__CUDA_ARCH_LIST__};  // ascending, 900 for sm_90
constexpr bool kMayStartEarly = kArchs[0] >= 900;
#else
constexpr bool kMayStartEarly = true;
#endif

// Launches a kernel that begins with ptx::wait_for_the_kernel_before so that its CTAs are in place when the kernel
// before it in the stream ends (programmatic dependent launch). Code compiled for less than sm_90 has no such wait and
// is launched as usual, also where a later device runs it from PTX.
template <typename P>
cudaError_t launch_behind(void (*kernel)(P), const Shape& shape, cudaStream_t stream, const P& p) {
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  return launch(kernel, shape, stream, p, kMayStartEarly ? &early : nullptr);
}

}  // namespace cake
