// What the kernels of packed causal attention share: sizes, operands, the table of a call. Plain C++.
//
// T_q query rows of H_q heads, T_k key rows of H_kv heads, group = H_q / H_kv query heads of a key head, D = 256.
// Segment n of B has the queries cu_q[n] .. cu_q[n + 1] and the keys cu_k[n] .. cu_k[n + 1]; of its nq and nk rows,
// query i sees the keys j <= i + nk - nq. The formulas are those of docs/design.md.
#pragma once

#include <cstdint>
#include <limits>

namespace cake::gqa {

inline constexpr int kHeadDim = 256;
inline constexpr int kQueryTile = 128;  // query rows of a CTA that makes out or dQ
inline constexpr int kKeyTile = 64;     // keys of a CTA that makes dK and dV
inline constexpr int kStatsTile = 64;   // query rows that this CTA reads at a time
inline constexpr float kLog2E = 1.4426950408889634f, kInfinity = std::numeric_limits<float>::infinity();

// [rows][heads][256] BF16, the last dimension dense.
struct HeadRows {
  const void* data;
  int64_t rows, heads;
  int64_t token_bytes, head_bytes;  // multiples of 16
};

// The table of a call, int32: a header of 16, then [B] each: segments with many keys first, and the tiles of those
// before an entry, of kQueryTile queries and of kKeyTile keys. gqa_plan writes all of it.
inline constexpr int kHeader = 16;
inline constexpr int kForwardTicket = 0, kQueryTicket = 1, kKeyTickets = 2;  // tiles that were handed out, by kernel
inline constexpr int kKeyPasses = 12;                                        // of dK and dV have a ticket
inline constexpr int kQueryTiles = 14, kKeyTiles = 15;                       // of one head, in all

struct Segments {
  int32_t* table;
  const int32_t* cu_q;  // [B + 1], trusted to ascend; every offset is clamped to the rows that there are
  const int32_t* cu_k;
  int32_t count;           // B
  int32_t rows_q, rows_k;  // T_q, T_k

  constexpr int32_t* order() const { return table + kHeader; }
  constexpr int32_t* query_tiles_before() const { return table + kHeader + count; }
  constexpr int32_t* key_tiles_before() const { return table + kHeader + 2 * count; }
};

// A backward computes 2^kLift P and scales its sums back, which rounds nothing. P is about one over the number of keys,
// and crosses between warpgroups in FP16, whose numbers below 2^-14 have fewer bits: 2^-22 of P. The largest P is 256,
// one of an lse that is 5.5 too small.
inline constexpr int kLift = 8;
inline constexpr float kLower = 1.f / (1 << kLift);

// Statistics of the backward, FP32 [2][H_q][R]: lse in base 2 less kLift, then dout . out. Segment n has the rows from
// stats_row on, which is a multiple of kStatsTile; those behind its last one, and those of no segment, hold +inf and 0.
constexpr int64_t stats_rows(int64_t rows_q, int64_t segments) {
  return (rows_q + kStatsTile * segments + kStatsTile - 1) / kStatsTile * kStatsTile;
}
constexpr int stats_row(int first_q, int n) { return (first_q + kStatsTile * n) & ~(kStatsTile - 1); }

}  // namespace cake::gqa
