// nvfp4 for a few query rows, straight from the codes: one lookup makes 64 of them bytes, twice their value, and
// `vpdpbusd` multiplies 64 at a time. Queries and probabilities are whole numbers in two bytes, and each byte meets the
// codes on its own, exactly. Block scales multiply K's sums of a block, and V's probabilities.
//
// Included by *_avx512.cpp only.
#pragma once

#include <array>

#include "kernels/token_lanes_avx512.hpp"

namespace kvpool {
namespace {

struct Nvfp4Codes {};  // names the format

// K's codes are not negative: offset by 128. With low bytes of 7 bits this asks for no more than to start a block's sum
// from minus its queries: 128 (128 high + low) = 128 q.
constexpr int kCodeOffset = 128;
constexpr float kNvfp4MostQuery = 127 * 128 + 63;
// A block of a query: four dwords of high bytes, four of low ones, what the sum starts from; the rest is not used.
constexpr int kNvfp4QueryBytes = 64;

// Twice the values of E2M1 plus an offset, four times: the upper bits of an index are another code's.
constexpr std::array<uint8_t, 64> doubled_codes(int offset) {
  constexpr int magnitudes[8] = {0, 1, 2, 3, 4, 6, 8, 12};
  std::array<uint8_t, 64> t{};
  for (size_t i = 0; i < 64; ++i) t[i] = static_cast<uint8_t>(offset + (i & 8 ? -1 : 1) * magnitudes[i & 7]);
  return t;
}

// The scales of up to eight blocks of 16 tokens: four of a token in a lane of each vector.
inline void scale_words(const uint8_t* const* p, int block, int count, __m512i& low, __m512i& high) {
  const auto some = static_cast<__mmask16>(count >= 8 ? 0xff : (1 << count) - 1);
  const auto two = [&](int t) __attribute__((always_inline)) {
    const uint8_t *x = p[t] + block, *y = p[t + 1] + block;
    if (count < 8) return _mm_unpacklo_epi64(_mm_maskz_loadu_epi8(some, x), _mm_maskz_loadu_epi8(some, y));
    return _mm_castpd_si128(_mm_loadh_pd(_mm_castsi128_pd(_mm_loadu_si64(x)), reinterpret_cast<const double*>(y)));
  };
  __m512i v[2];
  for (int i = 0; i < 2; ++i) {
    v[i] = _mm512_inserti32x4(_mm512_castsi128_si512(two(8 * i)), two(8 * i + 2), 1);
    v[i] = _mm512_inserti32x4(_mm512_inserti32x4(v[i], two(8 * i + 4), 2), two(8 * i + 6), 3);
  }
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  low = _mm512_permutex2var_epi32(v[0], even, v[1]);
  high = _mm512_permutex2var_epi32(v[0], _mm512_add_epi32(even, _mm512_set1_epi32(1)), v[1]);
}

// E4M3 codes, neither negative nor NaN, in byte `i` of the lanes, as floats that are 2^120 times too small.
constexpr float kSmall = 0x1p120f;
inline __m512 small_scales(__m512i words, int i) {
  const __m512i at = _mm512_rolv_epi32(words, _mm512_set1_epi32((20 - 8 * i) & 31));
  return _mm512_castsi512_ps(_mm512_and_si512(at, _mm512_set1_epi32(0x07f00000)));
}

// Lanes in which a scale of a token is NaN.
inline __mmask16 nan_lanes(__m512i words) {
  const __m512i nan = _mm512_movm_epi8(_mm512_cmpeq_epi8_mask(words, _mm512_set1_epi8(0x7f)));
  return _mm512_test_epi32_mask(nan, nan);
}

// Whole numbers x[dim] of one row to its place in the queries of a head, where its blocks lie `step` bytes apart.
inline void place_nvfp4_query(const float* x, int dim, uint8_t* q, int64_t step) {
  for (int d = 0; d < dim; d += 16, q += step) {
    int32_t start = 0;
    for (int i = 0; i < 16; ++i) {
      const auto whole = static_cast<int32_t>(x[d + i]);
      const int32_t high = (whole + 64) >> 7;
      // A dword of codes holds eight elements: the even ones are looked up first.
      const int at = i / 8 * 8 + i % 2 * 4 + i % 8 / 2;
      q[at] = static_cast<uint8_t>(high);
      q[16 + at] = static_cast<uint8_t>(whole - 128 * high);
      start -= whole;
    }
    std::memcpy(q + 32, &start, sizeof(start));
  }
}

inline __m512i broadcast_dword(const uint8_t* p) { return _mm512_set1_epi32(*reinterpret_cast<const Dword*>(p)); }

inline __m512i add_products(__m512i sum, __m512i codes, const uint8_t* p) {  // see add_dword
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*reinterpret_cast<const Dword*>(p)));
  return sum;
}

