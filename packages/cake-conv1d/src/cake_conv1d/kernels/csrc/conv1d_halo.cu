// The edges of documents: the first and last H tokens whose rows or gradients come from another
// rank, the states before and behind a document, and the rows that are sent. A few rows per document: one thread
// computes all of one edge for 4 channels from the definition, with the arithmetic of the main kernels (conv_math.cuh),
// so a token has the same bits whichever kernel computes it.
#include "cake/v1/launch.h"
#include "conv1d_halo.h"
#include "conv_math.cuh"

namespace cake::conv1d {
namespace {

constexpr int kLane = 4;  // channels of a thread
constexpr int kThreads = 128;

// Four channels of a row of BF16 or FP32.
__device__ __forceinline__ void load_four(const void* base, bool fp32, int64_t part, float (&f)[kLane]) {
  if (fp32) {
    const float4 four = static_cast<const float4*>(base)[part];
    f[0] = four.x, f[1] = four.y, f[2] = four.z, f[3] = four.w;
  } else {
    unpack(static_cast<const uint2*>(base)[part], f);
  }
}

__device__ __forceinline__ void store_four(void* base, bool fp32, int64_t part, const float (&f)[kLane]) {
  if (fp32) {
    static_cast<float4*>(base)[part] = make_float4(f[0], f[1], f[2], f[3]);
  } else {
    static_cast<uint2*>(base)[part] = pack(f);
  }
}

// One document, four channels.
template <int W>
struct Edges {
  static constexpr int H = W - 1;
  const ConvHalo& p;
  int64_t n, part;
  int32_t start, end;
  float taps[W][kLane];

  __device__ __forceinline__ Edges(const ConvHalo& params, int64_t document, int64_t channels)
      : p(params), n(document), part(channels) {
    const int32_t tokens = p.documents.tokens;
    if (p.documents.cu == nullptr) {
      start = static_cast<int32_t>(n) * p.documents.length;
      end = start + p.documents.length;
    } else {  // offsets out of order or out of range make an empty document, or one that ends inside
      start = clamp(p.documents.cu[n], 0, tokens);
      end = clamp(p.documents.cu[n + 1], start, tokens);
    }
    if (p.weight != nullptr) load_taps<W>(p.weight, p.weight_fp32, part, taps);
  }

  static __device__ __forceinline__ int32_t clamp(int32_t v, int32_t low, int32_t high) {
    return v < low ? low : v > high ? high : v;
  }

  // X_n[t], s - H <= t < e.
  __device__ __forceinline__ void row(int32_t t, float (&f)[kLane]) const {
    if (t >= start) {
      unpack(row_at(static_cast<const uint2*>(p.x) + part, t, p.x_stride)[0], f);
    } else {
      load_history(p.history, static_cast<int32_t>(n), p.documents.count, t - start + H, H, part, f);
    }
  }

  __device__ __forceinline__ void preactivation(int32_t t, float (&pre)[kLane]) const {
    float window[H][kLane], current[kLane];
#pragma unroll
    for (int k = 0; k < H; ++k) row(t - H + k, window[k]);
    row(t, current);
    convolve(taps, window, current, pre);
  }

  __device__ __forceinline__ void gradient(int32_t t, float (&g)[kLane]) const {
    float dy[kLane];
    preactivation(t, g);
    unpack(row_at(static_cast<const uint2*>(p.dy) + part, t, p.dy_stride)[0], dy);
    if (!p.activation.silu) {
      differentiate<false, false>(g, dy);
    } else if (p.activation.round_preactivation) {
      differentiate<true, true>(g, dy);
    } else {
      differentiate<true, false>(g, dy);
    }
  }

  // Place of this thread's channels in row `row` of a tensor.
  __device__ __forceinline__ int64_t at(int64_t row, int64_t stride_vecs) const {
    return row * stride_vecs * (kVec / kLane) + part;
  }

  __device__ __forceinline__ void head_forward() const {
    if (p.history.table == nullptr || p.history.table[n * H + H - 1] < 0) return;
    for (int32_t t = start; t < end && t < start + H; ++t) {
      float y[kLane];
      preactivation(t, y);
      if (p.activation.silu) activate<true>(y);
      store_four(p.out, false, at(t, p.out_stride_vecs), y);
    }
  }

  __device__ __forceinline__ void head_gradient() const {
    for (int i = 0; i < H && start + i < end; ++i) {
      const int32_t* slots = p.table + (n * H + i) * H;
      float g[kLane];
      bool known = false;
      for (int c = 0; c < H; ++c) {
        if (slots[c] < 0) continue;
        if (!known) gradient(start + i, g);
        known = true;
        store_four(p.out, true, at(slots[c], p.out_stride_vecs), g);
      }
    }
  }

