// Short convolution backward from x, dy and the taps alone:
//
//   g[t]  = dy[t] act'(pre[t])                          pre is computed again
//   dx[j] = w_H g[j] + w_{H-1} g[j+1] + ... + w_0 g[j+H] over the tokens of the document, in this order (+ d_final)
//   dw[k] = sum over all t of g[t] X_n[t - H + k]
//
// Tile: one warp walks 128 channels, 4 neighbouring ones a lane. The tokens are cut into `blocks` parts of a multiple
// of 4 tokens; the warp of partial row r takes the blocks r, r + P, r + 2 P, ... (P = partial_rows), one after another.
// So the warps that run at one time read a narrow window of whole rows. Registers hold the taps, dw, the last H rows of
// x and the H rows of dx that still miss terms: token t completes dx[t - H].
//
// A block also reads the H rows of x before it and the H rows of x and dy behind it, which complete its last rows of
// dx; dw is summed over its own tokens alone.
//
// Loads: each warp copies groups of 4 tokens of x and dy, 256 bytes a row, into its own ring in shared memory
// (cp.async), two groups ahead, across blocks. No CTA barrier: how many warps a CTA has is no matter.
//
// Two paths per group: straight-line code where all four tokens and the rows that they complete are of one document and
// one block; else a test per token.
//
// Sums: dw in FP32 over the tokens of a block, ascending, fused multiply-adds; FP64 over a warp's blocks, ascending ->
// one FP32 partial row; partial rows by reduce_partial_rows. A single partial row is dweight itself.
//
//   shared memory of a warp, bytes
//   3 * 2048               ring [stage][x: 4 tokens, dy: 4 tokens][128 channels] BF16
//   W * 4 * 32 * 8         dw [tap * 4 + channel][lane] FP64
#include "cake/v1/launch.h"
#include "cake/v1/reduce.cuh"
#include "cake/v1/smem.cuh"
#include "conv1d_bwd.h"
#include "conv_math.cuh"
#include "documents.cuh"

namespace cake::conv1d {
namespace {

constexpr int kLane = 4;                            // channels of a lane
constexpr int kTileVecs = 32 * kLane / kVec;        // 16-byte vectors of a row of a tile
constexpr int kGroup = 4;                           // tokens of a group
constexpr int kStages = 3;                          // groups of a warp's ring
constexpr int kStageVecs = 2 * kGroup * kTileVecs;  // x and dy of a group
constexpr int kMaxWarps = 16;

template <int W>
constexpr int kWarpSumBytes = W * kLane * kWarp * static_cast<int>(sizeof(double));

// First token of a block; T from behind the last one on.
__device__ __forceinline__ int32_t block_start(const ConvBwd& p, int64_t block) {
  const int64_t quads = block * p.block_quads + (block < p.longer ? block : p.longer);
  return kGroup * quads < p.documents.tokens ? static_cast<int32_t>(kGroup * quads) : p.documents.tokens;
}

// End of the rows that the block before `end` reads.
template <int H>
__device__ __forceinline__ int32_t read_end(const ConvBwd& p, int32_t end) {
  return p.documents.tokens - end > H ? end + H : p.documents.tokens;
}

// The groups of a warp's blocks on their way to shared memory. Every lane copies four 16-byte vectors a group: of x and
// of dy, two rows apart.
template <int H>
class Ring {
 public:
  __device__ __forceinline__ Ring(const ConvBwd& p, uint4* slots, int first_vec, int row)
      : slots_(slots), half_(threadIdx.x % kWarp / kTileVecs), block_(row) {
    const int vec = first_vec + static_cast<int>(threadIdx.x) % kTileVecs;
    vec_ = vec < p.channel_vecs ? vec : p.channel_vecs - 1;  // lanes without channels compute what nobody stores
    enter(p);
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) fetch(p);
  }

