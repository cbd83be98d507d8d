// Short convolution forward: y = act(causal convolution of x inside each document).
//
// Tile: one warp takes 32 tokens of 256 channels, 8 neighbouring channels a lane; the channel tiles of a row are
// neighbouring warps, so that the CTAs that run at one time read a narrow window of whole rows. A lane keeps the last H
// rows of its channels in registers, FP32. The H rows before the tile are read again (from the L2).
//
// Loads: each lane copies its own 16 bytes of 4 rows at a time into its part of a ring in shared memory (cp.async),
// three groups ahead. Nobody else reads them: no barrier.
//
// Two paths per group of 4 tokens, chosen for the whole warp: no document starts among them, so the rows run through
// straight-line code; or one does, and each token asks. A document's first tokens see its history rows.
//
// Every token is computed from its own window in the order of conv_math.cuh: the bits of y do not depend on the tiles.
#include "cake/v1/launch.h"
#include "conv1d_fwd.h"
#include "conv_math.cuh"
#include "documents.cuh"

namespace cake::conv1d {
namespace {

constexpr int kWarps = 4;        // of a CTA
constexpr int kTileTokens = 32;  // of a warp
constexpr int kGroup = 4;        // tokens between two document tests
constexpr int kTileVecs = 32;    // vectors of 8 channels of a warp, one a lane
constexpr int kStages = 4;       // groups of a lane's ring
static_assert(kTileTokens % kGroup == 0);

// Shared memory of a warp: [stage][token of the group][lane].
struct Slots {
  uint4 rows[kStages][kGroup][kTileVecs];
};

// This lane's channels of the tile's rows, a group of tokens after another, on their way to shared memory.
class Ring {
 public:
  __device__ __forceinline__ Ring(Slots& slots, const uint4* x, int32_t x_stride, int32_t begin, int32_t end)
      : slots_(&slots.rows[0][0][threadIdx.x % kTileVecs]), x_(x), x_stride_(x_stride), token_(begin), end_(end) {
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) fetch();
  }

  // Starts the copies of the next group; zeros for the rows behind the tile, which nobody reads.
  __device__ __forceinline__ void fetch() {
#pragma unroll
    for (int u = 0; u < kGroup; ++u) {
      const bool wanted = token_ + u < end_;
      ptx::cp_async_16(slots_ + (filled_ * kGroup + u) * kTileVecs, row_at(x_, wanted ? token_ + u : 0, x_stride_),
                       wanted);
    }
    ptx::cp_async_commit();
    token_ += kGroup;
    filled_ = filled_ + 1 == kStages ? 0 : filled_ + 1;
  }

  // The oldest group that is on its way has arrived; another fetch may overwrite the one before it.
  __device__ __forceinline__ void wait() {
    ptx::cp_async_wait<kStages - 2>();
    read_ = read_ + 1 == kStages ? 0 : read_ + 1;
  }

  // Token u of the group that wait() waited for.
  __device__ __forceinline__ uint4 row(int u) const { return slots_[(read_ * kGroup + u) * kTileVecs]; }

 private:
  uint4* slots_;
  const uint4* x_;
  int32_t x_stride_, token_, end_;
  int filled_ = 0, read_ = -1;
};

template <int W, bool kSilu>
struct Tile {
  static constexpr int H = W - 1;
  float taps[W][kVec];
  float window[H][kVec];
  uint4* y;  // this lane's channels of row 0
  int32_t y_stride;
  int32_t stored_from;  // first token that is written
  bool active;          // this lane has channels

  // y of token t, whose row is given.
  __device__ __forceinline__ void token(int32_t t, uint4 packed) {
    float current[kVec], pre[kVec];
    widen(packed, current);
    convolve(taps, window, current, pre);
    activate<kSilu>(pre);
    ptx::store_if(row_at(y, t, y_stride), narrow(pre), active && t >= stored_from);
    shift(window, current);
  }

