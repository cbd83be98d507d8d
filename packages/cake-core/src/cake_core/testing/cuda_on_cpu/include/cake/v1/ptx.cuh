// The instructions of cake/v1/ptx.cuh in C++, for the cuda_runtime_api.h of the emulation.
#pragma once

#include "cuda_runtime_api.h"

namespace cake::ptx {

inline float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.f, x) : x; }
inline float ex2_approx_ftz(float x) { return flush(std::exp2(flush(x))); }
inline float rcp_approx_ftz(float x) { return flush(1.f / flush(x)); }

inline uint32_t to_bf16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if (f != f) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline uint32_t cvt_rn_bf16x2(float low, float high) { return to_bf16(high) << 16 | to_bf16(low); }

inline uint32_t cvt_rn_f16x2(float low, float high) {
  const _Float16 both[2] = {static_cast<_Float16>(low), static_cast<_Float16>(high)};
  uint32_t packed;
  std::memcpy(&packed, both, 4);
  return packed;
}
inline float2 cvt_f32_f16x2(uint32_t packed) {
  _Float16 both[2];
  std::memcpy(both, &packed, 4);
  return {static_cast<float>(both[0]), static_cast<float>(both[1])};
}

inline cuda_on_cpu::Gate& named_barrier(int id, int threads) {
  if (id < 0 || id > 15 || threads <= 0 || threads % 32 != 0) cuda_on_cpu::stop("no such named barrier");
  return cuda_on_cpu::cta->barriers[id];
}
inline void bar_sync(int id, int threads) { cuda_on_cpu::arrive(named_barrier(id, threads), threads, "barrier"); }
inline void bar_arrive(int id, int threads) { cuda_on_cpu::count(named_barrier(id, threads), threads, "barrier"); }

// A copy arrives as late as it may: in cp_async_wait, at some later __syncthreads, where an mbarrier counts it between
// any two turns of the lanes, or never. Until then its 16 bytes are NaN.
inline void cp_async_16(void* shared, const void* global, bool wanted) {
  cuda_on_cpu::check_shared(shared, 16);
  auto& copies = cuda_on_cpu::lane().open;
  copies.push_back({shared, wanted ? global : nullptr});
  std::memset(shared, 0xff, 16);
}
inline void cp_async_commit() {
  auto& lane = cuda_on_cpu::lane();
  lane.groups.push_back(std::exchange(lane.open, {}));
}
template <int kPending>
void cp_async_wait() {
  cuda_on_cpu::arrive_all_but(kPending);
}

inline void mbarrier_init(uint64_t* barrier, int count) {
  cuda_on_cpu::check_shared(barrier, 8);
  const uint32_t mark = cuda_on_cpu::mark_of_the_cta();
  if (count <= 0 || count > static_cast<int>(cuda_on_cpu::Mbarrier::kMost))
    cuda_on_cpu::stop("no count of an mbarrier");
  if (cuda_on_cpu::load(barrier).mark == mark) cuda_on_cpu::stop("an mbarrier is initialized twice");
  const auto arrivals = static_cast<uint64_t>(count);
  const cuda_on_cpu::Mbarrier word = {arrivals, arrivals, 0, mark};
  std::memcpy(static_cast<void*>(barrier), &word, 8);
}
inline void mbarrier_arrive(uint64_t* barrier) {
  cuda_on_cpu::check_shared(barrier, 8);
  if (const char* wrong = cuda_on_cpu::arrive_at(barrier)) cuda_on_cpu::stop(wrong);
}
inline void mbarrier_wait(uint64_t* barrier, int parity) {
  cuda_on_cpu::check_shared(barrier, 8);
  auto& lane = cuda_on_cpu::lane();
  for (;;) {
    const cuda_on_cpu::Mbarrier word = cuda_on_cpu::load(barrier);
    if (word.mark != cuda_on_cpu::mark_of_the_cta()) cuda_on_cpu::stop("an mbarrier is used before it is initialized");
    if (static_cast<int>(word.parity) != parity) return;
    lane.waits_for = barrier;
    swapcontext(&lane.context, &cuda_on_cpu::cta->scheduler);
  }
}
inline void cp_async_mbarrier_arrive(uint64_t* barrier) {
  cuda_on_cpu::check_shared(barrier, 8);
  cuda_on_cpu::lane().open.push_back({barrier, nullptr, true});
  ++cuda_on_cpu::cta->arrivals;
}

