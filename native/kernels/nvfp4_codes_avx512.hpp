// nvfp4 for a few query rows, straight from the codes. A word holds four of them, and one lookup widens a quarter of
// a row. Block scales never touch an element: all quarters have an element's block in the same lane, so that K's
// scale multiplies a product of a piece, and V's the probability that meets the piece.
//
// Included by *_avx512.cpp only.
#pragma once

#include <array>

#include "kernels/codes_avx512.hpp"

namespace kvpool {
namespace {

struct Nvfp4Codes {
  static constexpr int kDims = 64;  // elements in 32 bytes
  // Vector j has the elements 4 i + j.
  static constexpr int element(int i) { return i % 16 * 4 + i / 16; }

  // By the low five bits of a word, the highest of which is another code's.
  __m512i values = _mm512_set_epi64(0xc0c0c080c040c000, 0xbfc0bf80bf008000, 0x40c0408040404000, 0x3fc03f803f000000,
                                    0xc0c0c080c040c000, 0xbfc0bf80bf008000, 0x40c0408040404000, 0x3fc03f803f000000);

  __m512i widen(__m512i words, int quarter) const {
    return _mm512_permutexvar_epi16(quarter == 0 ? words : _mm512_srli_epi16(words, static_cast<unsigned>(4 * quarter)),
                                    values);
  }
};

// The floats of E4M3 codes, neither negative nor NaN, that stand in bits 16 to 22 of the lanes.
inline __m512 block_scales(__m512i c) {
  return _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(c, 4)), _mm512_set1_ps(0x1p120f));
}

// True when a block scale of the tile is NaN.
inline bool has_nan_scale(const Store& s, const Tile& tile, int head) {
  if (s.block_scale.base == nullptr) return false;
  const int64_t each = s.dim / 16;
  const __m512i nan = _mm512_set1_epi8(0x7f);
  __mmask64 found = 0;
  for (int j = 0; j < tile.num_runs; ++j) {
    const Run& run = tile.runs[j];
    const uint8_t* p = s.block_scale.at(run.block, head, run.offset);
    const bool dense = s.block_scale.stride_n == each;
    const int64_t row = dense ? each * run.count : each;
    for (int i = 0; i < (dense ? 1 : run.count); ++i, p += s.block_scale.stride_n)
      for (int64_t at = 0; at < row; at += 64)
        found |= _mm512_cmpeq_epi8_mask(load_part(p + at, static_cast<int>(row - at)), nan);
  }
  return found != 0;
}

// Up to eight scales of two tokens side by side.
inline __m128i scales_of_pair(const uint8_t* x, const uint8_t* y, int count) {
  if (count >= 8)
    return _mm_insert_epi64(_mm_loadu_si64(x),
                            *reinterpret_cast<const int64_t __attribute__((aligned(1), may_alias))*>(y), 1);
  const auto some = static_cast<__mmask16>((1 << count) - 1);
  return _mm_unpacklo_epi64(_mm_maskz_loadu_epi8(some, x), _mm_maskz_loadu_epi8(some, y));
}

// Places for vpermb and vpshufb: byte 2 of lane l is scale `of(l)`; the other bytes are masked or have bit 7.
template <class Of>
constexpr std::array<uint8_t, 64> scale_places(Of of) {
  std::array<uint8_t, 64> place{};
  for (size_t i = 0; i < 64; ++i) place[i] = static_cast<uint8_t>(i % 4 == 2 ? of(i / 4) : 0x80);
  return place;
}

