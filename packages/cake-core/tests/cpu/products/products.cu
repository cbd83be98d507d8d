// Products of tensor cores for the emulation, right ones and, as p.fault asks, wrong ones.
#include "cake/v1/launch.h"
#include "cake/v1/ptx_bulk.cuh"
#include "cake/v1/ptx_tensor.cuh"
#include "cake/v1/smem.cuh"
#include "cake/v1/wgmma.cuh"
#include "products.h"

namespace cake::products {
namespace {

constexpr int kSteps = kSum / 16;

// An operand of kMn x kSum as tiles in shared memory: along rows two tiles of kMn rows, along columns kMn / 64 tiles of
// kSum rows.
template <Along kAlong, int kMn>
struct Tiles {
  static constexpr int kTileBytes = (kAlong == Along::kRows ? kMn : kSum) * kTileRowBytes;
  static constexpr int kBytes = kMn * kSum * 2;

  __device__ static int byte_of(int mn, int k) {
    return kAlong == Along::kRows ? k / 64 * kTileBytes + swizzled(mn, k % 64)
                                  : mn / 64 * kTileBytes + swizzled(k, mn % 64);
  }
  __device__ static void fill(char* tiles, const uint16_t* from, int thread, int threads) {
    for (int i = thread; i < kMn * kSum; i += threads) {
      *reinterpret_cast<uint16_t*>(tiles + byte_of(i / kSum, i % kSum)) = from[i];
    }
  }
};

template <int R>
__device__ void store(float* out, const float (&d)[R]) {
  const int thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
  for (int i = 0; i < R; ++i) {
    out[(row + i / 2 % 2 * 8) * 2 * R + i / 4 * 8 + column + i % 2] = d[i];
  }
}

// out = a b^T. kTimes 2: the same product twice into the same sums in one group.
template <int kN, Along kA, Along kB, bool kRegisters, int kTimes>
__global__ __launch_bounds__(512) void product(const __grid_constant__ Products p) {
  using A = Tiles<kA, kRows>;
  using B = Tiles<kB, kN>;
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  char* const b = dynamic_shared<char>();
  char* const a = b + B::kBytes + group * A::kBytes;
  const uint16_t* const rows = p.a + group * kRows * kSum;
  if constexpr (!kRegisters) A::fill(a, rows, threadIdx.x % 128, 128);
  B::fill(b, p.b, threadIdx.x, blockDim.x);
  if (p.fault != kNoProxyFence) ptx::fence_proxy_async();
  if (p.fault != kNoBarrier) __syncthreads();

  uint32_t fragments[kSteps][4];
  for (int step = 0; step < kSteps; ++step) {
    for (int j = 0; j < 4; ++j) {
      const int row = 16 * warp + lane / 4 + 8 * (j % 2), column = 16 * step + lane % 4 * 2 + 8 * (j / 2);
      fragments[step][j] = rows[row * kSum + column] | static_cast<uint32_t>(rows[row * kSum + column + 1]) << 16;
    }
  }
  static char elsewhere[1024];
  const char* tile = b;
  if (p.fault == kMisaligned) tile += 16;
  if (p.fault == kInsideAGroup) tile += 4 * kTileRowBytes;
  if (p.fault == kBehindTheEnd) tile = a + (kRegisters ? 0 : A::kBytes) - 1024;
  if (p.fault == kOutside) tile = elsewhere;
  if (p.fault == kWarpDiffers && warp == 2) tile += 1024;
  const Operand<kA> left(kRegisters ? b : a, A::kTileBytes);
  const Operand<kB> right(tile, B::kTileBytes);
  float d[kN / 2] = {};
  if (p.fault != kNoRegisterFence) ptx::wgmma_fence();
  if (p.fault == kWritesBehindFence) {  // seen where the registers were a product's before
    ptx::wgmma<false>(d, fragments[0], right.at(0), true);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::settle(d);
    ptx::wgmma_fence();
    d[3] = 0.f;
  }
  if ((p.fault != kLaneMissing || threadIdx.x != 37) && (p.fault != kWarpMissing || warp != 3)) {
    for (int times = 0; times < kTimes; ++times) {
      if constexpr (kRegisters) {
        multiply<kSteps>(d, fragments, right, times > 0 || p.fault == kWritesBehindFence);
      } else {
        multiply<kSteps>(d, left, right, times > 0);
      }
    }
  }
  if (p.fault == kNoSwizzle) ptx::wgmma<false>(d, fragments[0], right.at(0) & ~(uint64_t{1} << 62), true);
  if (p.fault == kWritesSums) d[5] += 1.f;
  if (p.fault != kNoCommit) ptx::wgmma_commit();
  if (p.fault == kSettlesEarly) ptx::settle(d);
  if ((p.fault == kOverwritesEarly || p.fault == kOverwritesAndFences) && threadIdx.x % 128 == 77) {
    *reinterpret_cast<uint16_t*>(b + B::byte_of(9, 70)) ^= 0x80;
    if (p.fault == kOverwritesAndFences) ptx::fence_proxy_async();
  }
  if (p.fault != kNoWait) ptx::wgmma_wait<0>();
  if (p.fault == kOverwritesBehindWait && threadIdx.x % 128 == 40)
    *reinterpret_cast<uint16_t*>(b + B::byte_of(9, 70)) ^= 0x80;
  if (p.fault != kNoSettle && p.fault != kNoWait) ptx::settle(d);
  store(p.out + group * kRows * kN, d);
}

// Two groups in flight, of the first and of the second half of kSum; the first sums go on without having been settled:
// out = both halves + the second half.
__global__ __launch_bounds__(128) void pipeline(const __grid_constant__ Products p) {
  using Half = Tiles<Along::kRows, kRows>;
  char* const a = dynamic_shared<char>();
  char* const b = a + Half::kBytes;
  Half::fill(a, p.a, threadIdx.x, 128);
  Half::fill(b, p.b, threadIdx.x, 128);
  ptx::fence_proxy_async();
  __syncthreads();
  const auto half = [&](float(&d)[32], int which, bool add) {
    ptx::wgmma_fence();
    multiply<kSteps / 2>(d, Operand<Along::kRows>(a + which * Half::kTileBytes, 0),
                         Operand<Along::kRows>(b + which * Half::kTileBytes, 0), add);
    ptx::wgmma_commit();
  };
  float first[32], second[32];
  half(first, 0, false);
  half(second, 1, false);
  ptx::wgmma_wait<1>();
  if (p.fault == kSettlesEarly) ptx::settle(second);
  half(first, 1, true);
  ptx::wgmma_wait<1>();
  ptx::settle(second);
  ptx::wgmma_wait<0>();
  ptx::settle(first);
  for (int i = 0; i < 32; ++i) first[i] += second[i];
  store(p.out, first);
}

// A warpgroup that copies, 64 x 64 of a and of b at a time, and one that multiplies; two stages between them.
class Stages {
 public:
  static constexpr int kBytes = kStages * 2 * 64 * kTileRowBytes;
  __device__ explicit Stages(char* shared) : shared_(shared) {}
  __device__ char* tile(int turn, int which) const {
    return shared_ + (turn % kStages * 2 + which) * 64 * kTileRowBytes;
  }
  __device__ void copy(const Products& p, int turn) const {
    for (int i = threadIdx.x % 128; i < 64 * 8; i += 128) {
      const int row = i / 8, column = i % 8 * 8;
      const int64_t from = row * 64 * kTurns + turn * 64 + column;
      ptx::cp_async_16(tile(turn, 0) + swizzled(row, column), p.a + from, true);
      ptx::cp_async_16(tile(turn, 1) + swizzled(row, column), p.b + from, true);
    }
  }
  __device__ void product(float (&d)[32], int turn) const {
    ptx::wgmma_fence();
    multiply<4>(d, Operand<Along::kRows>(tile(turn, 0), 0), Operand<Along::kRows>(tile(turn, 1), 0), turn > 0);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::settle(d);
  }