// A lane's row is read when the lane comes, so that rows that others have not written yet are seen; all have been read
// before any lane goes on, as by one instruction of the warp.
struct Row {
  uint16_t elements[8];
};
template <bool kTrans>
void load_matrices(const char* intrinsic, uint32_t (&r)[4], const void* shared) {
  cuda_on_cpu::check_shared(shared, 16);
  Row row;
  std::memcpy(&row, shared, 16);
  const auto rows = cuda_on_cpu::give(intrinsic, row);
  const int lane = cuda_on_cpu::cta->current % 32, pair = lane % 4 * 2, other = lane / 4;
  const auto element = [&](int i, int column) -> uint32_t {
    return kTrans ? rows(8 * i + column).elements[other] : rows(8 * i + other).elements[column];
  };
  for (int i = 0; i < 4; ++i) r[i] = element(i, pair) | element(i, pair + 1) << 16;
}
inline void ldmatrix_x4(uint32_t (&r)[4], const void* shared) { load_matrices<false>("ldmatrix", r, shared); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* shared) {
  load_matrices<true>("ldmatrix.trans", r, shared);
}

// All rows of the warp are written before any lane goes on.
template <bool kTrans>
void store_matrices(const char* intrinsic, void* shared, const uint32_t (&r)[4]) {
  cuda_on_cpu::check_shared(shared, 16);
  struct Values {
    uint32_t r[4];
  };
  const auto all = cuda_on_cpu::give(intrinsic, Values{{r[0], r[1], r[2], r[3]}});
  const int lane = cuda_on_cpu::cta->current % 32, matrix = lane / 8, row = lane % 8;
  Row out;
  for (int column = 0; column < 8; ++column) {  // lane l has [l / 4][2 (l % 4)] and the next, or that of the transpose
    const int from = kTrans ? 4 * column + row / 2 : 4 * row + column / 2, half = kTrans ? row % 2 : column % 2;
    out.elements[column] = static_cast<uint16_t>(all(from).r[matrix] >> 16 * half);
  }
  std::memcpy(shared, &out, 16);
  cuda_on_cpu::give("stmatrix, written", Values{});
}
inline void stmatrix_x4(void* shared, const uint32_t (&r)[4]) { store_matrices<false>("stmatrix", shared, r); }
inline void stmatrix_x4_trans(void* shared, const uint32_t (&r)[4]) {
  store_matrices<true>("stmatrix.trans", shared, r);
}

// The products of BF16 are exact; their sum over 16 is rounded once, into d.
struct Fragments {
  uint32_t a[4], b[2];
};
inline void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  const auto all = cuda_on_cpu::give("mma", Fragments{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}});
  const auto half = [](uint32_t pair, int which) -> double {
    return __uint_as_float(which == 0 ? pair << 16 : pair & 0xffff0000u);
  };
  const int lane = cuda_on_cpu::cta->current % 32;
  double sums[4] = {};
  for (int quad = 0; quad < 4; ++quad) {  // of lanes, which hold columns 2 quad, 2 quad + 1, and eight further
    const Fragments left = all(lane / 4 * 4 + quad);
    for (int column = 0; column < 2; ++column) {
      const Fragments right = all((lane % 4 * 2 + column) * 4 + quad);
      for (int row = 0; row < 2; ++row) {
        for (int k = 0; k < 4; ++k) {
          sums[2 * row + column] += half(left.a[row + k / 2 * 2], k % 2) * half(right.b[k / 2], k % 2);
        }
      }
    }
  }
  for (int i = 0; i < 4; ++i) d[i] = static_cast<float>(d[i] + sums[i]);
}

// The same of TF32, whose products are exact too.
inline void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  const auto all = cuda_on_cpu::give("mma.tf32", Fragments{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}});
  const auto number = [](uint32_t bits) -> double { return __uint_as_float(bits & 0xffffe000u); };
  const int lane = cuda_on_cpu::cta->current % 32;
  double sums[4] = {};
  for (int quad = 0; quad < 4; ++quad) {  // of lanes, which hold columns quad and quad + 4
    const Fragments left = all(lane / 4 * 4 + quad);
    for (int column = 0; column < 2; ++column) {
      const Fragments right = all((lane % 4 * 2 + column) * 4 + quad);
      for (int row = 0; row < 2; ++row) {
        for (int k = 0; k < 2; ++k) sums[2 * row + column] += number(left.a[row + 2 * k]) * number(right.b[k]);
      }
    }
  }
  for (int i = 0; i < 4; ++i) d[i] = static_cast<float>(d[i] + sums[i]);
}

template <int kRegisters>
void setmaxnreg_inc() {}
template <int kRegisters>
void setmaxnreg_dec() {}

template <typename T>
void store_if(T* address, T v, bool wanted) {
  if (wanted) *address = v;
}

inline void launch_dependents() {}
inline void wait_for_the_kernel_before() {}

inline void hold_memory() {}
template <int N>
void have(float (&)[N]) {}
inline void forget(int&) {}
inline void forget(uint4&) {}

}  // namespace cake::ptx
