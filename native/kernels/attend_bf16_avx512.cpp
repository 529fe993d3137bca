// Attention with bf16 products and fp32 sums (vdpbf16ps) for bf16 queries: half the work of the fp32 path. Scores,
// softmax and sums stay fp32; probabilities are rounded to bf16 before they meet the values.
#include "kernels/bf16_rows_avx512.hpp"
#include "kernels/special.hpp"

namespace kvpool {
namespace {

// Rows of memory to fetch into the second-level cache while other work goes on, some at a time.
struct Stream {
  const uint8_t* row[kTile];
  int num_rows = 0, lines = 0, at = 0;

  void begin(const Store& s, const Tile* tile, int head) {
    num_rows = at = 0;
    if (tile == nullptr) return;
    // All containers of a row: the head's next token, or the next head, is never nearer than they reach.
    const int64_t bytes = s.data.stride_n < s.data.stride_h || s.num_heads == 1 ? s.data.stride_n : s.data.stride_h;
    lines = static_cast<int>((bytes + 63) / 64);
    for (int j = 0; j < tile->num_runs; ++j)
      for (int i = 0; i < tile->runs[j].count; ++i)
        row[num_rows++] = s.data.at(tile->runs[j].block, head, tile->runs[j].offset + i);
  }

  void fetch(int rows) {
    const int stop = imin(at + rows, num_rows);
    for (; at < stop; ++at)
      for (int i = 0; i < lines; ++i) _mm_prefetch(reinterpret_cast<const char*>(row[at] + 64 * i), _MM_HINT_T1);
  }
};

struct Bf16Work {
  // Queries that smoothing or rotation changed are the sum of two bf16 numbers, so that nothing is lost.
  bool two_parts;
  uint16_t *q, *q_rest;
  float* s_rest;
  uint16_t *k, *v, *p;      // [64][k_pitch], [64][v_pitch], [rows][64]
  uint32_t *keys, *values;  // pairs of dims by token [k_pitch / 2][64]; pairs of tokens by dim [32][v_pitch]
  Bf16Rows k_rows, v_rows;
  Stream k_ahead, v_ahead;
};

inline __m512 dot(__m512 acc, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

// Scores of R rows against tokens [0, tokens) by dot products.
template <int R>
inline void dots_bf16(const uint16_t* q, int64_t ldq, const Bf16Rows& k, int tokens, int dim, float* s, Stream& ahead) {
  constexpr int T = 16 / R;
  for (int t = 0; t < tokens; t += T) {
    ahead.fetch(T);
    Vec acc[16] = {};
    for (int d = 0; d < dim; d += 32) {
      __m512i kt[T];
      for (int j = 0; j < T; ++j) kt[j] = _mm512_loadu_si512(k.row[t + j] + d);
      for (int r = 0; r < R; ++r) {
        const __m512i qr = _mm512_loadu_si512(q + r * ldq + d);
        for (int j = 0; j < T; ++j) acc[r * T + j] = dot(acc[r * T + j], qr, kt[j]);
      }
    }
    alignas(64) float out[16];
    _mm512_store_ps(out, sums(acc));
    for (int r = 0; r < R; ++r) std::memcpy(s + r * kTile + t, out + r * T, T * sizeof(float));
  }
}

inline void scores_by_dots_bf16(const uint16_t* q, int64_t ldq, int rows, const Bf16Rows& k, int tokens, int dim,
                                float* s, Stream& ahead) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) dots_bf16<4>(q + r * ldq, ldq, k, tokens, dim, s + r * kTile, ahead);
  for (; r + 2 <= rows; r += 2) dots_bf16<2>(q + r * ldq, ldq, k, tokens, dim, s + r * kTile, ahead);
  for (; r < rows; ++r) dots_bf16<1>(q + r * ldq, ldq, k, tokens, dim, s + r * kTile, ahead);
}

// out[d / 2][t] = the pair (d, d + 1) of token t.
inline void transpose_pairs(const Bf16Rows& k, int tokens, int dim, uint32_t* out) {
  for (int t = 0; t < tokens; t += 16)
    for (int d = 0; d < dim; d += 32) {
      __m512i r[16], u[16];
      for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(k.row[t + i] + d);
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
      for (int i = 0; i < 16; ++i) _mm512_store_si512(out + (d / 2 + i) * kTile + t, r[i]);
    }
}

// The order of dims after two token rows were interleaved inside 128-bit lanes, and back.
struct Interleave {
  __m512i low = _mm512_set_epi32(27, 26, 25, 24, 19, 18, 17, 16, 11, 10, 9, 8, 3, 2, 1, 0);
  __m512i high = _mm512_set_epi32(31, 30, 29, 28, 23, 22, 21, 20, 15, 14, 13, 12, 7, 6, 5, 4);
  __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
  __m512i second = _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8);
};

