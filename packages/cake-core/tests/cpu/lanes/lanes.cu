// What a kernel may ask of the emulation, one program each. A CTA is one warp.
#include "lanes.h"

namespace cake::lanes {
namespace {

constexpr unsigned kAll = 0xffffffffu;

static_assert(alignof(uint2) == 8 && alignof(int2) == 8 && alignof(float2) == 8);
static_assert(alignof(uint4) == 16 && alignof(int4) == 16 && alignof(float4) == 16);

__device__ void shuffles(int lane, int (&out)[kColumns]) {
  const float f = 0.5f + lane;
  out[0] = __shfl_sync(kAll, 100 + lane, 35);
  out[1] = __shfl_sync(kAll, lane, 9, 8);
  out[2] = __float_as_int(__shfl_up_sync(kAll, f, 3));
  out[3] = __shfl_up_sync(kAll, lane, 1, 4);
  out[4] = __shfl_down_sync(kAll, static_cast<uint8_t>(lane), 2, 16);
  out[5] = __shfl_xor_sync(kAll, lane, 5, 4);
  out[6] = static_cast<int>(__shfl_xor_sync(kAll, 1e9 + lane, 16) - 1e9);
  out[7] = static_cast<int>(__shfl_sync(kAll, int64_t{1} << lane, 31) >> 31);
}

__device__ void votes(int lane, int (&out)[kColumns]) {
  const unsigned ballot = __ballot_sync(kAll, lane % 3 == 1 ? 4 : 0);
  out[0] = static_cast<int>(ballot);
  out[1] = __ffs(ballot) * 100 + __popc(ballot);
  out[2] = __clz(lane);
  out[3] = __any_sync(kAll, lane == 17) + 2 * __any_sync(kAll, 0);
  out[4] = __all_sync(kAll, lane < 32) + 2 * __all_sync(kAll, lane != 17);
  // Two halves on ways of their own, which meet nobody of the other half.
  const unsigned half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
  if (lane < 16) {
    out[5] = __shfl_sync(half, lane, 3);
    __syncwarp(half);
    out[6] = static_cast<int>(__ballot_sync(half, lane % 2));
  } else {
    out[6] = static_cast<int>(__ballot_sync(half, lane % 2));
    out[5] = __shfl_up_sync(half, lane, 1, 16);
  }
  out[7] = __all_sync(half, lane < 16);
}

__device__ void arithmetic(int lane, int (&out)[kColumns]) {
  const uint2 two = make_uint2(lane, 2 * lane);
  const uint4 four = make_uint4(1, 2, 3, lane);
  out[0] = static_cast<int>(max(min(two.x, 9u), four.z) + two.y);
  out[1] = static_cast<int>(min(-1, 5u));  // as unsigned numbers
  out[2] = static_cast<int>(max(int64_t{1} << 40, lane) >> 40);
  out[3] = static_cast<int>(max(__uint_as_float(0x7fc00000u), static_cast<float>(lane)));
  out[4] = static_cast<int>(__float_as_uint(-1.f) >> 23);
  const double third = 1. / 3;  // the sum of a third and lane in FP64, which FP32 would round away
  out[5] = static_cast<int>(1e9 * (__dadd_rn(lane, third) - lane) + 0.5);
  const int4 ints = make_int4(lane, -lane, 0, 1);
  const float2 floats = make_float2(0.5f, 2.f);
  out[6] = ints.x + ints.y + ints.w;
  out[7] = static_cast<int>(__ldg(&floats.x) * floats.y * lane);
}

// Values handed to the neighbour in shared memory, with or without what makes them visible.
__device__ void neighbour(int lane, bool wait, int (&out)[kColumns]) {
  __shared__ int slots[32];
  slots[lane] = -1;
  __syncwarp();
  slots[lane] = lane;
  if (wait) __syncwarp();
  out[0] = slots[(lane + 1) % 32];
}

__device__ void misuse(int program, int lane, int (&out)[kColumns]) {
  switch (program) {
    case 10:  // nobody else comes
      if (lane < 31) out[0] = __shfl_sync(kAll, lane, 0);
      break;
    case 11:
      if (lane < 31) __syncwarp();
      break;
    case 12:
      if (lane < 31) out[0] = __any_sync(kAll, lane);
      break;
    case 13:
      __syncwarp(0xfffffffeu);
      break;
    case 14:
      if (lane < 8) out[0] = __shfl_sync(0xffu, lane, 8);
      break;
    case 15:
      out[0] = lane == 0 ? __any_sync(kAll, lane) : __all_sync(kAll, lane);
      break;
    case 16:
      out[0] = __shfl_sync(kAll, lane, 0, 12);
      break;
    case 17:
      out[0] = __shfl_up_sync(kAll, lane, 32);
      break;
  }
}

__global__ void lanes(const __grid_constant__ Lanes p) {
  const int lane = threadIdx.x;
  int out[kColumns] = {};
  if (p.program == 0) shuffles(lane, out);
  if (p.program == 1) votes(lane, out);
  if (p.program == 2) arithmetic(lane, out);
  if (p.program == 3 || p.program == 4) neighbour(lane, p.program == 3, out);
  if (p.program == 5) out[0] = blockIdx.x, out[1] = blockIdx.y, out[2] = blockIdx.z, out[3] = gridDim.y;
  if (p.program >= 10) misuse(p.program, lane, out);
  const int64_t cta = blockIdx.x + static_cast<int64_t>(gridDim.x) * (blockIdx.y + gridDim.y * blockIdx.z);
  for (int i = 0; i < kColumns; ++i) p.out[(cta * kColumns + i) * 32 + lane] = out[i];
}

}  // namespace

void launch_lanes(const Lanes& p, dim3 grid, dim3 block, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  (void)cudaLaunchKernelEx(&config, lanes, p);
}

}  // namespace cake::lanes