// As scores_by_halves. No scale may be NaN.
template <int R>
inline void nvfp4_scores(const uint16_t* q, const CodeRows& k, int tokens, int dim, float* s, Stream& ahead,
                         int lines) {
  constexpr int P = padded_rows(R), T = 16 / P, U = R <= 4 ? 2 : 1, step = R * 128;
  const Nvfp4Codes codes;
  const int row = dim / 2;
  alignas(64) static constexpr auto first = scale_places([](size_t l) { return l / 8 * 8 + l % 8 / 2; });
  alignas(64) static constexpr auto second = scale_places([](size_t l) { return l / 8 * 8 + 4 + l % 8 / 2; });
  for (int t = 0; t < tokens; t += 2 * T) {
    ahead.fetch(2 * T * lines);
    __m512 acc[16];
#pragma GCC unroll 16
    for (__m512& a : acc) a = _mm512_setzero_ps();
    for (int at = 0; at < row; at += 64)
#pragma GCC unroll 16
      for (int j = 0; j < T; j += U) {
        const uint8_t *const *x = k.data + t + j, *const *y = x + T;
        __m512i both[U];
        for (int u = 0; u < U; ++u)
          both[u] = _mm512_castsi128_si512(
              scales_of_pair(k.block_scale[t + j + u] + at / 8, k.block_scale[t + T + j + u] + at / 8, (row - at) / 8));
        const auto piece = [&](int part, const std::array<uint8_t, 64>& place) __attribute__((always_inline)) {
          const uint16_t* qp = q + (at / 32 + part) * step;
          const int bytes = row - at - 32 * part;
          __m512i c[U];
          __m512 sum[U][R];
          for (int u = 0; u < U; ++u) c[u] = load_halves(x[u] + at + 32 * part, y[u] + at + 32 * part, bytes);
#pragma GCC unroll 4
          for (int n = 0; n < 4; ++n) {
            __m512i w[U];
            for (int u = 0; u < U; ++u) w[u] = codes.widen(c[u], n);
            for (int r = 0; r < R; ++r) {
              const __m512i qr = _mm512_load_si512(qp + (r * 4 + n) * 32);
              for (int u = 0; u < U; ++u) sum[u][r] = dot(n == 0 ? _mm512_setzero_ps() : sum[u][r], w[u], qr);
            }
          }
          for (int u = 0; u < U; ++u) {
            const __m512 scale = block_scales(
                _mm512_maskz_permutexvar_epi8(0x4444444444444444, _mm512_load_si512(place.data()), both[u]));
            for (int r = 0; r < R; ++r) acc[r * T + j + u] = _mm512_fmadd_ps(sum[u][r], scale, acc[r * T + j + u]);
          }
        };
        piece(0, first);
        if (row - at > 32) piece(1, second);
      }
    half_sums<P, R>(acc, s + t);
  }
}

// Probabilities times the block scales of 128 elements, as pairs of two tokens: [pair][R][16].
template <int R>
inline void scaled_pairs(const float* p, const CodeRows& v, int tokens, int d, int dim, uint32_t* out) {
  // Lanes alternate between the tokens; each block has two such pairs.
  alignas(64) static constexpr auto low = scale_places([](size_t l) { return l % 2 * 8 + l / 4; });
  alignas(64) static constexpr auto high = scale_places([](size_t l) { return l % 2 * 8 + 4 + l / 4; });
  for (int t = 0; t < tokens; t += 2) {
    const __m512i both = _mm512_broadcast_i32x4(
        scales_of_pair(v.block_scale[t] + d / 16, v.block_scale[t + 1] + d / 16, (dim - d) / 16));
    const __m512 a = block_scales(_mm512_shuffle_epi8(both, _mm512_load_si512(low.data())));
    const __m512 b = block_scales(_mm512_shuffle_epi8(both, _mm512_load_si512(high.data())));
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      double two;
      std::memcpy(&two, p + r * kTile + t, sizeof(two));
      const __m512 pr = _mm512_castpd_ps(_mm512_set1_pd(two));
      _mm512_store_si512(out + (t / 2 * R + r) * 16,
                         reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(_mm512_mul_ps(b, pr), _mm512_mul_ps(a, pr))));
    }
  }
}

