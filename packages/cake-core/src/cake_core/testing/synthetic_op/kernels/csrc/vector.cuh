// The -D specialisation of a library and the N neighbouring FP32 values that one thread loads and stores at once.
#pragma once

namespace cake::synthetic {

constexpr int kVector = CAKE_SYNTHETIC_VECTOR;  // columns a thread owns

template <int N>
struct alignas(4 * N) Vector {
  float value[N];
};

}  // namespace cake::synthetic
