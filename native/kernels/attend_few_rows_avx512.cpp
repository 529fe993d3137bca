// Attention with bf16 products and fp32 sums (vdpbf16ps) for bf16 queries: half the work of the fp32 path. Scores,
// softmax and sums stay fp32; probabilities are rounded to bf16 before they meet the values.
#include "kernels/few_rows_avx512.hpp"
#include "kernels/special.hpp"

namespace kvpool {
namespace {

constexpr int kMaxPiece = 128;  // elements the kernels of a format take at a time, at most

struct Bf16Work {
  FewRows keys, values;  // what serves K and V
  // Queries that maps changed are the sum of two bf16 numbers, so that nothing is lost.
  bool two_parts;
  uint16_t *q, *q_rest, *p;  // [heads][num_queries], in the order of `keys`; [kFewRows][64]
  float *s, *s_rest;         // [kFewRows][64]
  int num_queries;           // numbers that one head's queries are, padding included
  alignas(64) float k_factor[kTile];
  CodeRows k_codes, v_codes;
  Stream ahead;
};

// The factors of a tile's scores, in units of log2: of one row's softmax, shared by all rows.
inline void begin_scores(const Work& w, Bf16Work& b) {
  const __m512 unit = _mm512_set1_ps(w.args->softcap > 0 ? w.args->scale : w.args->scale * kLog2e);
  for (int i = 0; i < kTile; i += 16)
    _mm512_store_ps(b.k_factor + i,
                    b.k_codes.has_factor ? _mm512_mul_ps(unit, _mm512_load_ps(b.k_codes.factor + i)) : unit);
}

// Scores of one row to probabilities, times the values' factors: in bf16, or in place. Tokens not in `mask` become 0.
// The maximum is renewed only when a score passes it by 2^8: neither sum nor output can overflow before that.
template <int N>
inline void softmax_row_bf16(const Work& w, const float* k_factor, float* s, uint64_t mask, const float* v_factor,
                             bool wide, uint16_t* p, float& m, float& l, float* o) {
  __m512 x[N];
  const __m512 limit = _mm512_set1_ps(m * kLog2e + 8.0f);
  const float cap = w.args->softcap;
  __mmask16 over = 0;
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) {
    x[i] = _mm512_mul_ps(_mm512_loadu_ps(s + 16 * i), _mm512_load_ps(k_factor + 16 * i));
    if (cap > 0) x[i] = splat(cap * kLog2e) * tanh(Vec(x[i]) * splat(1.0f / cap));
    x[i] = _mm512_mask_mov_ps(_mm512_set1_ps(kMinusInf), static_cast<__mmask16>(mask >> (16 * i)), x[i]);
    over |= _mm512_cmp_ps_mask(x[i], limit, _CMP_GT_OQ);
  }
  if (over != 0) {
    __m512 top = _mm512_set1_ps(kMinusInf);
    for (int i = 0; i < N; ++i) top = _mm512_max_ps(x[i], top);  // in this order NaN is passed over
    const float highest = _mm512_reduce_max_ps(top) * (1.0f / kLog2e);
    if (m != kMinusInf) {
      const float factor = __builtin_exp2f((m - highest) * kLog2e);
      const __m512 f = _mm512_set1_ps(factor);
      l *= factor;
      for (int d = 0; d < w.v_pitch; d += 16) _mm512_storeu_ps(o + d, _mm512_mul_ps(f, _mm512_loadu_ps(o + d)));
    }
    m = highest;
  }
  const __m512 shift = _mm512_set1_ps(m == kMinusInf ? 0.0f : m * kLog2e);
  __m512 total = _mm512_setzero_ps();
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) {
    const __m512 e = exp2_fast(_mm512_sub_ps(x[i], shift));
    total = _mm512_add_ps(total, e);
    const __m512 scaled = _mm512_maskz_mul_ps(static_cast<__mmask16>(mask >> (16 * i)), e,
                                              v_factor != nullptr ? _mm512_load_ps(v_factor + 16 * i) : splat(1.0f));
    if (wide) {
      _mm512_store_ps(s + 16 * i, scaled);
    } else {
      _mm256_store_si256(reinterpret_cast<__m256i*>(p + 16 * i), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(scaled)));
    }
  }
  l += _mm512_reduce_add_ps(total);
}