 private:
  char* shared_;
};

// Named barriers 1 + stage: full; 1 + kStages + stage: empty.
__global__ __launch_bounds__(256) void named_relay(const __grid_constant__ Products p) {
  const Stages stages(dynamic_shared<char>());
  const int arriving = p.fault == kCount || p.fault == kCountOfBoth ? 128 : 256;
  const int waiting = p.fault == kCountOfBoth ? 128 : 256;
  if (threadIdx.x < 128) {
    for (int turn = 0; turn < kTurns; ++turn) {
      if (turn >= kStages) ptx::bar_sync(1 + kStages + turn % kStages, 256);
      stages.copy(p, turn);
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
      if (p.fault != kNoProxyFence) ptx::fence_proxy_async();
      if (p.fault != kOneArrivalLess || turn != 3) ptx::bar_arrive(1 + turn % kStages, arriving);
    }
  } else {
    float d[32];
    for (int turn = 0; turn < kTurns; ++turn) {
      if (p.fault != kTakesEarly) ptx::bar_sync(1 + turn % kStages, waiting);
      stages.product(d, turn);
      if (turn + kStages < kTurns) ptx::bar_arrive(1 + kStages + turn % kStages, 256);
    }
    store(p.out, d);
  }
}

// The same by mbarriers; the copies arrive by themselves, so the fence is the reader's.
__global__ __launch_bounds__(256) void mbarrier_relay(const __grid_constant__ Products p) {
  char* const shared = dynamic_shared<char>();
  const Stages stages(shared);
  auto* const full = reinterpret_cast<uint64_t*>(shared + Stages::kBytes);
  uint64_t* const empty = full + kStages;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages && p.fault != kNoInit; ++stage) {
      ptx::mbarrier_init(full + stage, 128);
      ptx::mbarrier_init(empty + stage, 128);
    }
  }
  if (p.fault != kNoBarrier) __syncthreads();
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<40>();
    for (int turn = 0; turn < kTurns; ++turn) {
      ptx::mbarrier_wait(empty + turn % kStages, (turn / kStages + 1 + (p.fault == kParityOfEmpty)) % 2);
      stages.copy(p, turn);
      if (p.fault == kOneArrivalLess && turn == 3 && threadIdx.x == 9) continue;
      ptx::cp_async_mbarrier_arrive(full + turn % kStages);
    }
  } else {
    ptx::setmaxnreg_inc<200>();
    float d[32];
    for (int turn = 0; turn < kTurns; ++turn) {
      ptx::mbarrier_wait(full + turn % kStages, (turn / kStages + (p.fault == kParityOfFull)) % 2);
      if (p.fault != kNoProxyFence) ptx::fence_proxy_async();
      stages.product(d, turn);
      ptx::mbarrier_arrive(empty + turn % kStages);
    }
    store(p.out, d);
  }
}

