// Where a segment lies, and which tile a ticket is.
#pragma once

#include <cstdint>

#include "gqa.h"

namespace cake::gqa {

__device__ __forceinline__ int clamped(int offset, int rows) { return offset < 0 ? 0 : offset > rows ? rows : offset; }

struct Segment {
  int first_q, rows_q;
  int first_k, rows_k;
};

__device__ __forceinline__ Segment segment_of(const Segments& s, int n) {
  Segment segment;
  segment.first_q = clamped(s.cu_q[n], s.rows_q);
  segment.first_k = clamped(s.cu_k[n], s.rows_k);
  const int rows_q = clamped(s.cu_q[n + 1], s.rows_q) - segment.first_q;
  const int rows_k = clamped(s.cu_k[n + 1], s.rows_k) - segment.first_k;
  segment.rows_q = rows_q < 0 ? 0 : rows_q;
  segment.rows_k = rows_k < 0 ? 0 : rows_k;
  return segment;
}

// The last of `count` ascending numbers that is at most `value`; the first one if none is.
template <typename At>
__device__ __forceinline__ int last_at_most(int count, int value, const At& at) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    if (at(middle) <= value) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Rows of a query tile and the keys that they see.
struct QueryTile {
  int first_q;  // token of its first row
  int rows;     // up to kQueryTile; 0: there is no more work
  int first_k, rows_k;
  int offset;      // its row r sees the keys up to r + offset
  int head;        // of the queries
  int n;           // of the segment
  int in_segment;  // of its first row

  // Blocks of `keys` keys, counted from the first key, that some row sees.
  __device__ __forceinline__ int blocks(int keys) const {
    const int last = rows - 1 + offset;
    const int seen = last + 1 < rows_k ? last + 1 : rows_k;
    return seen <= 0 ? 0 : (seen + keys - 1) / keys;
  }
};

// Tickets go through the segments of the table, in a segment through the key heads, then the tiles from the last one
// (it sees most keys), then the query heads of the key head, which read the same keys.
__device__ __forceinline__ QueryTile next_query_tile(const Segments& s, int which, int heads, int group) {
  QueryTile tile = {};
  const int ticket = atomicAdd(s.table + which, 1);
  const int index = ticket / heads;
  if (index >= s.table[kQueryTiles]) return tile;
  const int32_t* before = s.query_tiles_before();
  const int entry = last_at_most(s.count, index, [&](int i) { return before[i]; });
  tile.n = s.order()[entry];
  const Segment segment = segment_of(s, tile.n);
  const int tiles = (segment.rows_q + kQueryTile - 1) / kQueryTile;
  const int local = ticket - heads * before[entry], of_key_head = local % (tiles * group);
  tile.head = local / (tiles * group) * group + of_key_head % group;
  tile.in_segment = (tiles - 1 - of_key_head / group) * kQueryTile;
  const int left = segment.rows_q - tile.in_segment;
  tile.first_q = segment.first_q + tile.in_segment;
  tile.rows = left < kQueryTile ? left : kQueryTile;
  tile.first_k = segment.first_k;
  tile.rows_k = segment.rows_k;
  tile.offset = tile.in_segment + segment.rows_k - segment.rows_q;
  return tile;
}

// Keys of a tile and the queries that see them.
struct KeyTile {
  int first_k, keys;  // up to kKeyTile; 0: there is no more work
  int first_q, rows_q;
  int shift;  // its key r is seen by the queries from number r + shift on
  int head;   // of the keys
  int stats;  // row of the statistics of the segment's first query

  // Tiles of kStatsTile queries, counted from the segment's first one: the first that sees a key, and all.
  __device__ __forceinline__ int first_tile() const { return shift <= 0 ? 0 : shift / kStatsTile; }
  __device__ __forceinline__ int tiles() const { return (rows_q + kStatsTile - 1) / kStatsTile; }
};

// In a segment through the key heads, then the tiles from the first one, which is seen by most queries.
__device__ __forceinline__ KeyTile next_key_tile(const Segments& s, int which, int heads) {
  KeyTile tile = {};
  const int ticket = atomicAdd(s.table + which, 1);
  const int index = ticket / heads;
  if (index >= s.table[kKeyTiles]) return tile;
  const int32_t* before = s.key_tiles_before();
  const int entry = last_at_most(s.count, index, [&](int i) { return before[i]; });
  const int n = s.order()[entry];
  const Segment segment = segment_of(s, n);
  const int tiles = (segment.rows_k + kKeyTile - 1) / kKeyTile;
  const int local = ticket - heads * before[entry], in_segment = local % tiles * kKeyTile;
  const int left = segment.rows_k - in_segment;
  tile.head = local / tiles;
  tile.first_k = segment.first_k + in_segment;
  tile.keys = left < kKeyTile ? left : kKeyTile;
  tile.first_q = segment.first_q;
  tile.rows_q = segment.rows_q;
  tile.shift = in_segment - (segment.rows_k - segment.rows_q);
  tile.stats = stats_row(segment.first_q, n);
  return tile;
}

}  // namespace cake::gqa
