// The tile registers of AMX: eight of 16 rows of 64 bytes, used by the compiler's intrinsics `_tile_*`. Included by
// *_amx.cpp only, whose code runs only where `best_isa()` is amx: there the operating system granted the registers.
//
// With KVPOOL_EMULATE_TILES (the native tests) the intrinsics are plain C++, so that the same source runs on any CPU.
//
// Source: Intel Architecture Instruction Set Extensions Programming Reference, chapter 3.
#pragma once

#include <immintrin.h>

#include <cstdint>

#if defined(KVPOOL_EMULATE_TILES)
#include "tests/emulated_tiles.hpp"
#endif

namespace kvpool {
namespace {

// Palette 1, every register at its full size. Held while a thread uses them.
class Tiles {
 public:
  Tiles() {
    for (int i = 0; i < 8; ++i) {
      config_.bytes[i] = 64;
      config_.rows[i] = 16;
    }
    _tile_loadconfig(&config_);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

 private:
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};  // of a row
    uint8_t rows[16] = {};
  };
  static_assert(sizeof(Config) == 64);
  Config config_;
};

}  // namespace
}  // namespace kvpool