// Sums of 128 elements from quarters: s[half][j] has in lane l the element 16 (l / 2) + 8 half + 4 (l % 2) + j.
inline void ordered_quarters(const __m512 (&s)[2][4], __m512 (&out)[8]) {
  __m512 u[2][4];
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(s[h][0], s[h][1]));
    const __m512d b = _mm512_castps_pd(_mm512_unpacklo_ps(s[h][2], s[h][3]));
    const __m512d c = _mm512_castps_pd(_mm512_unpackhi_ps(s[h][0], s[h][1]));
    const __m512d e = _mm512_castps_pd(_mm512_unpackhi_ps(s[h][2], s[h][3]));
    u[h][0] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
    u[h][1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    u[h][2] = _mm512_castpd_ps(_mm512_unpacklo_pd(c, e));
    u[h][3] = _mm512_castpd_ps(_mm512_unpackhi_pd(c, e));
  }
#pragma GCC unroll 2
  for (int m = 0; m < 2; ++m) {
    const __m512 w = u[0][2 * m], x = u[0][2 * m + 1], y = u[1][2 * m], z = u[1][2 * m + 1];
    const __m512 a = _mm512_shuffle_f32x4(w, x, 0x44), b = _mm512_shuffle_f32x4(w, x, 0xee);
    const __m512 c = _mm512_shuffle_f32x4(y, z, 0x44), e = _mm512_shuffle_f32x4(y, z, 0xee);
    out[m] = _mm512_shuffle_f32x4(a, c, 0x88);
    out[2 + m] = _mm512_shuffle_f32x4(a, c, 0xdd);
    out[4 + m] = _mm512_shuffle_f32x4(b, e, 0x88);
    out[6 + m] = _mm512_shuffle_f32x4(b, e, 0xdd);
  }
}

// As values_of, for up to four rows, with probabilities in fp32. No scale may be NaN.
template <int R>
inline void nvfp4_values(const float* p, const CodeRows& v, int tokens, int dim, float* o, int64_t pitch, int rows,
                         Stream& ahead, int lines) {
  const Nvfp4Codes codes;
  alignas(64) uint32_t pairs[kTile / 2 * R * 16];
  alignas(64) static constexpr auto words = [] {
    std::array<std::array<uint16_t, 32>, 2> w{};
    for (size_t h = 0; h < 2; ++h)
      for (size_t l = 0; l < 16; ++l) {
        w[h][2 * l] = static_cast<uint16_t>(l / 2 * 4 + l % 2 + 2 * h);
        w[h][2 * l + 1] = static_cast<uint16_t>(w[h][2 * l] + 32);
      }
    return w;
  }();
  for (int d = 0; d < dim; d += 128) {
    scaled_pairs<R>(p, v, tokens, d, dim, pairs);
    const int bytes = (dim - d) / 2;
    __m512 total[R][2][4];
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m512i order = _mm512_load_si512(words[static_cast<size_t>(h)].data());
      __m512 acc[R][4];
      for (int r = 0; r < R; ++r)
        for (int n = 0; n < 4; ++n) acc[r][n] = _mm512_setzero_ps();
      for (int t = 0; t < tokens; t += 2) {
        if (t % 16 == 0) ahead.fetch(lines);
        const __m512i c = _mm512_permutex2var_epi16(load_part(v.data[t] + d / 2, bytes), order,
                                                    load_part(v.data[t + 1] + d / 2, bytes));
        __m512i w[4];
        for (int n = 0; n < 4; ++n) w[n] = codes.widen(c, n);
        for (int r = 0; r < R; ++r) {
          const __m512i pr = _mm512_load_si512(pairs + (t / 2 * R + r) * 16);
          for (int n = 0; n < 4; ++n) acc[r][n] = dot(acc[r][n], w[n], pr);
        }
      }
      for (int r = 0; r < R; ++r)
        for (int n = 0; n < 4; ++n) total[r][h][n] = acc[r][n];
    }
    for (int r = 0; r < R && r < rows; ++r) {
      __m512 sums[8];
      ordered_quarters(total[r], sums);
      for (int n = 0; n < 8 && d + 16 * n < pitch; ++n) {
        float* to = o + r * pitch + d + 16 * n;
        _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), sums[n]));
      }
    }
  }
}

}  // namespace
}  // namespace kvpool