inline void interleave_pairs(const Bf16Rows& v, int tokens, int dim, uint32_t* out, int pitch, Stream& ahead) {
  for (int t = 0; t < tokens; t += 2) {
    ahead.fetch(2);
    for (int d = 0; d < dim; d += 32) {
      const __m512i x = _mm512_loadu_si512(v.row[t] + d), y = _mm512_loadu_si512(v.row[t + 1] + d);
      uint32_t* to = out + int64_t{t / 2} * pitch + d;
      _mm512_store_si512(to, _mm512_unpacklo_epi16(x, y));
      _mm512_store_si512(to + 16, _mm512_unpackhi_epi16(x, y));
    }
  }
}

// C[M][16 N] (+)= sum over pairs of A[m][pair] * B[pair][..]; `Values`: C is in dim order, B interleaved, C is added
// to.
template <int M, int N, bool Values>
inline void pairs_block(const uint16_t* a, int64_t lda, const uint32_t* b, int64_t ldb, float* c, int64_t ldc, int k) {
  __m512 acc[M][N];
  const Interleave order;
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; n += 2) {
      if constexpr (Values) {
        const __m512 x = _mm512_loadu_ps(c + m * ldc + n * 16), y = _mm512_loadu_ps(c + m * ldc + n * 16 + 16);
        acc[m][n] = _mm512_permutex2var_ps(x, order.low, y);
        acc[m][n + 1] = _mm512_permutex2var_ps(x, order.high, y);
      } else {
        acc[m][n] = acc[m][n + 1] = _mm512_setzero_ps();
      }
    }
  for (int i = 0; i < k; ++i) {
    __m512i bn[N];
    for (int n = 0; n < N; ++n) bn[n] = _mm512_load_si512(b + i * ldb + n * 16);
    for (int m = 0; m < M; ++m) {
      int32_t pair;
      std::memcpy(&pair, a + m * lda + 2 * i, 4);
      const __m512i am = _mm512_set1_epi32(pair);
      for (int n = 0; n < N; ++n) acc[m][n] = dot(acc[m][n], bn[n], am);
    }
  }
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; n += 2) {
      const __m512 x = acc[m][n], y = acc[m][n + 1];
      _mm512_storeu_ps(c + m * ldc + n * 16, Values ? _mm512_permutex2var_ps(x, order.first, y) : x);
      _mm512_storeu_ps(c + m * ldc + n * 16 + 16, Values ? _mm512_permutex2var_ps(x, order.second, y) : y);
    }
}

template <int N, bool Values>
inline void pairs_columns(int rows, const uint16_t* a, int64_t lda, const uint32_t* b, int64_t ldb, float* c,
                          int64_t ldc, int k) {
  int m = 0;
  for (; m + 6 <= rows; m += 6) pairs_block<6, N, Values>(a + m * lda, lda, b, ldb, c + m * ldc, ldc, k);
  a += m * lda;
  c += m * ldc;
  switch (rows - m) {
    case 5:
      pairs_block<5, N, Values>(a, lda, b, ldb, c, ldc, k);
      break;
    case 4:
      pairs_block<4, N, Values>(a, lda, b, ldb, c, ldc, k);
      break;
    case 3:
      pairs_block<3, N, Values>(a, lda, b, ldb, c, ldc, k);
      break;
    case 2:
      pairs_block<2, N, Values>(a, lda, b, ldb, c, ldc, k);
      break;
    case 1:
      pairs_block<1, N, Values>(a, lda, b, ldb, c, ldc, k);
      break;
    default:
      break;
  }
}

// Columns in multiples of 64.
template <bool Values>
inline void gemm_pairs(int rows, int columns, const uint16_t* a, int64_t lda, const uint32_t* b, int64_t ldb, float* c,
                       int64_t ldc, int k) {
  for (int n = 0; n < columns; n += 64) pairs_columns<4, Values>(rows, a, lda, b + n, ldb, c + n, ldc, k);
}

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

