// Attention with bf16 products and fp32 sums (vdpbf16ps) for bf16 queries: half the work of the fp32 path. Scores,
// softmax and sums stay fp32; probabilities are rounded to bf16 before they meet the values.
#include <array>

#include "kernels/few_rows_avx512.hpp"
#include "kernels/special.hpp"

namespace kvpool {
namespace {

constexpr int kMaxPiece = 128;  // elements the kernels of a format take at a time, at most

struct Bf16Work {
  FewRows keys, values;  // what serves K and V
  // Queries that maps changed are the sum of two bf16 numbers, so that nothing is lost.
  bool two_parts;
  uint16_t *q, *q_rest;  // [heads][num_queries], in the order of `keys`
  int num_queries;       // numbers that one head's queries are, padding included
  float *s, *s_rest;     // [heads][kFewRows][64], [kFewRows][64]
  uint16_t* p;           // [heads][kFewRows][64]
  float *q_unit, *unit;  // [heads][kFewRows]: what queries and probabilities in int16 are multiples of, or 1
  float* l;              // [heads][kFewRows][16]: sums of probabilities, lane by lane; w.l has the rest
  CodeRows codes;
  Stream ahead;

  float* scores(int h) const { return s + int64_t{h} * kFewRows * kTile; }
  uint16_t* probabilities(int h) const { return p + int64_t{h} * kFewRows * kTile; }
};

// Probabilities of one row in one of the forms: fp32 in the place of the scores, int16 in units of the largest.
template <int N, Form form>
inline void store_probabilities(const __m512 (&x)[N], float* s, uint16_t* p, float& unit) {
  __m512 scale = splat(1.0f);
  if constexpr (form == Form::int16) {
    __m512 top = x[0];
    for (int i = 1; i < N; ++i) top = _mm512_max_ps(top, x[i]);
    const float highest = _mm512_reduce_max_ps(top), most = 32767.0f;
    unit = highest / most;
    scale = splat(highest > 0x1p-100f ? most / highest : 0.0f);
  }
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) {
    const auto to = reinterpret_cast<__m256i*>(p + 16 * i);
    if constexpr (form == Form::fp32) {
      _mm512_store_ps(s + 16 * i, x[i]);
    } else if constexpr (form == Form::bf16) {
      _mm256_store_si256(to, reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x[i])));
    } else {
      _mm256_store_si256(to, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(x[i], scale))));
    }
  }
}

// Scores of one row times their factors, capped and in units of log2; their factors have been used then.
__attribute__((noinline)) void cap_scores(float cap, const float* k_factor, float q_unit, int tokens, float* s) {
  for (int i = 0; i < tokens; i += 16) {
    const Vec x = load(s + i) * load(k_factor + i) * splat(q_unit);
    store(s + i, splat(cap * kLog2e) * tanh(x * splat(1.0f / cap)));
  }
}

// A row's sums brought to a new maximum.
__attribute__((noinline)) void rescale(float factor, float* l, float* o, int pitch) {
  const __m512 f = _mm512_set1_ps(factor);
  _mm512_store_ps(l, _mm512_mul_ps(f, _mm512_load_ps(l)));
  for (int d = 0; d < pitch; d += 16) _mm512_storeu_ps(o + d, _mm512_mul_ps(f, _mm512_loadu_ps(o + d)));
}

// Scores of one row to probabilities, times the values' factors. Tokens not in `mask` become 0.
// The maximum is renewed only when a score passes it by 2^8: neither sum nor output can overflow before that.
template <int N, Form form>
inline void softmax_row_bf16(const Work& w, const float* k_factor, float q_unit, float* s, uint64_t mask,
                             const float* v_factor, uint16_t* p, float& unit, float& m, float* l, float* o) {
  __m512 x[N];
  const __m512 limit = _mm512_set1_ps(m * kLog2e + 8.0f);
  const __m512 q = _mm512_set1_ps(q_unit);
  __mmask16 over = 0;
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) {
    x[i] = _mm512_mul_ps(_mm512_loadu_ps(s + 16 * i), _mm512_mul_ps(q, _mm512_load_ps(k_factor + 16 * i)));
    x[i] = _mm512_mask_mov_ps(_mm512_set1_ps(kMinusInf), static_cast<__mmask16>(mask >> (16 * i)), x[i]);
    over |= _mm512_cmp_ps_mask(x[i], limit, _CMP_GT_OQ);
  }
  if (over != 0) {
    __m512 top = _mm512_set1_ps(kMinusInf);
    for (int i = 0; i < N; ++i) top = _mm512_max_ps(x[i], top);  // in this order NaN is passed over
    const float highest = _mm512_reduce_max_ps(top) * (1.0f / kLog2e);
    if (m != kMinusInf) rescale(__builtin_exp2f((m - highest) * kLog2e), l, o, w.v_pitch);
    m = highest;
  }
  const __m512 shift = _mm512_set1_ps(m == kMinusInf ? 0.0f : m * kLog2e);
  __m512 total = _mm512_load_ps(l);
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) {
    const __m512 e = exp2_fast(_mm512_sub_ps(x[i], shift));
    total = _mm512_add_ps(total, e);
    x[i] = _mm512_maskz_mul_ps(static_cast<__mmask16>(mask >> (16 * i)), e, _mm512_load_ps(v_factor + 16 * i));
  }
  store_probabilities<N, form>(x, s, p, unit);
  _mm512_store_ps(l, total);
}