  // Document `document` begins or the tile begins inside of it: what of it is written.
  __device__ __forceinline__ void enter(const ConvFwd& p, const Document& document) {
    const bool known = document.index >= 0 && document.index < p.documents.count;
    const bool skips = p.skip != nullptr && known && p.skip[static_cast<int64_t>(document.index) * H + H - 1] >= 0;
    stored_from = skips ? document.start + H : 0;
  }
};

template <int W, bool kSilu>
__global__ __launch_bounds__(32 * kWarps, 4) void conv1d_fwd(const __grid_constant__ ConvFwd p) {
  constexpr int H = W - 1;
  const uint32_t warp = blockIdx.x * static_cast<uint32_t>(kWarps) + threadIdx.x / 32;
  const uint32_t row = warp / static_cast<uint32_t>(p.tiles);
  const int64_t begin64 = static_cast<int64_t>(row) * kTileTokens;
  if (begin64 >= p.documents.tokens) return;  // the last CTA may have warps to spare
  const int32_t begin = static_cast<int32_t>(begin64);
  const int32_t end = p.documents.tokens - begin > kTileTokens ? begin + kTileTokens : p.documents.tokens;
  const int wanted = static_cast<int>(warp - row * p.tiles) * kTileVecs + static_cast<int>(threadIdx.x % 32);
  const int vec = wanted < p.channel_vecs ? wanted : p.channel_vecs - 1;
  const uint4* x = static_cast<const uint4*>(p.x) + vec;

  __shared__ Slots slots[kWarps];
  Ring ring(slots[threadIdx.x / 32], x, p.x_stride, begin, end);
  Tile<W, kSilu> tile;
  uint4 before[H];  // rows begin - H .. begin - 1
#pragma unroll
  for (int k = 0; k < H; ++k) {
    before[k] = begin - H + k >= 0 ? *row_at(x, begin - H + k, p.x_stride) : make_uint4(0, 0, 0, 0);
  }
  load_taps<W>(p.weight, p.weight_fp32, vec, tile.taps);
  tile.y = static_cast<uint4*>(p.y) + vec;
  tile.y_stride = p.y_stride;
  tile.active = wanted < p.channel_vecs;

  Document document(p.documents, begin);
  tile.enter(p, document);
#pragma unroll
  for (int k = 0; k < H; ++k) {
    if (begin - H + k >= document.start) {
      widen(before[k], tile.window[k]);
    } else {
      load_history(p.history, document.index, p.documents.count, begin + k - document.start, H, vec, tile.window[k]);
    }
  }

  for (int32_t t = begin; t < end; t += kGroup) {
    ring.wait();
    ring.fetch();
    if (t + kGroup <= document.end && t + kGroup <= end) {
#pragma unroll
      for (int u = 0; u < kGroup; ++u) tile.token(t + u, ring.row(u));
      continue;
    }
#pragma unroll 1
    for (int u = 0; u < kGroup && t + u < end; ++u) {
      if (t + u >= document.end) {
        document.advance(p.documents, t + u);
        tile.enter(p, document);
#pragma unroll
        for (int k = 0; k < H; ++k) {
          load_history(p.history, document.index, p.documents.count, k, H, vec, tile.window[k]);
        }
      }
      tile.token(t + u, ring.row(u));
    }
  }
  ptx::cp_async_wait<0>();
}

template <int W>
cudaError_t launch_taps(const ConvFwd& p, const Shape& shape, cudaStream_t stream) {
  return p.silu ? launch(&conv1d_fwd<W, true>, shape, stream, p) : launch(&conv1d_fwd<W, false>, shape, stream, p);
}

}  // namespace

void launch_conv1d_fwd(const ConvFwd& given, cudaStream_t stream) {
  ConvFwd p = given;
  p.tiles = (p.channel_vecs + kTileVecs - 1) / kTileVecs;
  const int64_t rows = (static_cast<int64_t>(p.documents.tokens) + kTileTokens - 1) / kTileTokens;
  const Shape shape = {static_cast<unsigned>((rows * p.tiles + kWarps - 1) / kWarps), 32 * kWarps};
  switch (p.taps) {
    case 2:
      (void)launch_taps<2>(p, shape, stream);
      break;
    case 3:
      (void)launch_taps<3>(p, shape, stream);
      break;
    default:
      (void)launch_taps<4>(p, shape, stream);
  }
}

}  // namespace cake::conv1d
