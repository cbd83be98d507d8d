// Kernel launches from the host, for kernels that take one struct by value.
#pragma once

#include <cuda_runtime_api.h>

namespace cake {

inline constexpr int kDefaultShared = 48 * 1024;  // bytes of dynamic shared memory that every kernel may have

struct Shape {
  unsigned grid;
  unsigned threads;
  int shared = 0;  // bytes, dynamic
  int most = 0;    // above kDefaultShared: the most that any launch of this kernel on this device has
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

template <typename P>
cudaError_t launch(void (*kernel)(P), const Shape& shape, cudaStream_t stream, const P& p,
                   cudaLaunchAttribute* attribute = nullptr) {
  if (shape.shared > kDefaultShared) {
    // Always the same number: another thread may launch the kernel with more between this call and its own launch.
    const int bytes = shape.most > shape.shared ? shape.most : shape.shared;
    const cudaError_t raised = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (raised != cudaSuccess) return raised;
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

// Launches a kernel that begins with ptx::wait_for_the_kernel_before so that its CTAs are in place when the kernel
// before it in the stream ends (programmatic dependent launch). Code compiled for less than sm_90 has no such wait and
// is launched as usual, also where a later device runs it from PTX.
template <typename P>
cudaError_t launch_behind(void (*kernel)(P), const Shape& shape, cudaStream_t stream, const P& p) {
  cudaFuncAttributes built = {};
  const cudaError_t known = cudaFuncGetAttributes(&built, kernel);
  if (known != cudaSuccess) return known;
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  return launch(kernel, shape, stream, p, built.ptxVersion >= 90 ? &early : nullptr);
}

}  // namespace cake
