// Tensor maps: how the copies of ptx_tensor.cuh see a tensor in global memory. Made on the host, passed to the kernel
// as a part of its parameters. sm_90 and later.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace cake {

inline constexpr int kMapColumns = 64;  // of a panel: 128 bytes, a row of a swizzled tile

// What the device reads. Only a __grid_constant__ parameter of a kernel may hold it.
struct TensorMap {
  CUtensorMap map;
};

// [matrices][rows][columns] BF16 in boxes of `box_rows` (at most 256) whole rows of one matrix, which lie in shared
// memory as the tiles of wgmma.cuh do: one panel of 64 columns behind the other, a multiple of 64 in all. Strides are
// positive multiples of 16 bytes, that of a single matrix may be anything; the data begins at a multiple of 16. Rows
// behind the last one read as zeros.
inline cudaError_t make_tensor_map(TensorMap& to, const void* data, int64_t columns, int64_t rows, int64_t row_bytes,
                                   int64_t matrices, int64_t matrix_bytes, int box_rows) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {  // of the driver, which no library links to
    void* found = nullptr;
    cudaDriverEntryPointQueryResult how;
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &how);
    return reinterpret_cast<Encode>(status == cudaSuccess && how == cudaDriverEntryPointSuccess ? found : nullptr);
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  const auto panels = static_cast<cuuint64_t>(columns / kMapColumns);
  const cuuint64_t sizes[4] = {kMapColumns, static_cast<cuuint64_t>(rows), panels, static_cast<cuuint64_t>(matrices)};
  const cuuint64_t whole = static_cast<cuuint64_t>(rows == 1 ? 2 * columns : row_bytes);
  const cuuint64_t strides[3] = {whole, 2 * kMapColumns, matrices == 1 ? whole : static_cast<cuuint64_t>(matrix_bytes)};
  const cuuint32_t box[4] = {kMapColumns, static_cast<cuuint32_t>(box_rows), static_cast<cuuint32_t>(panels), 1};
  const cuuint32_t each[4] = {1, 1, 1, 1};
  const CUresult made = encode(&to.map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(data), sizes, strides,
                               box, each, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return made == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace cake
