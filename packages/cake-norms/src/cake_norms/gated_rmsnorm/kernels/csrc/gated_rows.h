// Operands of the gated norm as kernels and bindings see them. Plain C++.
#pragma once

#include <cstdint>

namespace cake::norms {

// Strides of a [tokens][heads][D] operand in 16-byte vectors of 8 BF16.
struct RowStrides {
  int64_t token_vecs;
  int64_t head_vecs;
};

// A fixed number of rows as whole tokens and remaining heads.
struct RowStep {
  int tokens;
  int heads;
};

inline RowStep row_step(int rows, int heads) { return {rows / heads, rows % heads}; }

}  // namespace cake::norms
