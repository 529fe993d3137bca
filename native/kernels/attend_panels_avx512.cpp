// Products of blocks by vdpbf16ps: 6 rows by 64 columns of sums stay in registers.
#include "kernels/attend_panels.hpp"

namespace kvpool {
namespace {

struct Dots {
  static constexpr int kRows = 1;         // rows are padded to a multiple
  static constexpr int kDirectRows = 32;  // at most so many rows are not worth the packing of keys
  static constexpr int kChunk = 48;       // rows that take a step together: their scores stay in the first-level cache

  // What becomes of C; loops over sums are unrolled, so that they stay in registers.
  enum class Into { set, add, scaled, add_scaled };

  template <int M, int N, Into into>
  static void block(const uint16_t* a, int64_t lda, const uint32_t* b, int pairs, float* c, int64_t ldc,
                    const float* factor) {
    __m512 sums[M][N];
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n)
        sums[m][n] = into == Into::add ? _mm512_loadu_ps(c + m * ldc + n * 16) : _mm512_setzero_ps();
    for (int i = 0; i < pairs; ++i) {
      __m512bh bn[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n)
        bn[n] = reinterpret_cast<__m512bh>(_mm512_load_si512(b + int64_t{i} * kPanelColumns + n * 16));
#pragma GCC unroll 6
      for (int m = 0; m < M; ++m) {
        int32_t pair;
        std::memcpy(&pair, a + m * lda + 2 * i, 4);
        const auto am = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sums[m][n] = _mm512_dpbf16_ps(sums[m][n], bn[n], am);
      }
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        float* to = c + m * ldc + n * 16;
        if constexpr (into == Into::scaled) sums[m][n] = _mm512_mul_ps(sums[m][n], _mm512_load_ps(factor + n * 16));
        if constexpr (into == Into::add_scaled)
          sums[m][n] = _mm512_fmadd_ps(sums[m][n], _mm512_load_ps(factor + n * 16), _mm512_loadu_ps(to));
        _mm512_storeu_ps(to, sums[m][n]);
      }
  }

  template <int N, Into into>
  static void columns(const uint16_t* a, int64_t lda, int rows, const uint32_t* b, int pairs, float* c, int64_t ldc,
                      const float* factor) {
    for (; rows >= 6; rows -= 6, a += 6 * lda, c += 6 * ldc) block<6, N, into>(a, lda, b, pairs, c, ldc, factor);
    switch (rows) {
      case 5:
        return block<5, N, into>(a, lda, b, pairs, c, ldc, factor);
      case 4:
        return block<4, N, into>(a, lda, b, pairs, c, ldc, factor);
      case 3:
        return block<3, N, into>(a, lda, b, pairs, c, ldc, factor);
      case 2:
        return block<2, N, into>(a, lda, b, pairs, c, ldc, factor);
      case 1:
        return block<1, N, into>(a, lda, b, pairs, c, ldc, factor);
      default:
        return;
    }
  }

  template <int N>
  static void multiply(const uint16_t* a, int64_t lda, int rows, const uint32_t* b, int pairs, float* c, int64_t ldc,
                       const float* factor, bool add) {
    if (factor != nullptr) {
      const auto scaled = add ? columns<N, Into::add_scaled> : columns<N, Into::scaled>;
      scaled(a, lda, rows, b, pairs, c, ldc, factor);
    } else {
      const auto plain = add ? columns<N, Into::add> : columns<N, Into::set>;
      plain(a, lda, rows, b, pairs, c, ldc, factor);
    }
  }

  static void multiply(const uint16_t* a, int64_t lda, int rows, const uint32_t* b, int pairs, float* c, int64_t ldc,
                       int num_columns, const float* factor, bool add) {
    const auto wide = num_columns > 32 ? multiply<4> : multiply<2>;
    wide(a, lda, rows, b, pairs, c, ldc, factor, add);
  }

  // How often `dots` and `add_rows` of a step fetch ahead.
  static int direct_calls(int rows, int tokens, int v_dim) {
    return (rows + 3) / 4 * tokens / 4 + v_dim / kInner * tokens / 32;
  }