template <int N>
inline void softmax_rows_bf16(Work& w, const Bf16Work& b, int h, const float* v_factor) {
  for (int r = 0; r < w.rows; ++r) {
    const int64_t at = int64_t{h} * w.rows + r;
    softmax_row_bf16<N>(w, b.k_factor, b.s + int64_t{r} * kTile, w.masks[r / w.group], v_factor, b.values.wide,
                        b.p + int64_t{r} * kTile, w.m[at], w.l[at], w.output(h, r));
  }
}

inline void softmax_bf16(Work& w, const Bf16Work& b, int h, int tokens, const float* v_factor) {
  switch (tokens / 16) {
    case 1:
      return softmax_rows_bf16<1>(w, b, h, v_factor);
    case 2:
      return softmax_rows_bf16<2>(w, b, h, v_factor);
    case 3:
      return softmax_rows_bf16<3>(w, b, h, v_factor);
    default:
      return softmax_rows_bf16<4>(w, b, h, v_factor);
  }
}

// True when a token of the tile that some row does not see holds NaN or inf: zero times it would reach that row.
inline bool hides_nonfinite(const Work& w, const Tile& tile, int h, uint64_t all) {
  const Store& v = *w.args->v;
  const auto decode = codec_functions(v).decode_run;
  alignas(64) float x[kMaxDim];
  for (int j = 0; j < tile.num_runs; ++j) {
    const Run& run = tile.runs[j];
    for (int i = 0; i < run.count; ++i) {
      if (all >> (run.at + i) & 1) continue;
      decode(v, run.block, w.head + h, run.offset + i, 1, x, v.dim);
      for (int d = 0; d < w.args->v_dim; ++d)
        if (magnitude(x[d]) >= kInfBits) return true;
    }
  }
  return false;
}

// The next tile's memory, to be fetched during this one: heads walked together share one walk through it.
inline void begin_ahead(Work& w, Bf16Work& b) {
  b.ahead.clear();
  if (w.ahead == nullptr) return;
  const auto add = [&](const Store& s) {
    add_plane(s.data, *w.ahead, w.head, w.num_heads, row_bytes(s), b.ahead);
    add_plane(s.scale, *w.ahead, w.head, w.num_heads, sizeof(float), b.ahead);
    add_plane(s.block_scale, *w.ahead, w.head, w.num_heads, s.dim / 16, b.ahead);
  };
  add(*w.args->k[0]);
  if (!w.shares_kv()) add(*w.args->v);
}

inline void attend_tile_bf16(Work& w, Bf16Work& b, const Tile& tile, int h, uint64_t all, uint64_t any) {
  const AttendArgs& a = *w.args;
  const Store &k = *a.k[0], &v = *a.v;
  const int tokens = round_up(64 - __builtin_clzll(any), 16);
  if (h == 0) begin_ahead(w, b);
  if ((all != tile.present && hides_nonfinite(w, tile, h, all)) || has_nan_scale(k, tile, w.head + h) ||
      has_nan_scale(v, tile, w.head + h)) {
    clear_tiles(w);
    attend_tile(w, tile, h, all, any);  // keeps what a row does not see out of its sums, and NaN where it belongs
    return;
  }
  const int half = b.ahead.share(2 * w.num_heads);
  code_rows(k, tile, w.head + h, b.k_codes);
  if (!w.shares_kv()) code_rows(v, tile, w.head + h, b.v_codes);
  const CodeRows& codes = w.shares_kv() ? b.k_codes : b.v_codes;
  const int64_t at = int64_t{h} * b.num_queries;
  b.keys.scores(k, b.q + at, b.k_codes, tokens, w.k_dim, b.s, b.ahead, (half + 63) / 64);
  if (b.two_parts) {
    b.keys.scores(k, b.q_rest + at, b.k_codes, tokens, w.k_dim, b.s_rest, b.ahead, 0);
    for (int i = 0; i < w.rows * kTile; i += W) store(b.s + i, load(b.s + i) + load(b.s_rest + i));
  }
  begin_scores(w, b);
  softmax_bf16(w, b, h, tokens, codes.has_factor ? codes.factor : nullptr);
  const int calls = w.v_pitch / 64 * b.values.calls;
  b.values.values(v, {b.p, b.s}, codes, tokens, a.v_dim, w.output(h, 0), w.v_pitch, w.rows, b.ahead,
                  (half + calls - 1) / calls);
}

