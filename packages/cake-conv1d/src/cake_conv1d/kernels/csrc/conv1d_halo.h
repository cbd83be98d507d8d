// The edges of documents, apart from the main kernels: what the kernels and their binding share. Plain C++.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "conv.h"

namespace cake::conv1d {

// s, e: first token of a document and the one behind its last; a table entry below 0: no such row.
enum class Edge : int {
  kGather,        // out[i] = x[index[i]]: the rows that other ranks need
  kHeadForward,   // y[s + i], i < H, of the documents whose history row H - 1 exists
  kHeadGradient,  // g[s + i], i < H, to the rows table[n][i][0 .. H - 1] of out
  kTailGradient,  // dx[e - H + i] of the documents with table[n][0] >= 0; g of token e + m is row table[n][m] of rows
  kFinalState,    // out[n][i] = X_n[e - H + i]
  kInitialGradient,  // out[n][i] = gradient of X_n[s - H + i]; rows: gradient of the final states [N][H][C], or null
  kCount
};

struct ConvHalo {
  void* out;             // rows out_stride_vecs apart: BF16, FP32 (g), or the history's dtype (states)
  const void* x;         // [T][C] BF16, rows x_stride apart
  const void* weight;    // [C][W] BF16 or FP32; null for kGather and kFinalState
  const void* dy;        // [T][C] BF16, rows dy_stride apart
  const void* rows;      // FP32 rows of g, or the gradient of the final states
  const int32_t* table;  // [N][H] or, for kHeadGradient, [N][H][H]
  const int64_t* index;  // kGather: [count]
  Documents documents;
  History history;
  int64_t out_stride_vecs;  // from row to row, in vectors of 8 elements
  int64_t rows_stride_vecs;
  int64_t count;     // documents, or rows to gather
  int32_t x_stride;  // bytes, multiples of 16
  int32_t dy_stride;
  int channel_vecs;  // C / 8
  int taps;          // W
  Edge edge;
  Activation activation;
  bool weight_fp32;
  bool out_fp32;
  bool rows_fp32;
};

void launch_conv1d_halo(const ConvHalo& p, cudaStream_t stream);

}  // namespace cake::conv1d