  // Scores of R rows with 16 / R tokens at a time, by dot products along rows.
  template <int R>
  static void dots_of(const uint16_t* q, int64_t ldq, const uint16_t* const* k, int dim, float* s, int64_t lds,
                      const float* factor, bool add, Ahead& ahead, int lines) {
    constexpr int T = 16 / R;
    for (int t = 0; t < kTile; t += T) {
      ahead.fetch(lines * T / 4);
      Vec acc[16] = {};
      for (int d = 0; d < dim; d += kInner) {
        __m512bh kt[T];
#pragma GCC unroll 16
        for (int j = 0; j < T; ++j) kt[j] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(k[t + j] + d));
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const auto qr = reinterpret_cast<__m512bh>(_mm512_loadu_si512(q + r * ldq + d));
#pragma GCC unroll 16
          for (int j = 0; j < T; ++j) acc[r * T + j] = _mm512_dpbf16_ps(acc[r * T + j], qr, kt[j]);
        }
      }
      alignas(64) float out[16];
      _mm512_store_ps(out, sums(acc));
      typedef float Part __attribute__((vector_size(4 * T), aligned(4), may_alias));
      for (int r = 0; r < R; ++r) {
        Part x = *reinterpret_cast<const Part*>(out + r * T);
        float* to = s + r * lds + t;
        if (factor != nullptr) x = x * *reinterpret_cast<const Part*>(factor + t);
        if (add) x = x + *reinterpret_cast<const Part*>(to);
        *reinterpret_cast<Part*>(to) = x;
      }
    }
  }

  static void dots(const uint16_t* q, int64_t ldq, int rows, const uint16_t* const* k, int dim, float* s, int64_t lds,
                   const float* factor, bool add, Ahead& ahead, int lines) {
    int r = 0;
    for (; r + 4 <= rows; r += 4) dots_of<4>(q + r * ldq, ldq, k, dim, s + r * lds, lds, factor, add, ahead, lines);
    for (; r + 2 <= rows; r += 2) dots_of<2>(q + r * ldq, ldq, k, dim, s + r * lds, lds, factor, add, ahead, lines);
    for (; r < rows; ++r) dots_of<1>(q + r * ldq, ldq, k, dim, s + r * lds, lds, factor, add, ahead, lines);
  }

  // 32 elements of the outputs of M rows; pairs of tokens are joined on the way.
  template <int M>
  static void add_block(const uint16_t* p, int64_t ldp, const uint16_t* const* v, int tokens, int d, float* o,
                        int64_t ldo) {
    const __m512i low = _mm512_load_si512(kPairOrder), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    __m512 sums[M][2];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      sums[m][0] = _mm512_loadu_ps(o + m * ldo + d);
      sums[m][1] = _mm512_loadu_ps(o + m * ldo + d + 16);
    }
    for (int t = 0; t < tokens; t += 2) {
      const __m512i x = _mm512_loadu_si512(v[t] + d), y = _mm512_loadu_si512(v[t + 1] + d);
      const auto b0 = reinterpret_cast<__m512bh>(_mm512_permutex2var_epi16(x, low, y));
      const auto b1 = reinterpret_cast<__m512bh>(_mm512_permutex2var_epi16(x, high, y));
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        int32_t pair;
        std::memcpy(&pair, p + m * ldp + t, 4);
        const auto a = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
        sums[m][0] = _mm512_dpbf16_ps(sums[m][0], b0, a);
        sums[m][1] = _mm512_dpbf16_ps(sums[m][1], b1, a);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      _mm512_storeu_ps(o + m * ldo + d, sums[m][0]);
      _mm512_storeu_ps(o + m * ldo + d + 16, sums[m][1]);
    }
  }

  // o[rows][dim] += p[rows][tokens] * v[tokens][dim].
  static void add_rows(const uint16_t* p, int64_t ldp, int rows, const uint16_t* const* v, int tokens, int dim,
                       float* o, int64_t ldo, Ahead& ahead, int lines) {
    using Block = void (*)(const uint16_t*, int64_t, const uint16_t* const*, int, int, float*, int64_t);
    static constexpr Block last[] = {nullptr,      add_block<1>, add_block<2>, add_block<3>,
                                     add_block<4>, add_block<5>, add_block<6>, add_block<7>};
    for (int d = 0; d < dim; d += kInner) {
      ahead.fetch(lines * tokens / 32);
      int r = 0;
      for (; r + 8 <= rows; r += 8) add_block<8>(p + r * ldp, ldp, v, tokens, d, o + r * ldo, ldo);
      if (r < rows) last[rows - r](p + r * ldp, ldp, v, tokens, d, o + r * ldo, ldo);
    }
  }
};

}  // namespace

bool fits_panels_avx512(const AttendArgs& a, int) { return fits_panels(a); }

void attend_panels_avx512(const AttendArgs& a, int item, int head_block, Scratch& scratch) {
  attend_panels<Dots>(a, item, head_block, scratch);
}

}  // namespace kvpool