// Scores of one row to probabilities in bf16, times the values' factors. Tokens not in `mask` become 0.
inline void softmax_row_bf16(const Work& w, const Bf16Work& b, const float* s, int tokens, uint64_t mask, uint16_t* p,
                             float& m, float& l, float* o) {
  const float log2e = 1.44269504f;
  __m512 x[4];
  const int n = tokens / 16;
  __m512 top = _mm512_set1_ps(kMinusInf);
  for (int i = 0; i < n; ++i) {
    x[i] = _mm512_mul_ps(_mm512_loadu_ps(s + 16 * i), _mm512_set1_ps(w.args->scale));
    if (b.k_rows.has_factor) x[i] = _mm512_mul_ps(x[i], _mm512_load_ps(b.k_rows.factor + 16 * i));
    if (w.args->softcap > 0) x[i] = splat(w.args->softcap) * tanh(Vec(x[i]) * splat(1.0f / w.args->softcap));
    x[i] = _mm512_mask_mov_ps(_mm512_set1_ps(kMinusInf), static_cast<__mmask16>(mask >> (16 * i)), x[i]);
    top = _mm512_max_ps(x[i], top);
  }
  const float highest = _mm512_reduce_max_ps(top);
  if (highest > m) {
    if (m != kMinusInf) {
      const float factor = __builtin_exp2f((m - highest) * log2e);
      const __m512 f = _mm512_set1_ps(factor);
      l *= factor;
      for (int d = 0; d < w.v_pitch; d += 16) _mm512_storeu_ps(o + d, _mm512_mul_ps(f, _mm512_loadu_ps(o + d)));
    }
    m = highest;
  }
  const __m512 shift = _mm512_set1_ps(m == kMinusInf ? 0.0f : -m * log2e);
  __m512 total = _mm512_setzero_ps();
  for (int i = 0; i < n; ++i) {
    const __mmask16 seen = static_cast<__mmask16>(mask >> (16 * i));
    const __m512 e = exp2_fast(_mm512_fmadd_ps(x[i], _mm512_set1_ps(log2e), shift));
    total = _mm512_add_ps(total, e);
    const __m512 scaled =
        b.v_rows.has_factor ? _mm512_maskz_mul_ps(seen, e, _mm512_load_ps(b.v_rows.factor + 16 * i)) : e;
    _mm256_store_si256(reinterpret_cast<__m256i*>(p + 16 * i), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(scaled)));
  }
  if (n % 2) _mm256_store_si256(reinterpret_cast<__m256i*>(p + 16 * n), _mm256_setzero_si256());
  l += _mm512_reduce_add_ps(total);
}

inline bool rows_have_nonfinite(const Bf16Rows& v, uint64_t tokens, int dim) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  for (; tokens != 0; tokens &= tokens - 1) {
    const uint16_t* row = v.row[__builtin_ctzll(tokens)];
    for (int d = 0; d < dim; d += 32)
      if (_mm512_cmpeq_epi16_mask(_mm512_and_si512(_mm512_loadu_si512(row + d), exponent), exponent)) return true;
  }
  return false;
}

inline void load_rows(Work& w, Bf16Work& b, const Tile& tile, int h) {
  const AttendArgs& a = *w.args;
  bf16_rows(*a.k[0], tile, w.head + h, b.k, w.k_pitch, b.k_rows);
  if (w.shares_kv()) {
    b.v_rows = b.k_rows;
  } else {
    bf16_rows(*a.v, tile, w.head + h, b.v, w.v_pitch, b.v_rows);
  }
}

inline void scores_bf16(Work& w, Bf16Work& b, const uint16_t* q, int tokens, float* s) {
  if (w.rows <= kDotRows) {
    scores_by_dots_bf16(q, w.k_pitch, w.rows, b.k_rows, tokens, w.k_pitch, s, b.k_ahead);
  } else {
    gemm_pairs<false>(w.rows, kTile, q, w.k_pitch, b.keys, kTile, s, kTile, w.k_pitch / 2);
  }
}

