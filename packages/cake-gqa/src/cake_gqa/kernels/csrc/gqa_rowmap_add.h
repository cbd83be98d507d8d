// Launcher of the sums of windows into mapped rows. Plain C++.
#pragma once

#include <cuda_runtime_api.h>

#include "gqa.h"

namespace cake::gqa {

struct RowmapAdd {
  float *dk, *dv;                  // [rows][all_heads][256], added to
  const float *from_dk, *from_dv;  // [T_k][heads][256], of the key heads first_head .. first_head + heads - 1
  const int32_t* row_map;          // [T_k]; a row that is not there is skipped
  int32_t *last, *before;          // [T_k] each, scratch: the window rows of a bucket, in no order
  Segments segments;               // without the table
  int64_t rows;
  int32_t all_heads, first_head, heads;
};

// `links`: makes last and before, which stay right for the same map and offsets.
cudaError_t launch_gqa_rowmap_add(const RowmapAdd& p, bool links, cudaStream_t stream);

}  // namespace cake::gqa