  // Starts the copies of the next group: first the rows before a block, then the block, then the rows behind it. Zeros
  // for the rows that nobody reads.
  __device__ __forceinline__ void fetch(const ConvBwd& p) {
    uint4* slot = slots_ + filled_ * kStageVecs + threadIdx.x % kWarp;
    const uint4* x = static_cast<const uint4*>(p.x) + vec_;
    const uint4* dy = static_cast<const uint4*>(p.dy) + vec_;
    const int32_t t = token_ + half_;
    if (token_ >= first_ && token_ + kGroup <= stop_) {
#pragma unroll
      for (int i = 0; i < kGroup / 2; ++i) {
        ptx::cp_async_16(slot + i * kWarp, row_at(x, t + 2 * i, p.x_stride), true);
        ptx::cp_async_16(slot + (2 + i) * kWarp, row_at(dy, t + 2 * i, p.dy_stride), true);
      }
      token_ += kGroup;
    } else {
#pragma unroll 1
      for (int i = 0; i < kGroup / 2; ++i) {
        const int32_t each = t + 2 * i;
        const bool wanted = each >= 0 && each >= first_ - H && each < stop_;
        const bool inside = wanted && each >= first_;
        ptx::cp_async_16(slot + i * kWarp, row_at(x, wanted ? each : 0, p.x_stride), wanted);
        ptx::cp_async_16(slot + (2 + i) * kWarp, row_at(dy, inside ? each : 0, p.dy_stride), inside);
      }
      token_ += kGroup;
    }
    ptx::cp_async_commit();
    filled_ = filled_ + 1 == kStages ? 0 : filled_ + 1;
    if (token_ >= stop_ && block_ < p.blocks) {
      block_ += p.partial_rows;
      enter(p);
    }
  }

  // The oldest group that is on its way has arrived, for all lanes; another fetch may overwrite the one before it.
  __device__ __forceinline__ void wait() {
    ptx::cp_async_wait<kStages - 2>();
    __syncwarp();
    read_ = read_ + 1 == kStages ? 0 : read_ + 1;
  }

  // This lane's channels of token u of the group that wait() waited for.
  __device__ __forceinline__ void x(int u, float (&f)[kLane]) const { unpack(four(u), f); }
  __device__ __forceinline__ void dy(int u, float (&f)[kLane]) const { unpack(four(kGroup + u), f); }

 private:
  uint4* slots_;
  int vec_;   // this lane's vector of a row
  int half_;  // it copies the rows half_ and half_ + 2 of a group
  int filled_ = 0, read_ = -1;
  int64_t block_;                 // that is being fetched
  int32_t first_, stop_, token_;  // its first token, the end of what is read behind it, the next group

  __device__ __forceinline__ void enter(const ConvBwd& p) {
    first_ = block_start(p, block_);
    stop_ = read_end<H>(p, block_start(p, block_ + 1));
    token_ = first_ - kGroup;
  }

  __device__ __forceinline__ uint2 four(int row) const {
    return reinterpret_cast<const uint2*>(slots_ + read_ * kStageVecs + row * kTileVecs)[threadIdx.x % kWarp];
  }
};

// What one lane knows of its four channels while its warp walks the tokens.
template <int W, bool kSilu, bool kRound, bool kDw>
struct Lane {
  static constexpr int H = W - 1;
  float taps[W][kLane];
  float window[H][kLane];        // x of the tokens t - H .. t - 1
  float pending[H][kLane] = {};  // dx of the rows t - H .. t - 1, the terms of g[t] and later ones missing
  float dw[W][kLane];
  uint2* dx;  // this lane's channels of row 0
  int32_t dx_stride;
  int32_t first_row;  // dx rows before it are another block's or another document's
  bool stores;        // this lane has channels and dx is wanted

  // Token t: kSum adds its terms to dw; dx of row t - H is complete, and ours if kInner or not before first_row.
  template <bool kSum, bool kInner>
  __device__ __forceinline__ void token(int32_t t, const float (&x)[kLane], const float (&dy)[kLane]) {
    float g[kLane];
    convolve(taps, window, x, g);
    differentiate<kSilu, kRound>(g, dy);
    float row[kLane];
#pragma unroll
    for (int e = 0; e < kLane; ++e) {
      if constexpr (kDw && kSum) {
#pragma unroll
        for (int k = 0; k < H; ++k) dw[k][e] = __fmaf_rn(g[e], window[k][e], dw[k][e]);
        dw[H][e] = __fmaf_rn(g[e], x[e], dw[H][e]);
      }
      row[e] = __fmaf_rn(taps[0][e], g[e], pending[0][e]);
#pragma unroll
      for (int k = 0; k + 1 < H; ++k) pending[k][e] = __fmaf_rn(taps[k + 1][e], g[e], pending[k + 1][e]);
      pending[H - 1][e] = __fmul_rn(taps[H][e], g[e]);
    }
    const bool stored = stores && (kInner || t - H >= first_row);
    ptx::store_if(row_at(dx, t - H, dx_stride), pack(row), stored);
    shift(window, x);
  }

