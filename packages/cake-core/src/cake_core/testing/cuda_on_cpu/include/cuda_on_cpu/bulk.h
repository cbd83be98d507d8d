// Copies of whole blocks that one lane starts. A load arrives as late as copies that an mbarrier counts do, and until
// then its bytes are NaN. A store reads when its lane waits for it: what was not fenced when it was started, or was
// written since, ends the launch, and so does a CTA that ends before.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "cuda_on_cpu/copies.h"
#include "cuda_on_cpu/products.h"

namespace cuda_on_cpu {

inline void check_block(const void* shared, const void* global, int bytes) {
  check_shared(shared, 16);
  if (bytes <= 0 || bytes % 16 != 0) stop("a block to copy is no multiple of 16 bytes");
  if (reinterpret_cast<uintptr_t>(global) % 16 != 0) stop("a block in global memory is not aligned to 16 bytes");
  check_shared(static_cast<const char*>(shared) + bytes - 16, 16);
}

inline void load_bulk(void* shared, const void* global, int bytes, uint64_t* barrier) {
  check_block(shared, global, bytes);
  check_shared(barrier, 8);
  products();  // their proxy has to know of the bytes that come
  std::memset(shared, 0xff, bytes);
  auto& copies = lane().open;
  copies.push_back({shared, global, false, bytes, true});
  copies.push_back({barrier, nullptr, true});
  ++cta->arrivals;
}

// source(offset in the tile, not swizzled): where its 16 bytes come from, null for zeros.
template <typename Source>
void load_box(void* tile, int bytes, uint64_t* barrier, const Source& source) {
  check_shared(tile, 1024);
  if (offset_in_shared(tile) + bytes > cta->dynamic_bytes) stop("a box is behind the end of the dynamic shared memory");
  check_shared(barrier, 8);
  products();
  std::memset(tile, 0xff, bytes);
  auto& copies = lane().open;
  for (int at = 0; at < bytes; at += 16) {
    copies.push_back({static_cast<char*>(tile) + (at ^ (at >> 3 & 0x70)), source(at), false, 0, true});
  }
  copies.push_back({barrier, nullptr, true});
  ++cta->arrivals;
}

inline void store_bulk(void* global, const void* shared, int bytes) {
  check_block(shared, global, bytes);
  const AsyncProxy& proxy = products().proxy;
  const size_t from = offset_in_shared(shared);
  std::vector<char> seen(bytes);
  for (int at = 0; at < bytes; at += 16) std::memcpy(&seen[at], proxy.read(static_cast<uint32_t>(from + at)), 16);
  lane().stores.push_back({global, shared, std::move(seen)});
}

inline void commit_stores() {
  Lane& me = lane();
  me.store_groups.push_back(std::exchange(me.stores, {}));
}

inline void wait_for_stores(size_t pending) {
  auto& groups = lane().store_groups;
  for (; groups.size() > pending; groups.pop_front()) {
    for (const Store& store : groups.front()) {
      if (std::memcmp(store.seen.data(), store.from, store.seen.size()) != 0) {
        stop("shared memory is written before the bulk_wait_read of the store that reads it");
      }
      std::memcpy(store.to, store.seen.data(), store.seen.size());
    }
  }
}

}  // namespace cuda_on_cpu
