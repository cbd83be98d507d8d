// wgmma: asynchronous products of the four warps of a warpgroup.
//
// As in PTX a warp is what meets: each warp of a warpgroup reads its 16 rows of a and all of b for itself, at its own
// time, so that tiles need a barrier between the warps of one warpgroup as well, before the product and before they
// are overwritten. All lanes of a warp, and all warps of a warpgroup, have to ask for the same products in the same
// order. A lane does not stop at a product; its warp meets in wgmma_wait.
//
// The product reads its tiles when the first lane comes to it, and looks at them again in the wgmma_wait that ends it:
// a byte that changed between, or was not there yet, ends the launch. So do sums that ordinary code writes between.
// From the product on sums are NaN, until wgmma_wait has ended it and settle handed them out, whatever is read
// between. A register operand is its values at the product: that is what the compiler sees, and code that uses the
// array for something else is right, if slow. wgmma_fence: a product needs one after the last wgmma_wait that ended
// one, unless all it reads in registers is the sum of a product that is in flight; and registers that a product used
// before, in the same array, must not have changed since the last fence. Not modelled: other writes between fence and
// product.
#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "cuda_on_cpu/cta.h"
#include "cuda_on_cpu/operands.h"

namespace cuda_on_cpu {

struct Ask {  // for a product; the same for all 128 threads
  uint64_t a, b;
  int n;
  bool in_registers, trans_a, trans_b, add;
  long sums = 0;  // number of the lane's sums, those it has asked for before included
  bool operator==(const Ask& o) const {
    return a == o.a && b == o.b && n == o.n && in_registers == o.in_registers && trans_a == o.trans_a &&
           trans_b == o.trans_b && add == o.add && sums == o.sums;
  }
};

struct WarpProduct {
  Ask ask;
  int lanes = 0;  // that have asked
  Operand a, b;
  uint32_t fragments[32][4];
};

struct WarpSums {
  std::vector<float> values;  // [16][n]
  int lanes = 32;             // that have not done with them
};

struct WarpProducts {
  std::deque<WarpProduct> open;  // not ended
  long ended = 0;
  std::vector<long> groups;  // products asked for before each commit
  std::map<long, WarpSums> sums;
  long waits = 0, ending = 0;  // products ended behind the youngest wait
  uint32_t turns = 0;          // that its lanes let pass
};

struct Registers {  // an array of a lane: sums of products, or an operand
  char* at;
  size_t bytes;
  long sums = -1;  // -1: the values are in the array
  long last = -1;  // product
  std::vector<char> at_fence;
};

struct LaneProducts {
  long asked = 0, commits = 0, waits = 0, ended = 0, sums = 0;
  bool fenced = false;
  std::vector<Registers> known;
};

struct Products {  // of a CTA
  uint32_t serial = 0;
  AsyncProxy proxy;
  std::vector<LaneProducts> lanes;
  std::vector<WarpProducts> warps;
  std::vector<std::vector<Ask>> asked;  // per warpgroup
};

constexpr uint32_t kInFlight = 0x7fa5a5a5u;  // NaN, signaling: arithmetic that keeps it makes it a quiet one

inline bool in_flight(const Registers& registers) {
  for (size_t i = 0; i < registers.bytes; i += 4) {
    if (std::memcmp(registers.at + i, &kInFlight, 4) != 0) return false;
  }
  return true;
}

inline const char* wrong_at_the_end();

inline Products& products() {
  static Products all;
  if (all.serial != cta->serial) {
    all.serial = cta->serial;
    all.lanes.assign(cta->lanes.size(), {});
    all.warps.assign(cta->warp_gates.size(), {});
    all.asked.assign((cta->lanes.size() + 127) / 128, {});
    all.proxy.begin();
    cta->proxy_wrote = [](const void* at, size_t bytes) {
      all.proxy.wrote(static_cast<const char*>(at) - dynamic_smem(), bytes);
    };
    cta->at_end = wrong_at_the_end;
  }
  return all;
}
inline LaneProducts& lane_products() { return products().lanes[cta->current]; }
inline WarpProducts& warp_products() { return products().warps[cta->current / 32]; }

inline const char* wrong_at_the_end() {
  const Products& all = products();
  for (size_t lane = 0; lane < all.lanes.size(); ++lane) {
    if (all.lanes[lane].asked != static_cast<long>(all.asked[lane / 128].size())) {
      return "a warp has not asked for all products of its warpgroup";
    }
  }
  for (const WarpProducts& warp : all.warps) {
    if (!warp.open.empty()) return "a kernel ends before a wgmma_wait has ended its products";
  }
  return nullptr;
}

// Calls each(place in the 16 x n sums of the warp, register) for a lane's registers.
template <typename Each>
void each_sum(int n, Each each) {
  const int lane = cta->current % 32;
  for (int i = 0; i < n / 2; ++i) each((lane / 4 + i / 2 % 2 * 8) * n + i / 4 * 8 + lane % 4 * 2 + i % 2, i);
}

inline void done_with(Registers& registers) {
  auto& sums = warp_products().sums;
  if (registers.sums >= 0 && --sums.at(registers.sums).lanes == 0) sums.erase(registers.sums);
  registers.sums = -1;
}

inline Registers& registers_at(const void* address, size_t bytes) {
  LaneProducts& me = lane_products();
  char* at = static_cast<char*>(const_cast<void*>(address));
  for (size_t i = 0; i < me.known.size();) {
    Registers& it = me.known[i];
    if (it.at == at && it.bytes == bytes) return it;
    if (it.at < at + bytes && at < it.at + it.bytes) {  // the place of an array that is gone
      if (it.sums >= 0 && it.last >= me.ended) stop("a product's registers overlap the sums of one in flight");
      done_with(it);
      std::swap(it, me.known.back());
      me.known.pop_back();
    } else {
      ++i;
    }
  }
  me.known.push_back({at, bytes});
  return me.known.back();
}

inline void check_unchanged_since_fence(const Registers& registers) {
  if (!registers.at_fence.empty() && std::memcmp(registers.at_fence.data(), registers.at, registers.bytes) != 0) {
    stop("registers of a product are written after the wgmma_fence before it");
  }
}

// The sums that d, in memory, stands for: those of a product in flight or not settled, which go on, or new ones.
inline long sums_of(float* d, const Ask& ask) {
  LaneProducts& me = lane_products();
  Registers& it = registers_at(d, ask.n / 2 * sizeof(float));
  const bool running = it.sums >= 0 && it.last >= me.ended;
  if (running && !in_flight(it)) stop("sums are written before the wgmma_wait that ends their product");
  if (!me.fenced && (!running || ask.in_registers)) stop("a product without a wgmma_fence before it");
  if (!running && !(it.sums >= 0 && ask.add && in_flight(it))) {
    if (ask.add) check_unchanged_since_fence(it);
    done_with(it);
    it.sums = me.sums++;
    WarpSums& sums = warp_products().sums[it.sums];
    sums.values.resize(16 * ask.n);
    each_sum(ask.n, [&](int place, int i) { sums.values[place] = d[i]; });
    for (int i = 0; i < ask.n / 2; ++i) std::memcpy(d + i, &kInFlight, 4);
  }
  it.last = me.asked;
  return it.sums;
}

// One lane asks for a product. fragment: its part of a, or null.
inline void ask_for(float* d, const uint32_t* fragment, Ask ask) {
  Products& all = products();
  LaneProducts& me = lane_products();
  WarpProducts& warp = warp_products();
  const int group = cta->current / 128;
  if (static_cast<size_t>(group + 1) * 128 > cta->lanes.size()) stop("a product outside of a whole warpgroup");
  ask.sums = sums_of(d, ask);
  const size_t index = me.asked - warp.ended;
  if (index == warp.open.size()) {
    auto& asked = all.asked[group];
    if (me.asked == static_cast<long>(asked.size())) asked.push_back(ask);
    if (!(asked[me.asked] == ask)) stop("the warps of a warpgroup ask for different products");
    warp.open.emplace_back();
    WarpProduct& product = warp.open.back();
    product.ask = ask;
    if (!ask.in_registers) product.a = Operand(all.proxy, ask.a, ask.trans_a, cta->current / 32 % 4 * 16, 16);
    product.b = Operand(all.proxy, ask.b, ask.trans_b, 0, ask.n);
  }
  WarpProduct& product = warp.open[index];
  if (!(product.ask == ask)) stop("the lanes of a warp ask for different products");
  if (fragment != nullptr) {
    check_unchanged_since_fence(registers_at(fragment, 16));
    std::memcpy(product.fragments[cta->current % 32], fragment, 16);
  }
  ++product.lanes;
  ++me.asked;
}

inline void fence_registers() {
  LaneProducts& me = lane_products();
  me.fenced = true;
  for (Registers& it : me.known) it.at_fence.assign(it.at, it.at + it.bytes);
}

inline void commit_products() {
  LaneProducts& me = lane_products();
  auto& groups = warp_products().groups;
  if (me.commits == static_cast<long>(groups.size())) groups.push_back(me.asked);
  if (groups[me.commits++] != me.asked) stop("the lanes of a warp commit different products");
}

inline void end(WarpProduct& product, WarpSums& sums) {
  const int n = product.ask.n;
  if (product.lanes != 32) stop("not all lanes of a warp ask for a product");
  if (!product.b.unchanged() || (!product.ask.in_registers && !product.a.unchanged())) {
    stop("shared memory is written while a product reads it");
  }
  double a[16 * 16];
  static std::vector<double> b;
  b.resize(16 * n);
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      const uint32_t pair = product.fragments[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
      a[16 * row + k] =
          product.ask.in_registers ? bits_as<float>(k % 2 == 0 ? pair << 16 : pair & 0xffff0000u) : product.a(row, k);
    }
  }
  for (int column = 0; column < n; ++column) {
    for (int k = 0; k < 16; ++k) b[k * n + column] = product.b(column, k);
  }
  multiply(sums.values.data(), a, b.data(), n, product.ask.add);
}

