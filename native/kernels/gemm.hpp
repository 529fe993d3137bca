// C[M, N] (+)= A[M, K] * B[K, N] in fp32 for tiles that fit in cache; N a multiple of the vector width.
#pragma once

#include "kernels/simd.hpp"

namespace kvpool {
namespace {

#if defined(__AVX512F__)
constexpr int kGemmRows = 6, kGemmVecs = 4;
#else
constexpr int kGemmRows = 4, kGemmVecs = 2;
#endif

template <int M, int NV, bool Accumulate>
inline void gemm_block(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int k) {
  Vec acc[M][NV];
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < NV; ++n) acc[m][n] = Accumulate ? load(c + m * ldc + n * W) : Vec{};
  for (int i = 0; i < k; ++i) {
    Vec bn[NV];
    for (int n = 0; n < NV; ++n) bn[n] = load(b + i * ldb + n * W);
    for (int m = 0; m < M; ++m) {
      const Vec am = splat(a[m * lda + i]);
      for (int n = 0; n < NV; ++n) acc[m][n] = fma(am, bn[n], acc[m][n]);
    }
  }
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < NV; ++n) store(c + m * ldc + n * W, acc[m][n]);
}

template <int NV, bool Accumulate>
inline void gemm_columns(int rows, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
                         int k) {
  int m = 0;
  for (; m + kGemmRows <= rows; m += kGemmRows)
    gemm_block<kGemmRows, NV, Accumulate>(a + m * lda, lda, b, ldb, c + m * ldc, ldc, k);
  switch (rows - m) {
    case 5:
      gemm_block<5, NV, Accumulate>(a + m * lda, lda, b, ldb, c + m * ldc, ldc, k);
      break;
    case 4:
      gemm_block<4, NV, Accumulate>(a + m * lda, lda, b, ldb, c + m * ldc, ldc, k);
      break;
    case 3:
      gemm_block<3, NV, Accumulate>(a + m * lda, lda, b, ldb, c + m * ldc, ldc, k);
      break;
    case 2:
      gemm_block<2, NV, Accumulate>(a + m * lda, lda, b, ldb, c + m * ldc, ldc, k);
      break;
    case 1:
      gemm_block<1, NV, Accumulate>(a + m * lda, lda, b, ldb, c + m * ldc, ldc, k);
      break;
    default:
      break;
  }
}

template <bool Accumulate>
inline void gemm(int rows, int columns, int k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
                 int64_t ldc) {
  int n = 0;
  for (; n + kGemmVecs * W <= columns; n += kGemmVecs * W)
    gemm_columns<kGemmVecs, Accumulate>(rows, a, lda, b + n, ldb, c + n, ldc, k);
  for (; n < columns; n += W) gemm_columns<1, Accumulate>(rows, a, lda, b + n, ldb, c + n, ldc, k);
}

// S[r][t] = sum_d q[r][d] * k[t][d] for few rows: dot products reduced W at a time. `tokens` and d multiples of W.
template <int R>
inline void dots(const float* q, int64_t ldq, const float* k, int64_t ldk, int tokens, int dim, float* s, int64_t lds) {
  constexpr int T = W / R;  // tokens at once
  for (int t = 0; t < tokens; t += T) {
    Vec acc[W] = {};
    for (int d = 0; d < dim; d += W) {
      Vec kt[T];
      for (int j = 0; j < T; ++j) kt[j] = load(k + (t + j) * ldk + d);
      for (int r = 0; r < R; ++r) {
        const Vec qr = load(q + r * ldq + d);
        for (int j = 0; j < T; ++j) acc[r * T + j] = fma(qr, kt[j], acc[r * T + j]);
      }
    }
    float out[W];
    store(out, sums(acc));
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < T; ++j) s[r * lds + t + j] = out[r * T + j];
  }
}

inline void scores_by_dots(const float* q, int64_t ldq, int rows, const float* k, int64_t ldk, int tokens, int dim,
                           float* s, int64_t lds) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) dots<4>(q + r * ldq, ldq, k, ldk, tokens, dim, s + r * lds, lds);
  for (; r + 2 <= rows; r += 2) dots<2>(q + r * ldq, ldq, k, ldk, tokens, dim, s + r * lds, lds);
  for (; r < rows; ++r) dots<1>(q + r * ldq, ldq, k, ldk, tokens, dim, s + r * lds, lds);
}

// out[d][t] = in[t][d], `tokens` a multiple of 16 at most 64, d a multiple of W.
inline void transpose(const float* in, int64_t ldi, int tokens, int dim, float* out, int64_t ldo) {
#if defined(__AVX512F__)
  for (int t = 0; t < tokens; t += 16)
    for (int d = 0; d < dim; d += 16) {
      __m512i r[16];
      for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(in + (t + i) * ldi + d);
      transpose_words(r);
      for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + (d + i) * ldo + t, r[i]);
    }
#else
  for (int d = 0; d < dim; d += W)
    for (int t = 0; t < tokens; ++t)
      for (int i = 0; i < W; ++i) out[(d + i) * ldo + t] = in[t * ldi + d + i];
#endif
}

}  // namespace
}  // namespace kvpool
