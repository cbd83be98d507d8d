// What asynchronous products read, shared memory as the async proxy sees it through matrix descriptors with 128-byte
// swizzle, and their arithmetic.
//
// The async proxy. Bytes that lanes write, cp.async included, are visible to a product once some lane has called
// fence_proxy_async after they were written; a product that reads a byte whose value differs from what was last fenced
// ends the launch. Not modelled: which lane wrote a byte. A fence by a lane that saw the bytes counts as the writer's,
// and one by a lane that ran after the writer without a barrier counts too, in this order of the lanes but hardly in
// every one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cuda_on_cpu/cta.h"

namespace cuda_on_cpu {

class AsyncProxy {
 public:
  void begin() { fenced_.assign(cta->dynamic_bytes, static_cast<char>(0xff)); }  // as the memory of a CTA begins

  void fence() {
    constexpr size_t kBlock = 512;
    const char* memory = dynamic_smem();
    for (size_t at = 0; at < fenced_.size(); at += kBlock) {
      const size_t bytes = std::min(kBlock, fenced_.size() - at);
      if (std::memcmp(&fenced_[at], memory + at, bytes) != 0) std::memcpy(&fenced_[at], memory + at, bytes);
    }
  }

  // Bytes that the proxy itself has written.
  void wrote(size_t offset, size_t bytes) { std::memcpy(&fenced_[offset], dynamic_smem() + offset, bytes); }

  // 16 bytes of a product's operand.
  const char* read(uint32_t offset) const {
    if (offset + 16 > fenced_.size()) stop("a product reads behind the end of the dynamic shared memory");
    const char* memory = dynamic_smem() + offset;
    if (std::memcmp(&fenced_[offset], memory, 16) != 0) {
      stop("a product reads shared memory that was written without a fence_proxy_async after it");
    }
    return memory;
  }

 private:
  std::vector<char> fenced_;
};

// mn: the row of a, the column of b; k: the index that is summed. Transposed: mn runs along the 128-byte rows.
class Descriptor {
 public:
  Descriptor(uint64_t bits, bool transposed)
      : start_((bits & 0x3fff) << 4),
        leading_((bits >> 16 & 0x3fff) << 4),
        group_((bits >> 32 & 0x3fff) << 4),
        transposed_(transposed) {
    constexpr uint64_t kFields = 0x3fff | uint64_t{0x3fff} << 16 | uint64_t{0x3fff} << 32;
    if ((bits & ~kFields) != uint64_t{1} << 62) {
      stop("a matrix descriptor is not one of 128-byte swizzle, or a field of it overflows");
    }
    // Steps of 16 along k: 32 bytes inside of a swizzled row, or whole rows.
    const uint32_t inside = start_ % 1024;
    if (transposed ? inside != 0 : inside % 32 != 0 || inside > 96) {
      stop("a tile does not start at a multiple of 1024 bytes plus a step along k");
    }
  }

  // Offset of the 16 bytes that hold [mn][k] and the seven elements behind it, along k, or along mn when transposed.
  uint32_t piece(uint32_t mn, uint32_t k) const {
    const uint32_t at = transposed_ ? start_ + mn / 64 * leading_ + k / 8 * group_ + k % 8 * 128 + mn % 64 * 2
                                    : start_ + mn / 8 * group_ + mn % 8 * 128 + k * 2;
    return at ^ (at >> 3 & 0x70);  // bits 4-6 with bits 7-9
  }

  bool transposed() const { return transposed_; }

 private:
  uint32_t start_, leading_, group_;
  bool transposed_;
};

// `count` rows or columns of an operand from number `first` on, over one k-step of 16, as they were when first read.
class Operand {
 public:
  Operand() = default;
  Operand(const AsyncProxy& proxy, uint64_t descriptor, bool transposed, int first, int count)
      : bits_(descriptor), transposed_(transposed), first_(first), count_(count), elements_(16 * count) {
    visit([&](uint32_t offset, uint16_t* to) { std::memcpy(to, proxy.read(offset), 16); });
  }

  bool unchanged() {
    bool same = true;
    visit([&](uint32_t offset, uint16_t* was) { same &= std::memcmp(was, dynamic_smem() + offset, 16) == 0; });
    return same;
  }

  double operator()(int mn, int k) const {
    const uint32_t bits = elements_[transposed_ ? k * count_ + mn : 16 * mn + k];
    return bits_as<float>(bits << 16);
  }

 private:
  template <typename Visit>
  void visit(Visit each) {
    const Descriptor descriptor(bits_, transposed_);
    uint16_t* element = elements_.data();
    const int outer = transposed_ ? 16 : count_, inner = transposed_ ? count_ : 16;
    for (int i = 0; i < outer; ++i) {
      for (int j = 0; j < inner; j += 8, element += 8) {
        each(transposed_ ? descriptor.piece(first_ + j, i) : descriptor.piece(first_ + i, j), element);
      }
    }
  }

  uint64_t bits_ = 0;
  bool transposed_ = false;
  int first_ = 0, count_ = 0;
  std::vector<uint16_t> elements_;
};

// sums[16][n] (+)= a[16][16] b[16][n]: the products of BF16 are exact, and a k-step is rounded once. Where the machine
// has wide vectors they are used, with the same bits.
#if defined(__x86_64__) && !defined(__clang__)
__attribute__((target_clones("avx2", "default")))
#endif
inline void
multiply(float* sums, const double* a, const double* b, int n, bool add) {
  using Four = double __attribute__((vector_size(32), aligned(8)));
  const auto four = [](const double* p) { return *reinterpret_cast<const Four*>(p); };
  for (int row = 0; row < 16; row += 2) {
    for (int column = 0; column < n; column += 8) {
      Four s00 = {}, s01 = {}, s10 = {}, s11 = {};
      for (int k = 0; k < 16; ++k) {
        const Four b0 = four(b + k * n + column), b1 = four(b + k * n + column + 4);
        const double upper = a[16 * row + k], lower = a[16 * (row + 1) + k];
        s00 += upper * b0, s01 += upper * b1, s10 += lower * b0, s11 += lower * b1;
      }
      float *first = sums + row * n + column, *second = first + n;
      for (int i = 0; i < 4; ++i) {
        first[i] = static_cast<float>((add ? first[i] : 0.) + s00[i]);
        first[4 + i] = static_cast<float>((add ? first[4 + i] : 0.) + s01[i]);
        second[i] = static_cast<float>((add ? second[i] : 0.) + s10[i]);
        second[4 + i] = static_cast<float>((add ? second[4 + i] : 0.) + s11[i]);
      }
    }
  }
}

}  // namespace cuda_on_cpu
