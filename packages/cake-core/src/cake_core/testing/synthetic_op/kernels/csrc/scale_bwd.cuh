// Walk of one chunk of rows, the part that both backward programs share.
//
// Grid: chunks x column tiles, flattened onto x, tile fastest. A thread owns kVector columns and walks the rows of its
// chunk in ascending order, so the sum it returns depends on the chunk's bounds alone.
#pragma once

#include "scale_bwd.h"
#include "vector.cuh"

namespace cake::synthetic {

constexpr int kThreads = 128;
using Vec = Vector<kVector>;

inline __host__ __device__ int column_tiles(const ScaleBwd& p) {
  return (p.columns / kVector + kThreads - 1) / kThreads;
}

inline int64_t chunk_count(const ScaleBwd& p) { return (p.rows + p.rows_per_chunk - 1) / p.rows_per_chunk; }

// Writes dx of the chunk and returns the sum of dy * x over its rows. `vector`: the thread's column vector.
__device__ __forceinline__ Vec walk_chunk(const ScaleBwd& p, int64_t chunk, int vector) {
  const int row_vectors = p.columns / kVector;
  const int64_t first = chunk * p.rows_per_chunk;
  const int64_t end = min(first + p.rows_per_chunk, p.rows);
  const Vec weight = reinterpret_cast<const Vec*>(p.weight)[vector];
  Vec sum = {};
  for (int64_t row = first; row < end; ++row) {
    const int64_t i = row * row_vectors + vector;
    const Vec dy = reinterpret_cast<const Vec*>(p.dy)[i];
    if (p.dweight != nullptr) {
      const Vec x = reinterpret_cast<const Vec*>(p.x)[i];
#pragma unroll
      for (int k = 0; k < kVector; ++k) sum.value[k] = fmaf(dy.value[k], x.value[k], sum.value[k]);
    }
    if (p.dx != nullptr) {
      Vec dx;
#pragma unroll
      for (int k = 0; k < kVector; ++k) dx.value[k] = dy.value[k] * weight.value[k];
      reinterpret_cast<Vec*>(p.dx)[i] = dx;
    }
  }
  return sum;
}

}  // namespace cake::synthetic
