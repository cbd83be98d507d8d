// What the kernels of the gated delta rule share: names, tables, operands. Plain C++.
//
// T tokens, H query/key heads, HV value heads, group = HV / H value heads of a key head. K = V = 128. A chunk is up to
// 64 tokens of one document, a segment a run of chunks that one scan walks. The formulas, and the names R, e, U, Z, D,
// P, c, rho, gamma, are those of docs/design.md.
#pragma once

#include <cstdint>

namespace cake::gdn {

inline constexpr int kChunk = 64;     // tokens
inline constexpr int kHeadDim = 128;  // of keys and of values

// Tokens first .. first + rows - 1; rows is 0 for an entry that stands for nothing.
struct Chunk {
  int32_t first;
  int32_t rows;
};

// Tokens first .. first + tokens - 1 of one document, a multiple of 64 of them unless the document ends here.
struct Segment {
  int32_t first;
  int32_t tokens;    // 0: stands for nothing
  int32_t chunk;     // number of its first chunk: where its states lie in the tape
  int32_t entering;  // row of the state that enters, below 0: zeros
  int32_t leaving;   // row that the state that leaves is written to, below 0: nobody wants it
};

// [T][heads][128] BF16, the last dimension dense.
struct HeadRows {
  const void* data;
  int64_t token_bytes, head_bytes;  // multiples of 16
};

// [T][HV] scalars in any strides, of elements.
struct Gates {
  const float* g;  // natural logarithm of the decay
  int64_t g_token, g_head;
  const void* beta;
  int64_t beta_token, beta_head;
  bool beta_fp32;    // else BF16
  const float* r_q;  // [T][H] dense, 1 / |q|; null: 1
  const float* r_k;
};

// [rows][HV][128][128] FP32 states in one of two layouts: element strides of the key and of the value index.
struct StateRows {
  float* data;
  int32_t k_stride, v_stride;
};

// What a scan reads of every chunk.
struct ScanOperands {
  HeadRows q, k;
  HeadRows x;  // rows of the value heads: V, or dO
  Gates gates;
  const void* z;            // [T][HV][64] BF16, dense: row i of Z of each chunk, zeros behind the chunk's tokens
  const Segment* segments;  // longest first
  int32_t segment_count;
  int32_t heads, key_heads;  // HV, H
  float scale;
};

}  // namespace cake::gdn
