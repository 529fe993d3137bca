// The AMX instructions that kernels use, in plain C++ with the documented results: bf16 products, pairs added in order
// to an fp32 sum. Only for the native tests.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace kvpool {
namespace emulated {

struct State {
  bool configured = false;
  uint8_t rows[16], bytes[8][64 * 16];
  uint16_t row_bytes[16];
};

inline State& state() {
  thread_local State s;
  return s;
}

inline void load_config(const void* config) {
  const auto* p = static_cast<const uint8_t*>(config);
  State& s = state();
  if (p[0] != 1) __builtin_trap();  // the palette AMX has
  std::memcpy(s.row_bytes, p + 16, sizeof s.row_bytes);
  std::memcpy(s.rows, p + 48, sizeof s.rows);
  std::memset(s.bytes, 0, sizeof s.bytes);
  s.configured = true;
}

inline State& ready() {
  if (!state().configured) __builtin_trap();  // #UD on the real thing
  return state();
}

inline void release() { state().configured = false; }

inline void load(int tile, const void* from, int64_t stride) {
  State& s = ready();
  for (int r = 0; r < s.rows[tile]; ++r)
    std::memcpy(s.bytes[tile] + 64 * r, static_cast<const uint8_t*>(from) + r * stride, s.row_bytes[tile]);
}

inline void store(int tile, void* to, int64_t stride) {
  State& s = ready();
  for (int r = 0; r < s.rows[tile]; ++r)
    std::memcpy(static_cast<uint8_t*>(to) + r * stride, s.bytes[tile] + 64 * r, s.row_bytes[tile]);
}

inline void zero(int tile) { std::memset(ready().bytes[tile], 0, sizeof State::bytes / 8); }

inline float widen(const uint8_t* p) {
  uint32_t u = 0;
  std::memcpy(reinterpret_cast<uint8_t*>(&u) + 2, p, 2);
  float f;
  std::memcpy(&f, &u, 4);
  return std::fpclassify(f) == FP_SUBNORMAL ? 0.0f : f;  // denormals are zero to TDPBF16PS
}

// c[m][n] += sum over k of a[m][2k] * b[k][2n] + a[m][2k + 1] * b[k][2n + 1]
inline void dot_bf16(int c, int a, int b) {
  State& s = ready();
  for (int m = 0; m < s.rows[c]; ++m)
    for (int k = 0; k < s.row_bytes[a] / 4; ++k)
      for (int n = 0; n < s.row_bytes[c] / 4; ++n) {
        float sum;
        uint8_t* at = s.bytes[c] + 64 * m + 4 * n;
        const uint8_t *x = s.bytes[a] + 64 * m + 4 * k, *y = s.bytes[b] + 64 * k + 4 * n;
        std::memcpy(&sum, at, 4);
        sum += widen(x) * widen(y);
        sum += widen(x + 2) * widen(y + 2);
        std::memcpy(at, &sum, 4);
      }
}

}  // namespace emulated
}  // namespace kvpool

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) ::kvpool::emulated::load_config(config)
#define _tile_release() ::kvpool::emulated::release()
#define _tile_loadd(tile, from, stride) ::kvpool::emulated::load(tile, from, stride)
#define _tile_stored(tile, to, stride) ::kvpool::emulated::store(tile, to, stride)
#define _tile_zero(tile) ::kvpool::emulated::zero(tile)
#define _tile_dpbf16ps(c, a, b) ::kvpool::emulated::dot_bf16(c, a, b)
