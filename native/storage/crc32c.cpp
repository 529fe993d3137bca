// Three streams of the SSE4.2 instruction run side by side (latency 3, throughput 1) and are joined by multiplying the
// earlier ones with x^(8*length): the method of Mark Adler's crc32c.c (zlib licence), written anew.
#include "storage/crc32c.hpp"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace kvpool {
namespace {

constexpr uint32_t kPoly = 0x82f63b78;  // 0x1edc6f41 with its bits reversed
constexpr size_t kStream = 4096;        // bytes of one of three streams

using Table = std::array<std::array<uint32_t, 256>, 8>;

constexpr Table make_table() {
  Table t{};
  for (uint32_t n = 0; n < 256; ++n) {
    uint32_t c = n;
    for (int k = 0; k < 8; ++k) c = c & 1 ? (c >> 1) ^ kPoly : c >> 1;
    t[0][n] = c;
  }
  for (uint32_t n = 0; n < 256; ++n)
    for (size_t k = 1; k < 8; ++k) t[k][n] = t[0][t[k - 1][n] & 0xff] ^ (t[k - 1][n] >> 8);
  return t;
}

constexpr Table kTable = make_table();

uint64_t load64(const uint8_t* p) {
  uint64_t v;
  std::memcpy(&v, p, 8);
  return v;
}

// Advances a register over `size` bytes, without the inversions at both ends.
uint32_t portable(uint32_t c, const uint8_t* p, size_t size) {
  for (; size >= 8; size -= 8, p += 8) {  // little-endian, as everything here
    const uint64_t v = load64(p) ^ c;
    c = kTable[7][v & 0xff] ^ kTable[6][(v >> 8) & 0xff] ^ kTable[5][(v >> 16) & 0xff] ^ kTable[4][(v >> 24) & 0xff] ^
        kTable[3][(v >> 32) & 0xff] ^ kTable[2][(v >> 40) & 0xff] ^ kTable[1][(v >> 48) & 0xff] ^ kTable[0][v >> 56];
  }
  for (; size; --size, ++p) c = kTable[0][(c ^ *p) & 0xff] ^ (c >> 8);
  return c;
}

#if defined(__x86_64__)

// What kStream zero bytes do to each byte of a register; they act linearly, so four look-ups advance any register.
using Zeros = std::array<std::array<uint32_t, 256>, 4>;

const Zeros& zeros() {
  static const Zeros table = [] {
    static const std::array<uint8_t, kStream> nothing{};
    std::array<uint32_t, 32> bit{};
    for (int i = 0; i < 32; ++i) bit[i] = portable(uint32_t{1} << i, nothing.data(), kStream);
    Zeros t{};
    for (int k = 0; k < 4; ++k)
      for (uint32_t n = 0; n < 256; ++n)
        for (int i = 0; i < 8; ++i)
          if (n >> i & 1) t[k][n] ^= bit[8 * k + i];
    return t;
  }();
  return table;
}

uint32_t shift(const Zeros& t, uint32_t c) {
  return t[0][c & 0xff] ^ t[1][(c >> 8) & 0xff] ^ t[2][(c >> 16) & 0xff] ^ t[3][c >> 24];
}

__attribute__((target("sse4.2"))) uint32_t hardware(uint32_t start, const uint8_t* p, size_t size) {
  const Zeros& table = zeros();
  uint64_t a = start;
  for (; size >= 3 * kStream; size -= 3 * kStream, p += 3 * kStream) {
    uint64_t b = 0, c = 0;
    for (size_t i = 0; i < kStream; i += 8) {
      a = _mm_crc32_u64(a, load64(p + i));
      b = _mm_crc32_u64(b, load64(p + kStream + i));
      c = _mm_crc32_u64(c, load64(p + 2 * kStream + i));
    }
    a = shift(table, static_cast<uint32_t>(a)) ^ b;
    a = shift(table, static_cast<uint32_t>(a)) ^ c;
  }
  for (; size >= 8; size -= 8, p += 8) a = _mm_crc32_u64(a, load64(p));
  for (; size; --size, ++p) a = _mm_crc32_u8(static_cast<uint32_t>(a), *p);
  return static_cast<uint32_t>(a);
}

#endif

}  // namespace

uint32_t crc32c_portable(uint32_t crc, const uint8_t* data, size_t size) { return ~portable(~crc, data, size); }

uint32_t crc32c(uint32_t crc, const uint8_t* data, size_t size) {
#if defined(__x86_64__)
  static const bool fast = __builtin_cpu_supports("sse4.2");
  if (fast) return ~hardware(~crc, data, size);
#endif
  return crc32c_portable(crc, data, size);
}

}  // namespace kvpool