// Scores of 16 tokens against B blocks, of which words[2 b] and words[2 b + 1] hold the codes, a token a lane.
template <int R, int B>
KVPOOL_INLINE void nvfp4_score_blocks(__m512i table, const __m512i* words, const uint8_t* q, const __m512* scale,
                                      __m512 (&acc)[R]) {
  __m512i codes[B][4], sum[B][R];
  const auto add = [&](int part) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
#pragma GCC unroll 2
      for (int b = 0; b < B; ++b)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
          sum[b][r] = add_products(sum[b][r], codes[b][i], q + (b * R + r) * kNvfp4QueryBytes + part + 4 * i);
  };
#pragma GCC unroll 2
  for (int b = 0; b < B; ++b) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      codes[b][2 * i] = _mm512_permutexvar_epi8(words[2 * b + i], table);
      codes[b][2 * i + 1] = _mm512_permutexvar_epi8(_mm512_srli_epi32(words[2 * b + i], 4), table);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sum[b][r] = broadcast_dword(q + (b * R + r) * kNvfp4QueryBytes + 32);
  }
  add(0);
#pragma GCC unroll 2
  for (int b = 0; b < B; ++b)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sum[b][r] = _mm512_slli_epi32(sum[b][r], 7);
  add(16);
#pragma GCC unroll 2
  for (int b = 0; b < B; ++b)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[b][r]), scale[b], acc[r]);
}

// s[r][t] = q[r] . k[t] for tokens [0, tokens), a token a lane. Queries: [block][R], see place_nvfp4_query.
template <int R>
inline void nvfp4_scores(const uint16_t* q, const CodeRows& k, int tokens, int dim, float* s, Stream& ahead) {
  alignas(64) static constexpr auto codes = doubled_codes(kCodeOffset);
  const __m512i table = _mm512_load_si512(codes.data());
  const int blocks = dim / 16;
  __m512i words[4];  // of the next blocks, loaded during the products of these
  const auto load = [&](int t, int b)
                        __attribute__((always_inline)) { token_dwords(k.data + t, 8 * b, dim / 2 - 8 * b, words); };
  load(0, 0);
  for (int t = 0; t < tokens; t += 16) {
    const auto* piece = reinterpret_cast<const uint8_t*>(q);
    __m512 acc[R];
    for (auto& a : acc) a = _mm512_setzero_ps();
    __mmask16 nan = 0;
    for (int b = 0; b < blocks; b += 8) {
      __m512i scales[2];
      scale_words(k.block_scale + t, b, blocks - b, scales[0], scales[1]);
      nan |= nan_lanes(scales[0]) | nan_lanes(scales[1]);
#pragma GCC unroll 4
      for (int i = 0; i < 8; i += 2) {
        if (b + i >= blocks) break;
        ahead.pass(16 * 32);
        const __m512i now[4] = {words[0], words[1], words[2], words[3]};
        if (b + i + 2 < blocks) {
          load(t, b + i + 2);
        } else if (t + 16 < tokens) {
          load(t + 16, 0);
        }
        const __m512 scale[2] = {small_scales(scales[i / 4], i % 4), small_scales(scales[i / 4], i % 4 + 1)};
        if (R <= 4 && b + i + 1 < blocks) {
          nvfp4_score_blocks<R, 2>(table, now, piece, scale, acc);
        } else {
          nvfp4_score_blocks<R, 1>(table, now, piece, scale, acc);
          if (b + i + 1 < blocks)
            nvfp4_score_blocks<R, 1>(table, now + 2, piece + R * kNvfp4QueryBytes, scale + 1, acc);
        }
        piece += 2 * R * kNvfp4QueryBytes;
      }
    }
    const __m512 unit = _mm512_mask_mov_ps(splat(kSmall), nan, splat(std::numeric_limits<float>::quiet_NaN()));
    for (int r = 0; r < R; ++r) _mm512_storeu_ps(s + r * kTile + t, _mm512_mul_ps(acc[r], unit));
  }
}

// Probabilities times the scales of two blocks, whole numbers in two bytes: of each four tokens the high bytes
// [block][token], then the low ones.
struct Nvfp4Probabilities {
  alignas(64) uint8_t bytes[4][kTile / 4][16];
};