inline void attend_tile_bf16(Work& w, Bf16Work& b, const Tile& tile, int h, uint64_t all, uint64_t any) {
  const int tokens = round_up(64 - __builtin_clzll(any), 16);
  load_rows(w, b, tile, h);
  const bool last = h + 1 == w.num_heads;
  b.k_ahead.begin(*w.args->k[0], last ? w.ahead : &tile, w.head + (last ? 0 : h + 1));
  b.v_ahead.begin(*w.args->v, last ? w.ahead : &tile, w.head + (last ? 0 : h + 1));
  if (all != any && rows_have_nonfinite(b.v_rows, any & ~all, w.v_pitch)) {
    attend_tile(w, tile, h, all, any);  // keeps what a row does not see out of its sums
    return;
  }
  if (w.rows > kDotRows) transpose_pairs(b.k_rows, tokens, w.k_pitch, b.keys);
  scores_bf16(w, b, b.q + int64_t{h} * w.rows * w.k_pitch, tokens, w.s);
  if (b.two_parts) {
    scores_bf16(w, b, b.q_rest + int64_t{h} * w.rows * w.k_pitch, tokens, b.s_rest);
    for (int i = 0; i < w.rows * kTile; i += W) store(w.s + i, load(w.s + i) + load(b.s_rest + i));
  }
  for (int r = 0; r < w.rows; ++r) {
    const int64_t at = int64_t{h} * w.rows + r;
    softmax_row_bf16(w, b, w.s + int64_t{r} * kTile, tokens, w.masks[r / w.group], b.p + int64_t{r} * kTile, w.m[at],
                     w.l[at], w.output(h, r));
  }
  interleave_pairs(b.v_rows, tokens, w.v_pitch, b.values, w.v_pitch, b.v_ahead);
  gemm_pairs<true>(w.rows, w.v_pitch, b.p, kTile, b.values, w.v_pitch, w.output(h, 0), w.v_pitch, tokens / 2);
}

inline void carve_bf16(Work& w, Bf16Work& b, Scratch& scratch) {
  b.two_parts = w.args->k[0]->smoothing != nullptr || w.args->k[0]->rotation;
  const int64_t queries = int64_t{w.num_heads} * w.rows * w.k_pitch * 2, scores = int64_t{w.rows} * kTile;
  const int64_t k = int64_t{kTile} * w.k_pitch * 2, v = int64_t{kTile} * w.v_pitch * 2;
  uint8_t* p = carve(w, scratch, 2 * queries + scores * 4 + scores * 2 + 2 * k + 2 * v);
  const auto take = [&p](auto*& place, int64_t bytes) {
    place = reinterpret_cast<std::remove_reference_t<decltype(place)>>(p);
    p += bytes;
  };
  take(b.q, queries);
  take(b.q_rest, queries);
  take(b.s_rest, scores * 4);
  take(b.p, scores * 2);
  take(b.k, k);
  take(b.keys, k);
  take(b.v, v);
  take(b.values, v);
}

// Queries in bf16 without the scale, which multiplies the scores: a bf16 query stays exact.
inline void begin_bf16(Work& w, Bf16Work& b) {
  begin(w);  // the fp32 queries serve the tiles that fall back
  const AttendArgs& a = *w.args;
  alignas(64) float x[kMaxDim + kRowPitch];
  for (int h = 0; h < w.num_heads; ++h)
    for (int r = 0; r < w.rows; ++r) {
      load_row(a.q.at(query_row(w, r), query_head(w, h, r)), a.q.dtype, w.k_dim, x);
      to_query(*a.k[0], w.head + h, x);
      for (int i = w.k_dim; i < w.k_pitch; ++i) x[i] = 0;
      const int64_t at = (int64_t{h} * w.rows + r) * w.k_pitch;
      for (int i = 0; i < w.k_pitch; ++i) {
        b.q[at + i] = f32_to_bf16(x[i]);
        if (b.two_parts) b.q_rest[at + i] = f32_to_bf16(x[i] - bf16_to_f32(b.q[at + i]));
      }
    }
}

}  // namespace

bool fits_bf16_avx512(const AttendArgs& a) {
  return a.q.dtype == DType::bf16 && a.num_k == 1 && has_bf16_rows(*a.k[0]) && has_bf16_rows(*a.v);
}

void attend_bf16_avx512(const AttendArgs& a, int item, int head_block, Scratch& scratch) {
  Bf16Work b;
  each_pass(a, item, head_block, kRowPitch, [&](Work& w) {
    carve_bf16(w, b, scratch);
    begin_bf16(w, b);
    walk(w, [&](Work& w, const Tile& tile, int h, uint64_t all, uint64_t any) {
      attend_tile_bf16(w, b, tile, h, all, any);
    });
    end(w);
  });
}

}  // namespace kvpool