  __device__ __forceinline__ void tail_gradient() const {
    const int32_t* received = p.table + n * H;
    if (received[0] < 0) return;
    for (int i = 0; i < H; ++i) {
      const int32_t t = end - H + i;
      if (t < start) continue;
      float dx[kLane], g[kLane];
      gradient(t, g);
#pragma unroll
      for (int e = 0; e < kLane; ++e) dx[e] = __fmul_rn(taps[H][e], g[e]);
#pragma unroll
      for (int d = 1; d <= H; ++d) {
        const int behind = i + d - H;  // tokens from the document's end on
        if (behind < 0) {
          gradient(t + d, g);
        } else if (received[behind] >= 0) {
          load_four(p.rows, true, at(received[behind], p.rows_stride_vecs), g);
        } else {
          break;
        }
#pragma unroll
        for (int e = 0; e < kLane; ++e) dx[e] = __fmaf_rn(taps[H - d][e], g[e], dx[e]);
      }
      store_four(p.out, false, at(t, p.out_stride_vecs), dx);
    }
  }

  __device__ __forceinline__ void final_state() const {
    for (int i = 0; i < H; ++i) {
      float f[kLane];
      row(end - H + i, f);
      store_four(p.out, p.out_fp32, at(n * H + i, p.out_stride_vecs), f);
    }
  }

  // Ascending tokens, the first term a product; then the gradient of the final state where a short document left this
  // row in it.
  __device__ __forceinline__ void initial_gradient() const {
    for (int i = 0; i < H; ++i) {
      float sum[kLane];
      clear(sum);
      bool empty = true;
#pragma unroll
      for (int d = 1; d <= H; ++d) {
        const int32_t t = start - H + i + d;
        if (t < start || t >= end) continue;
        float g[kLane];
        gradient(t, g);
#pragma unroll
        for (int e = 0; e < kLane; ++e) {
          sum[e] = empty ? __fmul_rn(taps[H - d][e], g[e]) : __fmaf_rn(taps[H - d][e], g[e], sum[e]);
        }
        empty = false;
      }
      const int64_t fallen = i - (static_cast<int64_t>(end) - start);  // final_state[fallen] is this row
      if (p.rows != nullptr && fallen >= 0) {
        float more[kLane];
        load_four(p.rows, p.rows_fp32, at(n * H + fallen, p.rows_stride_vecs), more);
#pragma unroll
        for (int e = 0; e < kLane; ++e) sum[e] = empty ? more[e] : __fadd_rn(sum[e], more[e]);
      }
      store_four(p.out, p.out_fp32, at(n * H + i, p.out_stride_vecs), sum);
    }
  }
};

template <int W>
__global__ __launch_bounds__(kThreads) void conv1d_halo(const __grid_constant__ ConvHalo p) {
  const int64_t parts = static_cast<int64_t>(p.channel_vecs) * (kVec / kLane);
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t entry = thread / parts, part = thread % parts;
  if (entry >= p.count) return;
  if (p.edge == Edge::kGather) {
    const uint2* from = static_cast<const uint2*>(p.x) + part;
    const int64_t at = entry * p.out_stride_vecs * (kVec / kLane) + part;
    static_cast<uint2*>(p.out)[at] = *row_at(from, static_cast<int32_t>(p.index[entry]), p.x_stride);
    return;
  }
  const Edges<W> edges(p, entry, part);
  switch (p.edge) {
    case Edge::kHeadForward:
      edges.head_forward();
      break;
    case Edge::kHeadGradient:
      edges.head_gradient();
      break;
    case Edge::kTailGradient:
      edges.tail_gradient();
      break;
    case Edge::kFinalState:
      edges.final_state();
      break;
    default:
      edges.initial_gradient();
  }
}

}  // namespace

void launch_conv1d_halo(const ConvHalo& p, cudaStream_t stream) {
  const int64_t threads = p.count * p.channel_vecs * (kVec / kLane);
  const Shape shape = {static_cast<unsigned>((threads + kThreads - 1) / kThreads), kThreads};
  switch (p.taps) {
    case 2:
      (void)launch(&conv1d_halo<2>, shape, stream, p);
      break;
    case 3:
      (void)launch(&conv1d_halo<3>, shape, stream, p);
      break;
    default:
      (void)launch(&conv1d_halo<4>, shape, stream, p);
  }
}

}  // namespace cake::conv1d