// Scales of the blocks of a tile, see scale_words.
using Nvfp4Scales = __m512i[(kMaxDim + 127) / 128][kTile / 16][2];

// What the rows' numbers are multiples of: the largest probability times a token's largest scale becomes 2^16 - 1.
template <int R>
inline void nvfp4_units(const float* p, const Nvfp4Scales& scales, int tokens, int blocks, float (&inverse)[R],
                        float (&unit)[R]) {
  __m512 top[R];
#pragma GCC unroll 4
  for (auto& x : top) x = _mm512_setzero_ps();
  for (int t = 0; t < tokens; t += 16) {
    __m512i most = _mm512_setzero_si512();
    for (int b = 0; b < blocks; b += 8)
      most = _mm512_max_epu8(most, _mm512_max_epu8(scales[b / 8][t / 16][0], scales[b / 8][t / 16][1]));
    most = _mm512_max_epu8(most, _mm512_srli_epi32(most, 16));
    most = _mm512_max_epu8(most, _mm512_srli_epi32(most, 8));
    const __m512 scale = _mm512_mul_ps(small_scales(most, 0), splat(kSmall));
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) top[r] = _mm512_max_ps(top[r], _mm512_mul_ps(scale, _mm512_load_ps(p + r * kTile + t)));
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const float highest = _mm512_reduce_max_ps(top[r]), most = 65535.0f;
    inverse[r] = highest > 0x1p-100f ? most / highest : 0.0f;
    unit[r] = highest / (2 * most);  // codes are doubled
  }
}

// Probabilities, in units of the row's, of tokens [t, t + 16) and of blocks 2 pair and 2 pair + 1.
template <int R>
KVPOOL_INLINE void nvfp4_probabilities(const float (&p)[R][kTile], const Nvfp4Scales& scales, int t, int pair,
                                       Nvfp4Probabilities& out) {
  const __m512i apart = _mm512_broadcast_i32x4(_mm_set_epi8(14, 12, 10, 8, 6, 4, 2, 0, 15, 13, 11, 9, 7, 5, 3, 1));
  const __m512i words = scales[pair / 4][t / 16][pair % 4 / 2];
  const __m512 first = _mm512_mul_ps(small_scales(words, pair % 2 * 2), splat(kSmall));
  const __m512 second = _mm512_mul_ps(small_scales(words, pair % 2 * 2 + 1), splat(kSmall));
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const __m512 x = _mm512_load_ps(p[r] + t);
    const __m512i both =
        _mm512_packus_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(x, first)), _mm512_cvtps_epi32(_mm512_mul_ps(x, second)));
    _mm512_store_si512(out.bytes[r][t / 4], _mm512_shuffle_epi8(both, apart));
  }
}

// Sums of 32 elements in order, from even ones and odd ones whose lanes alternate between the two blocks.
inline void ordered_blocks(__m512 even, __m512 odd, __m512 (&out)[2]) {
  const __m512i first = _mm512_set_epi32(30, 14, 28, 12, 26, 10, 24, 8, 22, 6, 20, 4, 18, 2, 16, 0);
  out[0] = _mm512_permutex2var_ps(even, first, odd);
  out[1] = _mm512_permutex2var_ps(even, _mm512_add_epi32(first, _mm512_set1_epi32(1)), odd);
}

