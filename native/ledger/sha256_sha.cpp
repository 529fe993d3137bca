// SHA-256 with the SHA extensions. Source: Intel, "Intel SHA Extensions" (2013), round structure of section 4.
#include <immintrin.h>

#include "ledger/sha256.hpp"

namespace kvpool::ledger {
namespace {

alignas(16) constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

inline __attribute__((always_inline)) __m128i load(const uint8_t* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}

// One message on its way: the state as the instructions want it, and the last 16 words of the schedule.
struct Lane {
  __m128i abef, cdgh, abef_start, cdgh_start, w[4];

  inline __attribute__((always_inline)) void take(const uint32_t state[8]) {
    const uint8_t* p = reinterpret_cast<const uint8_t*>(state);
    const __m128i low = _mm_shuffle_epi32(load(p), 0xb1), high = _mm_shuffle_epi32(load(p + 16), 0x1b);
    abef = _mm_alignr_epi8(low, high, 8);
    cdgh = _mm_blend_epi16(high, low, 0xf0);
  }
  inline __attribute__((always_inline)) void begin(const uint8_t* data) {
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bll, 0x0405060700010203ll);
    abef_start = abef;
    cdgh_start = cdgh;
    for (int i = 0; i < 4; ++i) w[i] = _mm_shuffle_epi8(load(data + 16 * i), swap);
  }
  inline __attribute__((always_inline)) void rounds(int r, __m128i k) {  // rounds 4r .. 4r + 3
    const __m128i message = _mm_add_epi32(w[r & 3], k);
    cdgh = _mm_sha256rnds2_epu32(cdgh, abef, message);
    abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(message, 0x0e));
    if (r >= 12) return;
    const __m128i middle = _mm_alignr_epi8(w[(r + 3) & 3], w[(r + 2) & 3], 4);
    w[r & 3] =
        _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(w[r & 3], w[(r + 1) & 3]), middle), w[(r + 3) & 3]);
  }
  inline __attribute__((always_inline)) void end() {
    abef = _mm_add_epi32(abef, abef_start);
    cdgh = _mm_add_epi32(cdgh, cdgh_start);
  }
  inline __attribute__((always_inline)) void give(uint32_t state[8]) const {
    const __m128i low = _mm_shuffle_epi32(abef, 0x1b), high = _mm_shuffle_epi32(cdgh, 0xb1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(low, high, 0xf0));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(high, low, 8));
  }
};

inline __attribute__((always_inline)) __m128i round_constants(int r) {
  return _mm_load_si128(reinterpret_cast<const __m128i*>(kRound) + r);
}

void blocks_sha(uint32_t state[8], const uint8_t* data, size_t num_blocks) {
  Lane lane;
  lane.take(state);
  for (; num_blocks; --num_blocks, data += 64) {
    lane.begin(data);
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) lane.rounds(r, round_constants(r));
    lane.end();
  }
  lane.give(state);
}

void pair_sha(uint32_t state_a[8], const uint8_t* a, uint32_t state_b[8], const uint8_t* b) {
  Lane first, second;
  first.take(state_a);
  second.take(state_b);
  first.begin(a);
  second.begin(b);
#pragma GCC unroll 16
  for (int r = 0; r < 16; ++r) {
    const __m128i k = round_constants(r);
    first.rounds(r, k);
    second.rounds(r, k);
  }
  first.end();
  second.end();
  first.give(state_a);
  second.give(state_b);
}

}  // namespace

const Sha kShaExtensions = {blocks_sha, pair_sha};

}  // namespace kvpool::ledger
