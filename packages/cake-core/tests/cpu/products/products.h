#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace cake::products {

constexpr int kSum = 128;   // the k of the products here
constexpr int kRows = 64;   // of a warpgroup
constexpr int kTurns = 6;   // tiles of 64 x 64 that the relays hand over
constexpr int kStages = 2;  // of a relay

// What a kernel does wrong.
enum Fault {
  kNone,
  kNoProxyFence,
  kNoBarrier,
  kNoRegisterFence,
  kNoCommit,
  kNoWait,
  kNoSettle,
  kSettlesEarly,
  kOverwritesEarly,       // the tile, before the wait
  kOverwritesAndFences,   // the same, and tells the async proxy
  kOverwritesBehindWait,  // its own wait has ended, another warp's has not
  kWritesSums,            // in flight
  kWritesBehindFence,     // a sum, between fence and product
  kLaneMissing,
  kWarpMissing,
  kWarpDiffers,
  kMisaligned,    // by 16 bytes
  kInsideAGroup,  // by four rows
  kBehindTheEnd,
  kNoSwizzle,
  kOutside,  // a tile in another memory
  // of the relays
  kCount,        // of bar_arrive
  kCountOfBoth,  // of bar_arrive and bar_sync
  kParityOfFull,
  kParityOfEmpty,
  kNoInit,
  kTakesEarly,  // a stage, before it is full
  kOneArrivalLess,
  kBytes,        // of a box, fewer than it has
  kMatrix,       // of a box, behind the last one
  kNextTooEarly  // the next box comes to a tile that a product reads
};

struct Products {
  float* out;         // [warpgroups][64][n]
  const uint16_t* a;  // [warpgroups][64][kSum], BF16; of the relays [64][64 kTurns]
  const uint16_t* b;  // [n][kSum]; of the relays [n][64 kTurns]
  Fault fault;
};

enum Program { kProduct, kTwice, kPipeline, kNamedRelay, kMbarrierRelay, kWarp, kTf32, kBlocks, kBoxes };

constexpr int kBoxRows = 40;  // of a that the boxes' tensor has; a tile has zeros behind them

struct Variant {
  int n;
  bool a_columns, b_columns, registers;
};

void launch_products(Program program, const Variant& variant, int warpgroups, const Products& p, cudaStream_t stream);

}  // namespace cake::products