// Sums of 32 elements, or of 16 where `half`, from 32 pair on.
template <int R, bool half>
KVPOOL_INLINE void nvfp4_value_blocks(const Nvfp4Probabilities& p, const float (&unit)[R], const CodeRows& v,
                                      int tokens, int pair, float* o, int64_t pitch, int rows, Stream& ahead,
                                      int work) {
  alignas(64) static constexpr auto codes = doubled_codes(0);
  // Lane l: byte l / 2 of block l % 2 of four tokens.
  alignas(64) static constexpr auto places = [] {
    std::array<uint8_t, 64> place{};
    for (size_t i = 0; i < 64; ++i) place[i] = static_cast<uint8_t>(i % 4 * 16 + i / 4 % 2 * 8 + i / 8);
    return place;
  }();
  const __m512i table = _mm512_load_si512(codes.data()), order = _mm512_load_si512(places.data());
  const int at = 16 * pair;
  __m512i acc[R][2][2];
#pragma GCC unroll 4
  for (auto& row : acc)
    for (auto& part : row)
      for (auto& sum : part) sum = _mm512_setzero_si512();
  for (int t = 0; t < tokens; t += 16) {
    ahead.pass(work);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const int i = t + 4 * j;
      const uint8_t* const* x = v.data + i;
      const __m512i c = _mm512_permutexvar_epi8(order, load_four(x[0], x[1], x[2], x[3], at, half ? 8 : 16));
      const __m512i even = _mm512_permutexvar_epi8(c, table);
      const __m512i odd = _mm512_permutexvar_epi8(_mm512_srli_epi32(c, 4), table);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int part = 0; part < 2; ++part) {
          int64_t both;
          std::memcpy(&both, p.bytes[r][i / 4] + 8 * part, sizeof(both));
          const __m512i pr = _mm512_set1_epi64(both);
          acc[r][part][0] = _mm512_dpbusd_epi32(acc[r][part][0], pr, even);
          acc[r][part][1] = _mm512_dpbusd_epi32(acc[r][part][1], pr, odd);
        }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    if (r >= rows) return;
    __m512 sum[2], out[2];
    for (int i = 0; i < 2; ++i)
      sum[i] = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(acc[r][0][i], 8), acc[r][1][i]));
    ordered_blocks(sum[0], sum[1], out);
    float* to = o + r * pitch + 32 * pair;
    for (int i = 0; i < (half ? 1 : 2); ++i)
      _mm512_storeu_ps(to + 16 * i, _mm512_fmadd_ps(out[i], _mm512_set1_ps(unit[r]), _mm512_loadu_ps(to + 16 * i)));
  }
}

// The elements of blocks with a NaN scale become NaN for the rows that see them. Rows [first, first + rows).
__attribute__((noinline)) inline void spread_nan_scales(const Probabilities& p, const CodeRows& v, int tokens,
                                                        int blocks, float* o, int64_t pitch, int first, int rows) {
  for (int t = 0; t < tokens; ++t)
    for (int b = 0; b < blocks; ++b) {
      if (v.block_scale[t][b] != 0x7f) continue;
      for (int r = 0; r < rows; ++r)
        if (p.seen[(first + r) / p.group] >> t & 1)
          for (int i = 16 * b; i < 16 * b + 16; ++i) o[r * pitch + i] = std::numeric_limits<float>::quiet_NaN();
    }
}

// As values_of, for up to four rows from `first` on. `work`: what 16 tokens and 32 elements are to the stream.
template <int R>
inline void nvfp4_values(const Probabilities& all, int first, const CodeRows& v, int tokens, int dim, float* o,
                         int64_t pitch, int rows, Stream& ahead, int work) {
  const float* p = all.wide + first * kTile;
  const int blocks = (dim + 15) / 16;
  Nvfp4Scales scales;
  __mmask16 nan = 0;
  for (int b = 0; b < blocks; b += 8)
    for (int t = 0; t < tokens; t += 16) {
      __m512i(&words)[2] = scales[b / 8][t / 16];
      scale_words(v.block_scale + t, b, blocks - b, words[0], words[1]);
      nan |= nan_lanes(words[0]) | nan_lanes(words[1]);
    }
  if (nan != 0) {
    spread_nan_scales(all, v, tokens, blocks, o, pitch, first, rows < R ? rows : R);
    for (auto& some : scales)
      for (auto& words : some)
        for (__m512i& x : words) x = _mm512_maskz_mov_epi8(_mm512_cmpneq_epi8_mask(x, _mm512_set1_epi8(0x7f)), x);
  }
  float inverse[R], unit[R];
  nvfp4_units<R>(p, scales, tokens, blocks, inverse, unit);
  alignas(64) float x[R][kTile];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < tokens; t += 16)
      // Nothing becomes inf beside a scale of zero.
      _mm512_store_ps(
          x[r] + t,
          _mm512_min_ps(_mm512_mul_ps(_mm512_load_ps(p + r * kTile + t), _mm512_set1_ps(inverse[r])), splat(0x1p60f)));
  Nvfp4Probabilities bytes;
  for (int i = 0; 2 * i < blocks; ++i) {
    for (int t = 0; t < tokens; t += 16) nvfp4_probabilities<R>(x, scales, t, i, bytes);
    if (2 * i + 1 < blocks) {
      nvfp4_value_blocks<R, false>(bytes, unit, v, tokens, i, o, pitch, rows, ahead, work);
    } else {
      nvfp4_value_blocks<R, true>(bytes, unit, v, tokens, i, o, pitch, rows, ahead, work);
    }
  }
}

}  // namespace
}  // namespace kvpool