  // The document has ended: its last H rows have all their terms. The rows from `end` on are another block's.
  __device__ __forceinline__ void flush(const ConvBwd& p, const Document& document, int32_t end, int64_t part) const {
    const bool known = document.index >= 0 && document.index < p.documents.count;
    const int64_t entry = static_cast<int64_t>(document.index) * H;
    if (!stores || (known && p.skip != nullptr && p.skip[entry] >= 0)) return;
#pragma unroll
    for (int i = 0; i < H; ++i) {
      const int32_t row = document.end - H + i;
      if (row < first_row || row >= end) continue;
      float last[kLane];
#pragma unroll
      for (int e = 0; e < kLane; ++e) last[e] = pending[i][e];
      if (known && p.d_final != nullptr) {
        const History states = {p.d_final, nullptr, p.channel_vecs, p.d_final_fp32};
        float more[kLane];
        load_history(states, document.index, p.documents.count, i, H, part, more);
#pragma unroll
        for (int e = 0; e < kLane; ++e) last[e] = __fadd_rn(last[e], more[e]);
      }
      *row_at(dx, row, dx_stride) = pack(last);
    }
  }
};

// The FP64 sums of this lane's channels -> its part of the partial row, or of dweight where there is one row alone.
template <int W>
__device__ __forceinline__ void write_sums(const ConvBwd& p, const double* sums, int row, int64_t parts, int64_t part) {
#pragma unroll
  for (int i = 0; i < W; ++i) {  // four neighbouring numbers of [channel][tap]
    float four[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int channel = (4 * i + e) / W, tap = (4 * i + e) % W;
      four[e] = static_cast<float>(sums[(tap * kLane + channel) * kWarp]);
    }
    const int64_t place = part * W + i;
    if (p.partial != nullptr) {
      float4* partial = reinterpret_cast<float4*>(p.partial) + row * parts * W;
      partial[place] = make_float4(four[0], four[1], four[2], four[3]);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) store_element(p.dweight, 4 * place + e, four[e], p.dweight_fp32);
    }
  }
}

template <int W, bool kSilu, bool kRound, bool kDw>
__global__ __launch_bounds__(kMaxWarps* kWarp, 1) void conv1d_bwd(const __grid_constant__ ConvBwd p) {
  constexpr int H = W - 1;
  ptx::launch_dependents();
  const int lane = threadIdx.x % kWarp;
  const uint32_t warp = blockIdx.x * (blockDim.x / kWarp) + threadIdx.x / kWarp;
  const int row = static_cast<int>(warp / static_cast<uint32_t>(p.tiles));
  if (row >= p.partial_rows) return;  // the last CTA may have warps to spare
  const int tile = static_cast<int>(warp) - row * p.tiles;
  const int64_t wanted = static_cast<int64_t>(tile) * kWarp + lane;  // of C / 4
  const int64_t parts = static_cast<int64_t>(p.channel_vecs) * (kVec / kLane);
  const int64_t part = wanted < parts ? wanted : parts - 1;

  const int warp_vecs = kStages * kStageVecs + (kDw ? kWarpSumBytes<W> / 16 : 0);
  uint4* shared = dynamic_shared<uint4>() + static_cast<int>(threadIdx.x / kWarp) * warp_vecs;
  Ring<H> ring(p, shared, tile * kTileVecs, row);
  double* sums = reinterpret_cast<double*>(shared + kStages * kStageVecs) + lane;

  Lane<W, kSilu, kRound, kDw> at;
  load_taps<W>(p.weight, p.weight_fp32, part, at.taps);
  at.dx = static_cast<uint2*>(p.dx) + part;
  at.dx_stride = p.dx_stride;
  at.stores = p.dx != nullptr && wanted < parts;
  if constexpr (kDw) {
#pragma unroll
    for (int i = 0; i < W * kLane; ++i) sums[i * kWarp] = 0.;
  }

  Document document(p.documents, block_start(p, row));
  for (int64_t block = row; block < p.blocks; block += p.partial_rows) {
    const int32_t first = block_start(p, block), end = block_start(p, block + 1);
    const int32_t stop = read_end<H>(p, end);
    if (first >= document.end) document.advance(p.documents, first);
    ring.wait();
    ring.fetch(p);
#pragma unroll
    for (int k = 0; k < H; ++k) {
      if (first - H + k >= document.start) {
        ring.x(kGroup - H + k, at.window[k]);
      } else {
        load_history(p.history, document.index, p.documents.count, first + k - document.start, H, part, at.window[k]);
      }
    }
    at.first_row = first;
#pragma unroll
    for (int k = 0; k < W; ++k) clear(at.dw[k]);

    for (int32_t t = first; t < stop; t += kGroup) {
      ring.wait();
      ring.fetch(p);
      float x[kLane], dy[kLane];
      if (t - H >= at.first_row && t + kGroup <= document.end && t + kGroup <= end) {
#pragma unroll
        for (int u = 0; u < kGroup; ++u) {
          ring.x(u, x);
          ring.dy(u, dy);
          at.template token<true, true>(t + u, x, dy);
        }
        continue;
      }
      for (int u = 0; u < kGroup && t + u < stop; ++u) {
        if (t + u >= document.end) {
          at.flush(p, document, end, part);
          if (t + u >= end) break;
          document.advance(p.documents, t + u);
          at.first_row = t + u;
#pragma unroll
          for (int k = 0; k < H; ++k) {
            load_history(p.history, document.index, p.documents.count, k, H, part, at.window[k]);
          }
        }
        ring.x(u, x);
        ring.dy(u, dy);
        if (t + u < end) {
          at.template token<true, false>(t + u, x, dy);
        } else {
          at.template token<false, false>(t + u, x, dy);
        }
      }
    }
    if (document.end == stop) at.flush(p, document, end, part);
    if constexpr (kDw) {
#pragma unroll
      for (int i = 0; i < W * kLane; ++i) sums[i * kWarp] += at.dw[i / kLane][i % kLane];
    }
  }
  ptx::cp_async_wait<0>();
  if constexpr (kDw) {
    if (wanted < parts) write_sums<W>(p, sums, row, parts, part);
  }
}

