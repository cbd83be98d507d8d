// What the kernels of all three libraries read: the packed documents and the rows before their first tokens. Plain C++.
//
// Notation: T tokens, C channels, W taps (2, 3 or 4), H = W - 1, N documents. Document n has the tokens s <= t < e.
// X_n[j] is row j of x for s <= j < e, a history row for s - H <= j < s, +0 where there is none.
#pragma once

#include <cstdint>

namespace cake::conv1d {

inline constexpr int kMaxTaps = 4;

// [N + 1] offsets of the documents; nullptr: documents of `length` tokens each. Any content is memory-safe: offsets are
// clamped to [0, T], tokens before the first one and from the last one on are documents without history, and a document
// is found where no offset before its own is above its start and none after it below its end.
struct Documents {
  const int32_t* cu;
  int32_t count;   // N
  int32_t length;  // of every document, where cu is null
  int32_t tokens;  // T
};

// Row k (0 .. H - 1) before document n, of token s - H + k: row n * H + k of `rows`, or row table[n * H + k] where
// there is a table; below 0: no such row. rows == nullptr: no history at all.
struct History {
  const void* rows;      // [*][C] BF16 or FP32, 16-byte aligned
  const int32_t* table;  // [N][H] or null
  int64_t stride_vecs;   // from row to row, in vectors of 8 elements
  bool fp32;
};

// What both passes do with the preactivation.
struct Activation {
  bool silu;                 // else the identity
  bool round_preactivation;  // SiLU' at bf16(pre) instead of pre
};

}  // namespace cake::conv1d
