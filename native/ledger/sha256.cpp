#include "ledger/sha256.hpp"

#include <bit>
#include <cstring>

#include "cpu/features.hpp"

namespace kvpool::ledger {
namespace {

// FIPS 180-4, section 4.2.2.
constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t load_be(const uint8_t* p) {
  return uint32_t{p[0]} << 24 | uint32_t{p[1]} << 16 | uint32_t{p[2]} << 8 | uint32_t{p[3]};
}

template <class T>
void store_be(uint8_t* p, T v) {
  if constexpr (std::endian::native == std::endian::little) {
    v = sizeof(T) == 8 ? static_cast<T>(__builtin_bswap64(v))
                       : static_cast<T>(__builtin_bswap32(static_cast<uint32_t>(v)));
  }
  std::memcpy(p, &v, sizeof v);
}

void one_block(uint32_t state[8], const uint8_t* data) {
  uint32_t w[64];
  for (int i = 0; i < 16; ++i) w[i] = load_be(data + 4 * i);
  for (int i = 16; i < 64; ++i) {
    const uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
    const uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
  uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
  for (int i = 0; i < 64; ++i) {
    const uint32_t big1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const uint32_t t1 = h + big1 + ((e & f) ^ (~e & g)) + kRound[i] + w[i];
    const uint32_t big0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const uint32_t t2 = big0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
  }
  state[0] += a, state[1] += b, state[2] += c, state[3] += d;
  state[4] += e, state[5] += f, state[6] += g, state[7] += h;
}

void blocks_portable(uint32_t state[8], const uint8_t* data, size_t num_blocks) {
  for (size_t i = 0; i < num_blocks; ++i) one_block(state, data + 64 * i);
}

void pair_portable(uint32_t state_a[8], const uint8_t* a, uint32_t state_b[8], const uint8_t* b) {
  one_block(state_a, a);
  one_block(state_b, b);
}

constexpr Sha kPortable = {blocks_portable, pair_portable};

}  // namespace

const Sha& choose_sha(bool portable) {
#if defined(__x86_64__)
  if (!portable && has_sha()) return kShaExtensions;
#endif
  static_cast<void>(portable);
  return kPortable;
}

size_t sha256_pad(uint8_t* last, size_t rest, uint64_t message_bytes) {
  const size_t num_blocks = (rest + 9 + 63) / 64;
  std::memset(last + rest, 0, 64 * num_blocks - rest);
  last[rest] = 0x80;
  store_be(last + 64 * num_blocks - 8, message_bytes * 8);
  return num_blocks;
}

void sha256_store(const uint32_t state[8], uint8_t* out, size_t size) {
  for (size_t i = 0; i < size / 4; ++i) store_be(out + 4 * i, state[i]);
}

void sha256(const Sha& sha, const uint8_t* data, size_t size, uint8_t digest[32]) {
  uint32_t state[8];
  std::memcpy(state, kShaStart, sizeof state);
  const size_t whole = size / 64, rest = size % 64;
  uint8_t last[128];
  if (rest) std::memcpy(last, data + 64 * whole, rest);
  sha.blocks(state, data, whole);
  sha.blocks(state, last, sha256_pad(last, rest, size));
  sha256_store(state, digest, 32);
}

}  // namespace kvpool::ledger
