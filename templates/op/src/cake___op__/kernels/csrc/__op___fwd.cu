// y = max(x, 0)^2 in FP32, rounded once to BF16. One thread per element; block b has elements [256 b, 256 b + 256).
#include <cuda_bf16.h>

#include "__op__.h"

namespace cake::__op__ {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) square_positive(__nv_bfloat16* __restrict__ y,
                                                            const __nv_bfloat16* __restrict__ x, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const float value = __bfloat162float(x[i]);
  const float positive = value < 0.f ? 0.f : value;  // not fmaxf, which turns NaN into 0
  y[i] = __float2bfloat16_rn(positive * positive);
}

}  // namespace

void launch_fwd(const Forward& p, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((p.count + kThreads - 1) / kThreads);
  square_positive<<<blocks, kThreads, 0, stream>>>(static_cast<__nv_bfloat16*>(p.y),
                                                   static_cast<const __nv_bfloat16*>(p.x), p.count);
}

}  // namespace cake::__op__