template <int N, Form form>
inline void softmax_rows_bf16(Work& w, Bf16Work& b, int h, const float* k_factor, const float* v_factor) {
  alignas(64) static constexpr auto ones = [] {
    std::array<float, kTile> x{};
    x.fill(1.0f);
    return x;
  }();
  for (int r = 0; r < w.rows; ++r) {
    b.ahead.pass(1);
    const int64_t at = int64_t{h} * w.rows + r, place = int64_t{h} * kFewRows + r, row = int64_t{r} * kTile;
    float q_unit = b.q_unit[place];
    if (w.args->softcap > 0) {
      cap_scores(w.args->softcap, k_factor, q_unit, 16 * N, b.scores(h) + row);
      q_unit = 1.0f;
    }
    softmax_row_bf16<N, form>(w, w.args->softcap > 0 ? ones.data() : k_factor, q_unit, b.scores(h) + row,
                              w.masks[r / w.group], v_factor, b.probabilities(h) + row, b.unit[place], w.m[at],
                              b.l + 16 * place, w.output(h, r));
  }
}

template <Form form>
inline void softmax_bf16(Work& w, Bf16Work& b, const Tile& tile, int h, int tokens) {
  alignas(64) float k_factor[kTile], v_factor[kTile];
  // Scores become units of log2.
  token_factors(*w.args->k[0], tile, w.head + h, w.args->softcap > 0 ? w.args->scale : w.args->scale * kLog2e,
                k_factor);
  token_factors(*w.args->v, tile, w.head + h, 1.0f, v_factor);
  switch (tokens / 16) {
    case 1:
      return softmax_rows_bf16<1, form>(w, b, h, k_factor, v_factor);
    case 2:
      return softmax_rows_bf16<2, form>(w, b, h, k_factor, v_factor);
    case 3:
      return softmax_rows_bf16<3, form>(w, b, h, k_factor, v_factor);
    default:
      return softmax_rows_bf16<4, form>(w, b, h, k_factor, v_factor);
  }
}