// a comes as one block of rows, for register operands; the sums leave as one.
__global__ __launch_bounds__(128) void blocks(const __grid_constant__ Products p) {
  using B = Tiles<Along::kRows, kRows>;
  constexpr int kBytes = kRows * kSum * 2;  // of a, of b and of the sums
  char* const b = dynamic_shared<char>();
  auto* const a = reinterpret_cast<uint16_t*>(b + kBytes);
  auto* const arrived = reinterpret_cast<uint64_t*>(b + 2 * kBytes);
  if (threadIdx.x == 0) ptx::mbarrier_init(arrived, p.fault == kOneArrivalLess ? 2 : 1);
  B::fill(b, p.b, threadIdx.x, 128);
  ptx::fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    const int more = p.fault == kBehindTheEnd ? 1024 : 0;
    ptx::bulk_load(a, p.a + (p.fault == kMisaligned), kBytes + more, arrived);
  }
  if (p.fault != kTakesEarly) ptx::mbarrier_wait(arrived, 0);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t fragments[kSteps][4];
  for (int step = 0; step < kSteps; ++step) {
    for (int j = 0; j < 4; ++j) {
      const int row = 16 * warp + lane / 4 + 8 * (j % 2), column = 16 * step + lane % 4 * 2 + 8 * (j / 2);
      fragments[step][j] = *reinterpret_cast<const uint32_t*>(a + row * kSum + column);
    }
  }
  float d[kRows / 2];
  ptx::wgmma_fence();
  multiply<kSteps>(d, fragments, Operand<Along::kRows>(b, B::kTileBytes), false);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::settle(d);
  __syncthreads();  // all warps have read a, and b has been multiplied
  store(reinterpret_cast<float*>(a), d);
  if (p.fault != kNoProxyFence) ptx::fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::bulk_store(p.out, a, kRows * kRows * 4);
    ptx::bulk_commit();
    if (p.fault == kOverwritesEarly) a[77] ^= 1;
    if (p.fault != kNoWait) ptx::bulk_wait_read<0>();
  }
}

