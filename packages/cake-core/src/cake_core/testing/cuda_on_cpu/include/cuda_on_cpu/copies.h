// Asynchronous copies and the mbarriers that count them.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda_on_cpu/cta.h"

namespace cuda_on_cpu {

// The word of an mbarrier: arrivals missing in this phase, arrivals of a phase, parity of the phase, and a mark of the
// CTA, without which it is no mbarrier.
struct Mbarrier {
  static constexpr uint32_t kMost = (1u << 20) - 1;
  uint64_t missing : 20, count : 20, parity : 1, mark : 23;
};
static_assert(sizeof(Mbarrier) == 8);

inline uint32_t mark_of_the_cta() { return 1 + cta->serial % 0x7ffffe; }  // never all ones, which fresh memory is

inline Mbarrier load(const void* barrier) {
  Mbarrier word;
  std::memcpy(&word, barrier, 8);
  return word;
}

// What is wrong, or null.
inline const char* arrive_at(void* barrier) {
  Mbarrier word = load(barrier);
  if (word.mark != mark_of_the_cta()) return "an mbarrier is used before it is initialized";
  if (--word.missing == 0) {
    word.missing = word.count;
    word.parity ^= 1;
    wake(barrier);
  }
  std::memcpy(barrier, &word, 8);
  return nullptr;
}

// The copies of a list, in order. What is wrong, or null.
template <typename Copies>
const char* finish(const Copies& copies) {
  for (const Copy& copy : copies) {
    if (copy.arrives) {
      --cta->arrivals;
      if (const char* wrong = arrive_at(copy.to)) return wrong;
    } else {
      const size_t bytes = copy.block == 0 ? 16 : copy.block;
      if (copy.from != nullptr) {
        std::memcpy(copy.to, copy.from, bytes);
      } else {
        std::memset(copy.to, 0, bytes);
      }
      if (copy.by_proxy) cta->proxy_wrote(copy.to, bytes);
    }
  }
  return nullptr;
}

// This lane's asynchronous copies arrive, oldest first, until `pending` groups are left.
inline void arrive_all_but(size_t pending) {
  auto& groups = lane().groups;
  for (; groups.size() > pending; groups.pop_front()) {
    if (const char* wrong = finish(groups.front())) stop(wrong);
  }
}

// The copies of some arrival of a list, which become its own: those of the async proxy arrive in any order, others
// behind all that were started before. What is wrong, or null.
inline const char* some_arrive(std::vector<Copy>& copies) {
  size_t arrivals = 0;
  for (const Copy& copy : copies) arrivals += copy.arrives;
  size_t skipped = random_below(static_cast<uint32_t>(arrivals)), begin = 0, end = 0;
  for (bool ordered = false;; ++end) {
    ordered |= !copies[end].arrives && !copies[end].by_proxy;
    if (!copies[end].arrives) continue;
    if (skipped-- == 0) break;
    if (!ordered) begin = end + 1;
  }
  const std::vector<Copy> arrived(copies.begin() + begin, copies.begin() + end + 1);
  copies.erase(copies.begin() + begin, copies.begin() + end + 1);
  return finish(arrived);
}

// Between the turns of the lanes: copies of some lane that an mbarrier counts arrive, whatever the lane does. What is
// wrong, or null.
inline const char* copies_arrive() {
  const auto counted = [](const std::vector<Copy>& copies) {
    for (const Copy& copy : copies) {
      if (copy.arrives) return true;
    }
    return false;
  };
  const size_t n = cta->lanes.size(), first = random_below(static_cast<uint32_t>(n));
  for (size_t i = 0; i < n; ++i) {
    Lane& lane = cta->lanes[(first + i) % n];
    size_t groups = lane.groups.size();
    const bool open = counted(lane.open);
    while (!open && groups > 0 && !counted(lane.groups[groups - 1])) --groups;
    if (!open && groups == 0) continue;
    // The groups stay, empty: they are counted by the waits to come.
    for (size_t g = 0; g < groups; ++g) {
      if (const char* wrong = finish(lane.groups[g])) return wrong;
      lane.groups[g].clear();
    }
    return open ? some_arrive(lane.open) : nullptr;
  }
  return nullptr;
}

}  // namespace cuda_on_cpu