inline void softmax_bf16(Work& w, Bf16Work& b, const Tile& tile, int h, int tokens) {
  switch (b.values.probabilities) {
    case Form::bf16:
      return softmax_bf16<Form::bf16>(w, b, tile, h, tokens);
    case Form::fp32:
      return softmax_bf16<Form::fp32>(w, b, tile, h, tokens);
    case Form::int16:
      return softmax_bf16<Form::int16>(w, b, tile, h, tokens);
    case Form::bytes:  // of queries only
      return;
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

// The next tile's memory, to be fetched during this one: half a tile ahead was a fifth slower for bf16.
inline void begin_ahead(const Work& w, Bf16Work& b) {
  b.ahead.clear();
  const Tile* tile = w.ahead != nullptr ? w.ahead : w.next;
  if (tile == nullptr) return;
  const int head = tile == w.next ? w.next_head : w.head, heads = tile == w.next ? w.next_heads : w.num_heads;
  const auto add = [&](const Store& s) {
    add_plane(s.data, *tile, head, heads, row_bytes(s), b.ahead);
    add_plane(s.scale, *tile, head, heads, sizeof(float), b.ahead);
    add_plane(s.block_scale, *tile, head, heads, s.dim / 16, b.ahead);
  };
  add(*w.args->k[0]);
  if (!w.shares_kv()) add(*w.args->v);
}

// True when a token's factor is NaN or inf.
inline bool has_nonfinite_factor(const Store& s, const Tile& tile, int head) {
  if (s.scale.base == nullptr) return false;
  alignas(64) float factor[kTile];
  token_factors(s, tile, head, 0.0f, factor);
  __mmask16 found = 0;
  for (int i = 0; i < kTile; i += 16)
    found |= _mm512_cmp_ps_mask(_mm512_load_ps(factor + i), _mm512_setzero_ps(), _CMP_NEQ_UQ);
  return found != 0;
}

// The heads whose part of a tile only the exact path keeps apart: a value that is NaN or inf and that some row does not
// see, or a token's factor that no whole number stands for.
inline uint32_t exact_heads(const Work& w, const Bf16Work& b, const Tile& tile, uint64_t all) {
  uint32_t exact = 0;
  for (int h = 0; h < w.num_heads; ++h)
    if ((all != tile.present && hides_nonfinite(w, tile, h, all)) ||
        (b.values.probabilities != Form::bf16 && has_nonfinite_factor(*w.args->v, tile, w.head + h)))
      exact |= 1u << h;
  return exact;
}

// Brings the sums of one head's rows to where the fp32 path has them.
inline void collect_sums(Work& w, Bf16Work& b, int h) {
  for (int r = 0; r < w.rows; ++r) {
    float* l = b.l + (int64_t{h} * kFewRows + r) * 16;
    w.l[h * w.rows + r] += _mm512_reduce_add_ps(_mm512_load_ps(l));
    _mm512_store_ps(l, _mm512_setzero_ps());
  }
}

// Scores of all heads, then probabilities, then values: memory is read in order, and no head waits for its softmax.
inline void attend_tile_bf16(Work& w, Bf16Work& b, const Tile& tile, uint64_t all, uint64_t any) {
  const AttendArgs& a = *w.args;
  const Store &k = *a.k[0], &v = *a.v;
  const int tokens = round_up(64 - __builtin_clzll(any), 16);
  const uint32_t exact = exact_heads(w, b, tile, all);
  if (exact != 0) clear_tiles(w);

  begin_ahead(w, b);
  const int64_t heads = w.num_heads;
  const Shares share = b.keys.fetched;
  b.ahead.spread(share.scores, heads * kTile * w.k_dim);
  for (int h = 0; h < w.num_heads; ++h) {
    if (exact >> h & 1) {
      collect_sums(w, b, h);
      attend_tile(w, tile, h, all, any);
      continue;
    }
    code_rows(k, tile, w.head + h, b.codes);
    const int64_t at = int64_t{h} * b.num_queries;
    float* s = b.scores(h);
    b.keys.scores(k, b.q + at, b.codes, tokens, w.k_dim, s, b.ahead);
    if (b.two_parts) {
      b.keys.scores(k, b.q_rest + at, b.codes, tokens, w.k_dim, b.s_rest, b.ahead);
      for (int i = 0; i < w.rows * kTile; i += W) store(s + i, load(s + i) + load(b.s_rest + i));
    }
  }

  b.ahead.spread(share.softmax, heads * w.rows);
  for (int h = 0; h < w.num_heads; ++h)
    if (!(exact >> h & 1)) softmax_bf16(w, b, tile, h, tokens);

  b.ahead.spread(1 - share.scores - share.softmax, heads * kTile * w.v_pitch);
  for (int h = 0; h < w.num_heads; ++h) {
    if (exact >> h & 1) continue;
    if (!w.shares_kv()) code_rows(v, tile, w.head + h, b.codes);
    b.values.values(v, {b.probabilities(h), b.scores(h), b.unit + int64_t{h} * kFewRows, w.masks, w.group}, b.codes,
                    tokens, a.v_dim, w.output(h, 0), w.v_pitch, w.rows, b.ahead);
  }
  b.ahead.finish();
}

inline void carve_bf16(Work& w, Bf16Work& b, Scratch& scratch) {
  const Store& k = *w.args->k[0];
  b.keys = few_rows(k, w.rows);
  b.two_parts = k.has_maps() && b.keys.queries == Form::bf16;
  b.values = few_rows(*w.args->v, w.rows);
  b.num_queries = round_up(b.keys.copies * b.keys.rows * round_up(w.k_dim, b.keys.dims), 32);
  const int64_t queries = int64_t{w.num_heads} * b.num_queries, some = kFewRows * kTile, scores = w.num_heads * some;
  const int64_t units = int64_t{w.num_heads} * kFewRows;
  uint8_t* p = carve(w, scratch, 2 * 2 * queries + 4 * (scores + some) + 2 * scores + (2 + 16) * 4 * units);
  const auto take = [&p](auto*& place, int64_t count) {
    place = reinterpret_cast<std::remove_reference_t<decltype(place)>>(p);
    p += count * static_cast<int64_t>(sizeof(*place));
  };
  take(b.q, queries);
  take(b.q_rest, queries);
  take(b.s, scores);
  take(b.s_rest, some);
  take(b.p, scores);
  take(b.l, 16 * units);
  take(b.q_unit, units);
  take(b.unit, units);
}

// A query's elements become whole numbers up to `most`; returns what they are multiples of, NaN where one was not
// finite.
inline float to_whole(float* x, int dim, float most) {
  uint32_t largest = 0;
  for (int i = 0; i < dim; ++i) largest = magnitude(x[i]) > largest ? magnitude(x[i]) : largest;
  const float highest = std::bit_cast<float>(largest);
  const float scale = largest < kInfBits && highest > 0x1p-100f ? most / highest : 0.0f;
  for (int i = 0; i < dim; ++i) x[i] = scale > 0 ? std::nearbyint(x[i] * scale) : 0.0f;
  return largest < kInfBits ? highest / most : std::numeric_limits<float>::quiet_NaN();
}

// Queries without the scale, which multiplies the scores: a bf16 query stays exact. [head][piece][row], each 16
// elements as often as the kernel wants; rows and elements there are none of are zero.
inline void begin_bf16(Work& w, Bf16Work& b) {
  begin(w);  // the fp32 queries serve the tiles that fall back
  const AttendArgs& a = *w.args;
  const bool whole = b.keys.queries == Form::int16, bytes = b.keys.queries == Form::bytes;
  const int rows = b.keys.rows, dims = b.keys.dims, copies = b.keys.copies, pitch = round_up(w.k_dim, dims);
  int order[kMaxPiece];
  for (int i = 0; i < dims && !bytes; ++i) order[i] = b.keys.element(i);
  std::memset(b.q, 0, sizeof(uint16_t) * static_cast<size_t>(w.num_heads * b.num_queries));
  if (b.two_parts) std::memset(b.q_rest, 0, sizeof(uint16_t) * static_cast<size_t>(w.num_heads * b.num_queries));
  std::memset(b.l, 0, sizeof(float) * 16 * kFewRows * static_cast<size_t>(w.num_heads));
  std::memset(b.p, 0, sizeof(uint16_t) * kFewRows * kTile * static_cast<size_t>(w.num_heads));
  alignas(64) float x[kMaxDim + kMaxPiece], y[kMaxDim + kMaxPiece];
  uint16_t first[kMaxDim + kMaxPiece], rest[kMaxDim + kMaxPiece];
  const auto place = [&](const uint16_t* from, uint16_t* q, int h, int r) {
    const int some = copies == 1 ? dims : 16;
    for (int d = 0; d < pitch; d += dims) {
      uint16_t* to = q + int64_t{h} * b.num_queries + copies * (int64_t{d} * rows + int64_t{r} * dims);
      for (int i = 0; i < dims; i += some)
        for (int copy = 0; copy < copies; ++copy, to += some)
          std::memcpy(to, from + d + i, 2 * static_cast<size_t>(some));
    }
  };
  for (int h = 0; h < w.num_heads; ++h)
    for (int r = 0; r < w.rows; ++r) {
      load_row(a.q.at(query_row(w, r), query_head(w, h, r)), a.q.dtype, w.k_dim, x);
      to_query(*a.k[0], w.head + h, x);
      for (int i = w.k_dim; i < pitch; ++i) x[i] = 0;
      if (bytes) {
        b.q_unit[h * kFewRows + r] = 0.5f * to_whole(x, w.k_dim, kNvfp4MostQuery);  // codes are doubled
        uint8_t* to = reinterpret_cast<uint8_t*>(b.q + int64_t{h} * b.num_queries) + r * kNvfp4QueryBytes;
        place_nvfp4_query(x, w.k_dim, to, rows * kNvfp4QueryBytes);
        continue;
      }
      b.q_unit[h * kFewRows + r] = whole ? to_whole(x, w.k_dim, 32767.0f) : 1.0f;
      for (int d = 0; d < pitch; d += dims)
        for (int i = 0; i < dims; ++i) y[d + i] = x[d + order[i]];
      for (int i = 0; i < pitch; ++i)
        first[i] = whole ? static_cast<uint16_t>(static_cast<int16_t>(y[i])) : f32_to_bf16(y[i]);
      place(first, b.q, h, r);
      if (!b.two_parts) continue;
      for (int i = 0; i < pitch; ++i) rest[i] = f32_to_bf16(y[i] - bf16_to_f32(first[i]));
      place(rest, b.q_rest, h, r);
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
    walk(w, [&](Work& w, const Tile& tile, uint64_t all, uint64_t any) { attend_tile_bf16(w, b, tile, all, any); });
    for (int h = 0; h < w.num_heads; ++h) collect_sums(w, b, h);
    end(w);
  });
}

}  // namespace kvpool