// a, of which kBoxRows rows are there, and b come as boxes of tensors.
struct Boxes {
  Products p;
  TensorMap a, b;
};

__global__ __launch_bounds__(128) void boxes(const __grid_constant__ Boxes x) {
  using Side = Tiles<Along::kRows, kRows>;
  const Products& p = x.p;
  char* const a = dynamic_shared<char>();
  char* const b = a + Side::kBytes;
  auto* const arrived = reinterpret_cast<uint64_t*>(b + Side::kBytes);  // of a, of b
  if (threadIdx.x < 2) ptx::mbarrier_init(&arrived[threadIdx.x], p.fault == kOneArrivalLess ? 2 : 1);
  ptx::fence_mbarrier_init();
  __syncthreads();
  const int bytes = p.fault == kBytes ? Side::kBytes - 128 : Side::kBytes;
  if (threadIdx.x == 0) {
    char* const to = p.fault == kMisaligned ? a + 128 : p.fault == kBehindTheEnd ? b + Side::kBytes : a;
    ptx::tensor_load(to, x.a, 0, p.fault == kMatrix ? 1 : 0, bytes, &arrived[0]);
    ptx::tensor_load(b, x.b, 0, 0, bytes, &arrived[1]);
  }
  float d[kRows / 2];
  ptx::mbarrier_wait(&arrived[0], 0);
  if (p.fault != kTakesEarly) ptx::mbarrier_wait(&arrived[1], 0);
  ptx::wgmma_fence();
  multiply<kSum / 16>(d, Operand<Along::kRows>(a, Side::kTileBytes), Operand<Along::kRows>(b, Side::kTileBytes), false);
  ptx::wgmma_commit();
  if (p.fault == kNextTooEarly && threadIdx.x == 0) ptx::tensor_load(a, x.a, 8, 0, bytes, &arrived[0]);
  ptx::wgmma_wait<0>();
  ptx::settle(d);
  store(p.out, d);
}

// One warp, 16 x 16 over kSum: a and b through ldmatrix, b stored along its rows or, kTrans, along its columns.
template <bool kTrans>
__global__ __launch_bounds__(32) void warp_product(const __grid_constant__ Products p) {
  constexpr int kPitch = kSum + 8;
  uint16_t* const a = dynamic_shared<uint16_t>();
  uint16_t* const b = a + 16 * kPitch;
  const int lane = threadIdx.x;
  for (int i = lane; i < 16 * kSum; i += 32) {
    a[i / kSum * kPitch + i % kSum] = p.a[i];
    b[kTrans ? i % kSum * 24 + i / kSum : i / kSum * kPitch + i % kSum] = p.b[i];
  }
  if (p.fault != kNoBarrier) __syncwarp();
  float d[2][4] = {};
  for (int k = 0; k < kSum; k += 16) {
    uint32_t left[4], right[4];
    const int eight = lane / 8, row = lane % 8 + eight % 2 * 8, column = k + eight / 2 * 8;
    ptx::ldmatrix_x4(left, a + row * kPitch + column + (p.fault == kMisaligned));
    // Matrices: columns 0-7 of b over the first and the last 8 of k, then columns 8-15.
    if constexpr (kTrans) {
      ptx::ldmatrix_x4_trans(right, b + (k + eight % 2 * 8 + lane % 8) * 24 + eight / 2 * 8);
    } else {
      ptx::ldmatrix_x4(right, b + (eight / 2 * 8 + lane % 8) * kPitch + k + eight % 2 * 8);
    }
    if (p.fault == kLaneMissing && lane == 11) break;
    ptx::mma_m16n8k16_bf16(d[0], left, {right[0], right[1]});
    ptx::mma_m16n8k16_bf16(d[1], left, {right[2], right[3]});
  }
  for (int i = 0; i < 8; ++i) {
    p.out[(lane / 4 + i / 2 % 2 * 8) * 16 + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i / 4][i % 4];
  }
}