// All groups but the youngest `pending` have ended.
inline void wait_for_products(int pending) {
  LaneProducts& me = lane_products();
  WarpProducts& warp = warp_products();
  Gate& gate = warp_gate(0xffffffffu);
  const long ended = me.commits > pending ? warp.groups[me.commits - pending - 1] : 0;
  if (me.waits++ == warp.waits) {
    ++warp.waits;
    warp.ending = ended;
    warp.turns = random_below(16) == 0 ? 24 : random_below(3);
  }
  if (warp.ending != ended) stop("the lanes of a warp wait for different products");
  // A product ends later in one warp than in another.
  for (uint32_t turn = 0; turn < warp.turns; ++turn) swapcontext(&lane().context, &cta->scheduler);
  if (gate.arrived == 31) {
    for (; warp.ended < ended; ++warp.ended, warp.open.pop_front()) {
      end(warp.open.front(), warp.sums.at(warp.open.front().ask.sums));
    }
  }
  arrive(gate, 32, "wgmma_wait");
  if (ended <= me.ended) return;
  me.ended = ended;
  me.fenced = false;  // from here on ordinary code may use the registers
}

inline void settle_sums(float* d, size_t bytes) {
  LaneProducts& me = lane_products();
  for (Registers& it : me.known) {
    const char* at = reinterpret_cast<const char*>(d);
    if (it.sums < 0 || it.at >= at + bytes || at >= it.at + it.bytes) continue;
    if (it.last >= me.ended) stop("sums are settled before the wgmma_wait that ends their product");
    if (it.at != at || it.bytes != bytes) stop("settle is not given the whole sums of a product");
    if (!in_flight(it)) stop("sums are written before they are settled");
    const WarpSums& sums = warp_products().sums.at(it.sums);
    each_sum(static_cast<int>(2 * bytes / sizeof(float)), [&](int place, int i) { d[i] = sums.values[place]; });
    done_with(it);
  }
}

}  // namespace cuda_on_cpu
