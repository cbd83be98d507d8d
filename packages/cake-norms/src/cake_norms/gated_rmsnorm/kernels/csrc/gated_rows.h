// Operands of the gated norm as kernels and bindings see them. Plain C++.
#pragma once

#include <cstdint>

namespace cake::norms {

// Strides of a [tokens][heads][D] operand in 16-byte vectors of 8 BF16. 32 bits each, so that the address of a row
// takes two multiplications with a 64-bit result and not two of 64 bits.
struct RowStrides {
  uint32_t token_vecs;
  uint32_t head_vecs;
};

// A fixed number of rows as whole tokens and remaining heads.
struct RowStep {
  uint32_t tokens;
  uint32_t heads;
};

inline RowStep row_step(int64_t rows, int heads) {
  return {static_cast<uint32_t>(rows / heads), static_cast<uint32_t>(rows % heads)};
}

}  // namespace cake::norms