__global__ __launch_bounds__(ReduceTile::kThreads) void conv1d_bwd_reduce(const __grid_constant__ ConvBwd p) {
  __shared__ ReduceTile::Smem smem;
  ptx::wait_for_the_kernel_before();
  reduce_partial_rows(p.dweight, p.dweight_fp32, p.partial, p.partial_rows, kVec * p.channel_vecs * p.taps, smem);
}

constexpr int kSpread = 132;  // multiprocessors to keep busy when there are few warps; the bits do not depend on it

template <int W, bool kSilu, bool kRound, bool kDw>
cudaError_t launch_main(ConvBwd p, cudaStream_t stream) {
  const int warp_bytes = kStages * kStageVecs * 16 + (kDw ? kWarpSumBytes<W> : 0);
  const int limit = shared_limit();
  const int64_t warps = static_cast<int64_t>(p.partial_rows) * p.tiles;
  int64_t cta_warps = (warps + kSpread - 1) / kSpread;
  if (cta_warps > kMaxWarps) cta_warps = kMaxWarps;
  if (cta_warps > limit / warp_bytes) cta_warps = limit / warp_bytes;
  Shape shape = {static_cast<unsigned>((warps + cta_warps - 1) / cta_warps), static_cast<unsigned>(cta_warps * kWarp)};
  shape.shared = static_cast<int>(cta_warps) * warp_bytes;
  shape.most = limit;
  return launch(&conv1d_bwd<W, kSilu, kRound, kDw>, shape, stream, p);
}

template <int W, bool kDw>
cudaError_t launch_main(const ConvBwd& p, cudaStream_t stream) {
  if (!p.activation.silu) return launch_main<W, false, false, kDw>(p, stream);
  if (p.activation.round_preactivation) return launch_main<W, true, true, kDw>(p, stream);
  return launch_main<W, true, false, kDw>(p, stream);
}

template <int W>
cudaError_t launch_main(const ConvBwd& p, cudaStream_t stream) {
  return p.dweight != nullptr ? launch_main<W, true>(p, stream) : launch_main<W, false>(p, stream);
}

cudaError_t launch_main(const ConvBwd& p, cudaStream_t stream) {
  switch (p.taps) {
    case 2:
      return launch_main<2>(p, stream);
    case 3:
      return launch_main<3>(p, stream);
    default:
      return launch_main<4>(p, stream);
  }
}

}  // namespace

void launch_conv1d_bwd(const ConvBwd& given, cudaStream_t stream) {
  ConvBwd p = given;
  p.tiles = (p.channel_vecs + kTileVecs - 1) / kTileVecs;
  const int64_t quads = (static_cast<int64_t>(p.documents.tokens) + kGroup - 1) / kGroup;
  p.block_quads = quads / p.blocks;
  p.longer = quads % p.blocks;
  if (launch_main(p, stream) != cudaSuccess || p.partial == nullptr) return;
  const int columns = kVec * p.channel_vecs * p.taps;
  const Shape shape = {static_cast<unsigned>((columns + ReduceTile::kColumns - 1) / ReduceTile::kColumns),
                       ReduceTile::kThreads};
  (void)launch_behind(&conv1d_bwd_reduce, shape, stream, p);
}

}  // namespace cake::conv1d
