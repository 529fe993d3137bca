// One vector of floats for the instruction set of the including file. Included only by kernels_<isa>.cpp, inside
// whose unnamed namespace everything of these headers lives, so that no code of one set is linked for another.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/types.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define KVPOOL_WIDTH 16
#elif defined(__AVX2__)
#define KVPOOL_WIDTH 8
#else
#define KVPOOL_WIDTH 4
#endif

namespace kvpool {
namespace {

constexpr int W = KVPOOL_WIDTH;
typedef float Vec __attribute__((vector_size(4 * KVPOOL_WIDTH), may_alias));
typedef int32_t IVec __attribute__((vector_size(4 * KVPOOL_WIDTH), may_alias));
typedef float VecAny __attribute__((vector_size(4 * KVPOOL_WIDTH), aligned(4), may_alias));

inline Vec load(const float* p) { return *reinterpret_cast<const VecAny*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<VecAny*>(p) = v; }
inline Vec splat(float x) { return Vec{} + x; }

inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

// b where a is NaN, as the instruction has it.
inline Vec vmax(Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

inline float sum(Vec v) {
  float lanes[W], total = 0;
  store(lanes, v);
  for (int half = W / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  total = lanes[0];
  return total;
}

inline float largest(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(v);
#else
  float lanes[W], top;
  store(lanes, v);
  top = lanes[0];
  for (int i = 1; i < W; ++i) top = lanes[i] > top ? lanes[i] : top;
  return top;
#endif
}

#if defined(__AVX512F__)
constexpr float kLog2e = 1.44269504f;

// 2^x for x <= 127 within 3e-6 (minimax of degree 4 on [-1/2, 1/2]); 0 far below, NaN stays.
inline __m512 exp2_fast(__m512 x) {
  const __m512 n = _mm512_roundscale_ps(x, 0), r = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(9.570099483e-3f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.591786013e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.24024744888f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.69312181477f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.99999926143f));
  return _mm512_scalef_ps(p, n);
}

// 16 x 16 words transposed in place.
inline void transpose_words(__m512i (&r)[16]) {
  __m512i u[16];
  for (int i = 0; i < 8; ++i) {
    u[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    u[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(u[4 * i], u[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(u[4 * i], u[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(u[4 * i + 1], u[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(u[4 * i + 1], u[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    u[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    u[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    u[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    u[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(u[i], u[8 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(u[i], u[8 + i], 0xdd);
    r[4 + i] = _mm512_shuffle_i32x4(u[4 + i], u[12 + i], 0x88);
    r[12 + i] = _mm512_shuffle_i32x4(u[4 + i], u[12 + i], 0xdd);
  }
}

// Lanes of 16 vectors added down to two: their first and second halves of eight sums each, which `sums` adds.
KVPOOL_INLINE void eighths(const __m512 (&a)[16], __m512 (&d)[2]) {
  __m512 b[8], c[4];
  for (int i = 0; i < 8; ++i)
    b[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
  for (int i = 0; i < 4; ++i) {
    const __m512d x = _mm512_castps_pd(b[2 * i]), y = _mm512_castps_pd(b[2 * i + 1]);
    c[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
  for (int i = 0; i < 2; ++i)
    d[i] = _mm512_add_ps(_mm512_shuffle_f32x4(c[2 * i], c[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(c[2 * i], c[2 * i + 1], 0xdd));
}
#endif

// Lane i of the result is the sum of a[i]. A tree of pairwise adds of interleaved halves.
KVPOOL_INLINE Vec sums(const Vec (&a)[W]) {
#if defined(__AVX512F__)
  __m512 d[2];
  eighths(a, d);
  return _mm512_add_ps(_mm512_shuffle_f32x4(d[0], d[1], 0x88), _mm512_shuffle_f32x4(d[0], d[1], 0xdd));
#elif defined(__AVX2__)
  __m256 b[4], c[2];
  for (int i = 0; i < 4; ++i)
    b[i] = _mm256_add_ps(_mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]));
  for (int i = 0; i < 2; ++i) {
    const __m256d x = _mm256_castps_pd(b[2 * i]), y = _mm256_castps_pd(b[2 * i + 1]);
    c[i] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)), _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
  }
  return _mm256_add_ps(_mm256_permute2f128_ps(c[0], c[1], 0x20), _mm256_permute2f128_ps(c[0], c[1], 0x31));
#else
  Vec out;
  for (int i = 0; i < W; ++i) out[i] = sum(a[i]);
  return out;
#endif
}

// exp(x) for x <= 88 within 2 ulp (Cephes expf: n = round(x / ln 2), a polynomial of degree 6 on the rest);
// 0 below -87.3, -inf included.
inline Vec exp(Vec x) {
  const Vec low = splat(-87.3f);
  const IVec flushed = x < low;
  x = vmax(low, x);                      // in this order NaN stays
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec shifted = x * splat(1.44269504f) + magic;
  const Vec n = shifted - magic;
  Vec r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  Vec p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r + splat(1.0f));
  const IVec exponent = (reinterpret_cast<IVec>(shifted) - 0x4b400000 + 127) << 23;
  const Vec scaled = p * reinterpret_cast<Vec>(exponent);
  return flushed ? Vec{} : scaled;
}

// tanh(x) (Cephes tanhf).
inline Vec tanh(Vec x) {
  const Vec a = vmax(x, -x);
  const Vec z = x * x;
  Vec p = splat(-5.70498872745e-3f);
  p = fma(p, z, splat(2.06390887954e-2f));
  p = fma(p, z, splat(-5.37397155531e-2f));
  p = fma(p, z, splat(1.33314422036e-1f));
  p = fma(p, z, splat(-3.33332819422e-1f));
  const Vec small = fma(p * z, x, x);
  const Vec clipped = a < splat(44.0f) ? a : splat(44.0f);
  const Vec large = splat(1.0f) - splat(2.0f) / (exp(clipped + clipped) + splat(1.0f));
  const Vec sign = x < Vec{} ? -large : large;
  return a < splat(0.625f) ? small : sign;
}

inline constexpr int round_up(int x, int to) { return (x + to - 1) / to * to; }
inline int imin(int a, int b) { return a < b ? a : b; }
inline int imax(int a, int b) { return a > b ? a : b; }

}  // namespace
}  // namespace kvpool