// The same in TF32, of which a BF16 number is one; what else is in the registers does not count.
__global__ __launch_bounds__(32) void tf32_product(const __grid_constant__ Products p) {
  const int lane = threadIdx.x, row = lane / 4, column = lane % 4;
  const auto wide = [&](const uint16_t* x, int at) { return static_cast<uint32_t>(x[at]) << 16 | 0x1fff; };
  float d[2][4] = {};
  for (int k = column; k < kSum; k += 8) {
    uint32_t a[4];
    for (int j = 0; j < 4; ++j) a[j] = wide(p.a, (row + 8 * (j % 2)) * kSum + k + 4 * (j / 2));
    if (p.fault == kLaneMissing && lane == 11) break;
    for (int half = 0; half < 2; ++half) {
      const int from = (row + 8 * half) * kSum + k;
      ptx::mma_m16n8k8_tf32(d[half], a, {wide(p.b, from), wide(p.b, from + 4)});
    }
  }
  for (int i = 0; i < 8; ++i) {
    p.out[(row + i / 2 % 2 * 8) * 16 + i / 4 * 8 + column * 2 + i % 2] = d[i / 4][i % 4];
  }
}

template <int kN, Along kA, Along kB, bool kRegisters, int kTimes>
void launch_product(int warpgroups, const Products& p, cudaStream_t stream) {
  const int tiles = (kN + (kRegisters ? 0 : warpgroups) * kRows) * kSum * 2;
  (void)launch(product<kN, kA, kB, kRegisters, kTimes>, {1, 128u * warpgroups, tiles, 227 * 1024}, stream, p);
}
template <int kN, Along kA, Along kB>
void launch_product(const Variant& v, bool twice, int warpgroups, const Products& p, cudaStream_t stream) {
  if (twice) return launch_product<kN, kA, kB, false, 2>(warpgroups, p, stream);
  v.registers ? launch_product<kN, kA, kB, true, 1>(warpgroups, p, stream)
              : launch_product<kN, kA, kB, false, 1>(warpgroups, p, stream);
}
template <int kN>
void launch_product(const Variant& v, bool twice, int warpgroups, const Products& p, cudaStream_t stream) {
  constexpr Along kR = Along::kRows, kC = Along::kColumns;
  if (v.a_columns) {
    v.b_columns ? launch_product<kN, kC, kC>(v, twice, warpgroups, p, stream)
                : launch_product<kN, kC, kR>(v, twice, warpgroups, p, stream);
  } else {
    v.b_columns ? launch_product<kN, kR, kC>(v, twice, warpgroups, p, stream)
                : launch_product<kN, kR, kR>(v, twice, warpgroups, p, stream);
  }
}

}  // namespace

void launch_products(Program program, const Variant& v, int warpgroups, const Products& p, cudaStream_t stream) {
  constexpr int kRelayBytes = Stages::kBytes + 2 * kStages * 8, kWarpBytes = 16 * (kSum + 8) * 2 + kSum * 24 * 2;
  if (program == kPipeline) (void)launch(pipeline, {1, 128, 2 * kRows * kSum * 2}, stream, p);
  if (program == kNamedRelay) (void)launch(named_relay, {1, 256, kRelayBytes}, stream, p);
  if (program == kMbarrierRelay) (void)launch(mbarrier_relay, {1, 256, kRelayBytes}, stream, p);
  if (program == kWarp)
    (void)launch(v.b_columns ? warp_product<true> : warp_product<false>, {1, 32, kWarpBytes}, stream, p);
  if (program == kBlocks) (void)launch(blocks, {1, 128, 2 * kRows * kSum * 2 + 8}, stream, p);
  if (program == kBoxes) {
    Boxes x = {p};
    (void)make_tensor_map(x.a, p.a, kSum, kBoxRows, 2 * kSum, 1, 0, kRows);
    (void)make_tensor_map(x.b, p.b, kSum, kRows, 2 * kSum, 1, 0, kRows);
    (void)launch(boxes, {1, 128, 2 * kRows * kSum * 2 + 16}, stream, x);
  }
  if (program == kTf32) (void)launch(tf32_product, {1, 32}, stream, p);
  if (program > kTwice) return;
  if (v.n == 80) return launch_product<80, Along::kRows, Along::kRows, false, 1>(warpgroups, p, stream);
  v.n == 64 ? launch_product<64>(v, program == kTwice, warpgroups, p, stream)
            : launch_product<128>(v, program == kTwice, warpgroups, p, stream);
}

}  // namespace cake::products