inline void carve_bf16(Work& w, Bf16Work& b, Scratch& scratch) {
  const Store& k = *w.args->k[0];
  b.two_parts = k.has_maps();
  b.keys = few_rows(k, w.rows);
  b.values = few_rows(*w.args->v, w.rows);
  b.num_queries = 2 * b.keys.rows * round_up(w.k_dim, b.keys.dims);
  const int64_t queries = int64_t{w.num_heads} * b.num_queries, scores = kFewRows * kTile;
  uint8_t* p = carve(w, scratch, 2 * 2 * queries + 2 * 4 * scores + 2 * scores);
  const auto take = [&p](auto*& place, int64_t count) {
    place = reinterpret_cast<std::remove_reference_t<decltype(place)>>(p);
    p += count * static_cast<int64_t>(sizeof(*place));
  };
  take(b.q, queries);
  take(b.q_rest, queries);
  take(b.s, scores);
  take(b.s_rest, scores);
  take(b.p, scores);
}

// Queries in bf16 without the scale, which multiplies the scores: a bf16 query stays exact. [head][piece][row], both
// halves of a vector alike; rows and elements there are none of are zero.
inline void begin_bf16(Work& w, Bf16Work& b) {
  begin(w);  // the fp32 queries serve the tiles that fall back
  const AttendArgs& a = *w.args;
  const int rows = b.keys.rows, dims = b.keys.dims, pitch = round_up(w.k_dim, dims);
  int order[kMaxPiece];
  for (int i = 0; i < dims; ++i) order[i] = b.keys.element(i);
  std::memset(b.q, 0, sizeof(uint16_t) * static_cast<size_t>(w.num_heads * b.num_queries));
  if (b.two_parts) std::memset(b.q_rest, 0, sizeof(uint16_t) * static_cast<size_t>(w.num_heads * b.num_queries));
  std::memset(b.p, 0, sizeof(uint16_t) * kFewRows * kTile);
  alignas(64) float x[kMaxDim + kMaxPiece];
  for (int h = 0; h < w.num_heads; ++h)
    for (int r = 0; r < w.rows; ++r) {
      load_row(a.q.at(query_row(w, r), query_head(w, h, r)), a.q.dtype, w.k_dim, x);
      to_query(*a.k[0], w.head + h, x);
      for (int i = w.k_dim; i < pitch; ++i) x[i] = 0;
      for (int d = 0; d < pitch; d += dims) {
        const int64_t at = int64_t{h} * b.num_queries + 2 * (int64_t{d} * rows + int64_t{r} * dims);
        for (int i = 0; i < dims; ++i) {
          const float y = x[d + order[i]];
          const int64_t to = at + i / 16 * 32 + i % 16;
          b.q[to] = b.q[to + 16] = f32_to_bf16(y);
          if (b.two_parts) b.q_rest[to] = b.q_rest[to + 16] = f32_to_bf16(y - bf16_to_f32(b.q[to]));
        }
      }
    }
}

}  // namespace

bool fits_few_rows_avx512(const AttendArgs& a, int rows) {
  return rows <= kFewRows && a.q.dtype == DType::bf16 && a.num_k == 1 && has_bf16_rows(*a.k[0]) && has_bf16_rows(*a.v);
}

void attend_few_rows_avx512(const AttendArgs& a, int item, int head_block, Scratch& scratch) {
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
