// Attention of many query rows to one KV head by products of blocks: keys and values of a step of 128 tokens are packed
// into panels once, then every chunk of rows takes scores, softmax and sums while they are in cache. `Product` is the
// unit that multiplies: C[rows][columns] (+)= factor[columns] * A[rows][2 * pairs] * B[pairs][columns].
//
// Included by attend_panels_<isa>.cpp only.
#pragma once

#include "kernels/panels_avx512.hpp"
#include "kernels/special.hpp"

namespace kvpool {
namespace {

// Elements of a query against elements of the packed keys, with one factor a token.
struct KeyPart {
  int q_at, k_at;  // multiples of kInner
  int pairs;       // padded
  int factor;      // row of `factors`; -1: all are 1
};

// Elements of a value that share a factor a token.
struct ValuePart {
  int begin, end;  // elements; begin is a multiple of a panel
  int factor;
};

struct Panels {
  // Queries that maps changed are the sum of two bf16 numbers, so that nothing is lost.
  bool two_parts;
  bool direct;  // few rows: rows of tokens are multiplied where they lie, nothing is packed
  int num_keys, num_values, num_factors;
  KeyPart keys[2 * 2 * kMaxParts];
  ValuePart values[kMaxParts];
  int q_pitch, k_inner;           // elements of a packed query; of a packed key
  uint16_t *q, *rows[3], *p;      // [heads][rows][q_pitch]; rows of K, rope and V; [parts][chunk][step]
  uint32_t *k_panels, *v_panels;  // [tiles][k_inner / 2][64]; [v_pitch / 64][step / 2][64]
  float *s, *factors;             // [chunk][step]; [parts][step]
  uint64_t masks[kStepTiles][kMaxRows];
  int num_tiles;  // packed and not yet worked on
  Ahead ahead;
  Bf16Rows decoded[kStepTiles][3];  // by place in the step when direct, else all in the first
};

inline bool fits_panels(const Store& s) {
  switch (s.codec) {
    case CodecId::fp8:
    case CodecId::int8:
    case CodecId::index_fp8:
      return s.num_segments <= kMaxParts;
    default:
      return has_bf16_rows(s);
  }
}

inline bool has_segment_scales(const Store& s) {
  return s.num_segments > 1 && (s.codec == CodecId::fp8 || s.codec == CodecId::int8 || s.codec == CodecId::index_fp8);
}

// The parts of keys and values, from the scales their stores have.
inline void plan_parts(Work& w, Panels& b) {
  const AttendArgs& a = *w.args;
  b.two_parts = a.k[0]->has_maps() || (a.num_k > 1 && a.k[1]->has_maps());
  b.num_keys = b.num_values = b.num_factors = 0;
  int at = 0;
  for (int i = 0; i < a.num_k; ++i) {
    const Store& s = *a.k[i];
    const int parts = has_segment_scales(s) ? s.num_segments : 1;
    for (int j = 0; j < parts; ++j) {
      const int dim = parts == 1 ? s.dim : s.segments[j], inner = round_up(dim, kInner);
      b.keys[b.num_keys++] = {at, at, inner / 2, s.codec == CodecId::bf16 ? -1 : b.num_factors++};
      at += inner;
    }
  }
  b.k_inner = at;
  b.q_pitch = b.two_parts ? 2 * at : at;
  if (b.two_parts)
    for (int i = 0, n = b.num_keys; i < n; ++i) {
      b.keys[b.num_keys] = b.keys[i];
      b.keys[b.num_keys++].q_at += at;
    }
  const Store& v = *a.v;
  const int parts = has_segment_scales(v) ? v.num_segments : 1;
  const int first = w.shares_kv() ? 0 : b.num_factors;
  for (int j = 0, begin = 0; j < parts && begin < a.v_dim; begin += v.segments[j], ++j) {
    const int end = parts == 1 ? a.v_dim : imin(begin + v.segments[j], a.v_dim);
    b.values[b.num_values++] = {begin, end, v.codec == CodecId::bf16 ? -1 : first + j};
  }
  if (!w.shares_kv() && v.codec != CodecId::bf16) b.num_factors += parts;
}

template <class Product>
inline void carve_panels(Work& w, Panels& b, Scratch& scratch) {
  const AttendArgs& a = *w.args;
  plan_parts(w, b);
  b.direct = w.rows <= Product::kDirectRows && a.num_k == 1 && !has_segment_scales(*a.k[0]) &&
             !has_segment_scales(*a.v) && a.k[0]->dim % kInner == 0 && a.v_dim % kInner == 0;
  const int64_t rows = round_up(w.rows, Product::kRows);
  int64_t sizes[9] = {};
  sizes[0] = w.num_heads * rows * b.q_pitch * 2;
  const int64_t kept = b.direct ? kStepTokens : kTile;
  for (int i = 0; i < a.num_k; ++i) sizes[1 + i] = kept * round_up(a.k[i]->dim, kRowPitch) * 2;
  if (!w.shares_kv()) sizes[3] = kept * round_up(a.v->dim, kRowPitch) * 2;
  sizes[4] = int64_t{b.num_values} * Product::kChunk * kStepTokens * 2;
  if (!b.direct) {
    sizes[5] = int64_t{kStepTiles} * b.k_inner / 2 * kPanelColumns * 4;
    sizes[6] = int64_t{w.v_pitch} * kStepTokens / 2 * 4;
  }
  sizes[7] = int64_t{Product::kChunk} * kStepTokens * 4;
  sizes[8] = int64_t{b.num_factors} * kStepTokens * 4;
  int64_t total = 0;
  for (int64_t& size : sizes) total += size = (size + 63) / 64 * 64;
  uint8_t* p = carve(w, scratch, total);
  const auto take = [&](auto*& place, int i) {
    place = reinterpret_cast<std::remove_reference_t<decltype(place)>>(p);
    p += sizes[i];
  };
  take(b.q, 0);
  for (int i = 0; i < 3; ++i) take(b.rows[i], 1 + i);
  take(b.p, 4);
  take(b.k_panels, 5);
  take(b.v_panels, 6);
  take(b.s, 7);
  take(b.factors, 8);
  b.num_tiles = 0;
}

// Queries in bf16 without the scale, which multiplies the scores: a bf16 query stays exact.
template <class Product>
inline void begin_panels(Work& w, Panels& b) {
  begin(w);  // the fp32 queries serve the tiles that fall back
  const AttendArgs& a = *w.args;
  const int64_t rows = round_up(w.rows, Product::kRows);
  std::memset(b.q, 0, static_cast<size_t>(w.num_heads * rows * b.q_pitch) * 2);
  alignas(64) float x[kMaxDim];
  for (int h = 0; h < w.num_heads; ++h)
    for (int r = 0; r < w.rows; ++r) {
      load_row(a.q.at(query_row(w, r), query_head(w, h, r)), a.q.dtype, w.k_dim, x);
      for (int i = 0, at = 0; i < a.num_k; at += a.k[i]->dim, ++i) to_query(*a.k[i], w.head + h, x + at);
      uint16_t* q = b.q + (h * rows + r) * b.q_pitch;
      const float* from = x;
      const auto convert = [&](int dim, int to) {
        for (int i = 0; i < dim; ++i) {
          q[to + i] = f32_to_bf16(from[i]);
          if (b.two_parts) q[b.k_inner + to + i] = f32_to_bf16(from[i] - bf16_to_f32(q[to + i]));
        }
        from += dim;
      };
      int part = 0;
      for (int i = 0; i < a.num_k; ++i) {
        const Store& s = *a.k[i];
        if (!has_segment_scales(s)) {
          convert(s.dim, b.keys[part++].q_at);
          continue;
        }
        for (int j = 0; j < s.num_segments; ++j) convert(s.segments[j], b.keys[part++].q_at);
      }
    }
}

// Rows of a store with their factors, one row of `factors` a scale.
inline void decode_rows(const Store& s, const Tile& tile, int head, uint16_t* memory, Bf16Rows& rows, float* factors) {
  bf16_rows(s, tile, head, memory, round_up(s.dim, kRowPitch), rows);
  if (s.codec == CodecId::bf16) return;
  if (!has_segment_scales(s)) {
    std::memcpy(factors, rows.factor, sizeof rows.factor);
    return;
  }
  for (int i = 0; i < s.num_segments; ++i) std::memset(factors + i * kStepTokens, 0, sizeof(float) * kTile);
  for (int j = 0; j < tile.num_runs; ++j)
    for (int t = 0; t < tile.runs[j].count; ++t) {
      const float* scale = place(s, tile.runs[j].block, head, tile.runs[j].offset + t).scale;
      for (int i = 0; i < s.num_segments; ++i) factors[i * kStepTokens + tile.runs[j].at + t] = scale[i];
    }
}

// Takes a tile behind the ones already taken: its rows as they are for direct products, packed else.
inline void take_tile(Work& w, Panels& b, const Tile& tile, int h) {
  const AttendArgs& a = *w.args;
  const int at = b.num_tiles++, place = b.direct ? at : 0;
  uint32_t* panel = b.k_panels + int64_t{at} * b.k_inner / 2 * kPanelColumns;
  float* factors = b.factors + at * kTile;
  int part = 0, used = 0;
  const auto memory = [&](int i, const Store& s) {
    return b.rows[i] + int64_t{place} * kTile * round_up(s.dim, kRowPitch);
  };
  for (int i = 0; i < a.num_k; ++i) {
    const Store& s = *a.k[i];
    decode_rows(s, tile, w.head + h, memory(i, s), b.decoded[place][i], factors + used * kStepTokens);
    const int parts = has_segment_scales(s) ? s.num_segments : 1;
    if (s.codec != CodecId::bf16) used += parts;
    if (b.direct) continue;
    for (int j = 0, begin = 0; j < parts; begin += s.segments[j], ++j, ++part)
      pack_keys(b.decoded[0][i], begin, parts == 1 ? s.dim : s.segments[j],
                panel + int64_t{b.keys[part].k_at} / 2 * kPanelColumns);
  }
  if (!w.shares_kv())
    decode_rows(*a.v, tile, w.head + h, memory(2, *a.v), b.decoded[place][2], factors + used * kStepTokens);
  if (!b.direct)
    pack_values(b.decoded[0][w.shares_kv() ? 0 : 2], a.v_dim, b.v_panels + int64_t{at} * kTile / 2 * kPanelColumns,
                int64_t{kStepTokens} / 2 * kPanelColumns);
  std::memcpy(b.masks[at], w.masks, sizeof(uint64_t) * static_cast<size_t>(w.num_rows));
}

// Scores of one row over `num_tiles` tiles to probabilities in bf16, once for each factor of the values. `masked`:
// tokens no bit of `seen` stands for become 0; otherwise all are seen. `direct`: scores are the products times the
// scale.
template <int num_tiles, bool masked, bool direct>
inline void softmax_row(const Work& w, const Panels& b, const float* s, const uint64_t* seen, int chunk, uint16_t* p,
                        float& m, float& l, float* o) {
  constexpr int n = num_tiles * 4;
  __m512 x[n];
  __m512 top = _mm512_set1_ps(kMinusInf);
#pragma GCC unroll 8
  for (int i = 0; i < n; ++i) {
    x[i] = _mm512_load_ps(s + 16 * i);
    if constexpr (!direct) {
      x[i] = _mm512_mul_ps(x[i], _mm512_set1_ps(w.args->scale));
      if (w.args->softcap > 0) x[i] = splat(w.args->softcap) * tanh(Vec(x[i]) * splat(1.0f / w.args->softcap));
    }
    if constexpr (masked)
      x[i] = _mm512_mask_mov_ps(_mm512_set1_ps(kMinusInf), static_cast<__mmask16>(seen[i / 4] >> (i % 4 * 16)), x[i]);
    top = _mm512_max_ps(x[i], top);
  }
  const float unit = direct ? w.args->scale : 1.0f;
  const float highest = _mm512_reduce_max_ps(top) * unit;
  if (highest > m) {
    if (m != kMinusInf) {
      const float factor = __builtin_exp2f((m - highest) * kLog2e);
      const __m512 f = _mm512_set1_ps(factor);
      l *= factor;
      for (int d = 0; d < w.v_pitch; d += 16) _mm512_storeu_ps(o + d, _mm512_mul_ps(f, _mm512_loadu_ps(o + d)));
    }
    m = highest;
  }
  const __m512 shift = _mm512_set1_ps(m == kMinusInf ? 0.0f : -m * kLog2e), base = _mm512_set1_ps(unit * kLog2e);
  __m512 total = _mm512_setzero_ps();
#pragma GCC unroll 8
  for (int i = 0; i < n; ++i) {
    x[i] = exp2_fast(_mm512_fmadd_ps(x[i], base, shift));
    total = _mm512_add_ps(total, x[i]);
  }
  l += _mm512_reduce_add_ps(total);
  for (int j = 0; j < b.num_values; ++j, p += int64_t{chunk} * kStepTokens) {
    const float* factors = b.values[j].factor < 0 ? nullptr : b.factors + b.values[j].factor * kStepTokens;
#pragma GCC unroll 4
    for (int i = 0; i < n; i += 2) {
      __m512 e[2] = {x[i], x[i + 1]};
      if (factors != nullptr)
        for (int k = 0; k < 2; ++k) {
          const __m512 f = _mm512_load_ps(factors + 16 * (i + k));
          e[k] = masked ? _mm512_maskz_mul_ps(static_cast<__mmask16>(seen[i / 4] >> ((i + k) % 4 * 16)), e[k], f)
                        : _mm512_mul_ps(e[k], f);
        }
      _mm512_store_si512(p + 16 * i, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(e[1], e[0])));
    }
  }
}

template <int num_tiles>
inline void softmax_row(const Work& w, const Panels& b, const float* s, const uint64_t* seen, int chunk, uint16_t* p,
                        float& m, float& l, float* o) {
  const bool direct = w.args->softcap <= 0 && w.args->scale > 0;
  bool all = true;
  for (int t = 0; t < num_tiles; ++t) all &= seen[t] == ~uint64_t{0};
  const auto softmax = all      ? direct ? softmax_row<num_tiles, false, true> : softmax_row<num_tiles, false, false>
                       : direct ? softmax_row<num_tiles, true, true>
                                : softmax_row<num_tiles, true, false>;
  softmax(w, b, s, seen, chunk, p, m, l, o);
}

// Lines of the next step to fetch with one of `calls`, so that a step of work fetches a step of tokens.
inline int lines_each(const Panels& b, int calls) {
  int64_t lines = 0;
  for (int i = 0; i < b.ahead.num_stores; ++i) lines += int64_t{kStepTokens} * 2 * b.ahead.stores[i]->dim / 64;
  return static_cast<int>(lines / calls) + 1;
}

// The factors of a key part for tile t of the step; null when all are 1.
inline const float* key_factors(const Panels& b, const KeyPart& part, int t) {
  return part.factor < 0 ? nullptr : b.factors + part.factor * kStepTokens + t * kTile;
}

// The scores of n rows, whose queries begin at `q`, against the tiles of the step.
template <class Product>
inline void score_chunk(Work&, Panels& b, const uint16_t* q, int n, int lines) {
  for (int t = 0; t < b.num_tiles; ++t)
    for (int i = 0; i < b.num_keys; ++i) {
      const KeyPart& part = b.keys[i];
      b.ahead.fetch(lines);
      Product::multiply(q + part.q_at, b.q_pitch, n,
                        b.k_panels + (int64_t{t} * b.k_inner + part.k_at) / 2 * kPanelColumns, part.pairs,
                        b.s + t * kTile, kStepTokens, kPanelColumns, key_factors(b, part, t), i > 0);
    }
}

// Adds probabilities times values to the outputs `o` of n rows.
template <class Product>
inline void add_chunk(Work& w, Panels& b, float* o, int n, int lines) {
  for (int j = 0; j < b.num_values; ++j)
    for (int d = b.values[j].begin; d < b.values[j].end; d += kPanelColumns) {
      b.ahead.fetch(lines);
      Product::multiply(b.p + int64_t{j} * Product::kChunk * kStepTokens, kStepTokens, n,
                        b.v_panels + int64_t{d} * (kStepTokens / 2), b.num_tiles * kTile / 2, o + d, w.v_pitch,
                        imin(kPanelColumns, round_up(b.values[j].end - d, kInner)), nullptr, true);
    }
}

// The same two on rows of tokens where they lie.
template <class Product>
inline void score_rows(Work& w, Panels& b, const uint16_t* q, int n, int lines) {
  for (int t = 0; t < b.num_tiles; ++t)
    for (int i = 0; i < b.num_keys; ++i)
      Product::dots(q + b.keys[i].q_at, b.q_pitch, n, b.decoded[t][0].row, w.k_dim, b.s + t * kTile, kStepTokens,
                    key_factors(b, b.keys[i], t), i > 0, b.ahead, lines);
}

template <class Product>
inline void add_rows(Work& w, Panels& b, float* o, int n, int lines) {
  const uint16_t* rows[kStepTokens];
  for (int t = 0; t < b.num_tiles; ++t)
    std::memcpy(rows + t * kTile, b.decoded[t][w.shares_kv() ? 0 : 2].row, sizeof b.decoded[t][0].row);
  Product::add_rows(b.p, kStepTokens, n, rows, b.num_tiles * kTile, w.args->v_dim, o, w.v_pitch, b.ahead, lines);
}

// Works on the tiles taken with all rows of head h.
template <class Product>
inline void work_step(Work& w, Panels& b, int h) {
  if (b.num_tiles == 0) return;
  const int64_t rows = round_up(w.rows, Product::kRows);
  const int chunks = (w.rows + Product::kChunk - 1) / Product::kChunk;
  int calls = chunks * (b.num_tiles * b.num_keys + w.v_pitch / kPanelColumns);
  auto score = score_chunk<Product>;
  auto add = add_chunk<Product>;
  if constexpr (Product::kDirectRows > 0)
    if (b.direct) {
      calls = Product::direct_calls(w.rows, b.num_tiles * kTile, w.args->v_dim);
      score = score_rows<Product>;
      add = add_rows<Product>;
    }
  const int lines = lines_each(b, calls);
  for (int r0 = 0; r0 < w.rows; r0 += Product::kChunk) {
    const int n = imin(Product::kChunk, w.rows - r0);
    score(w, b, b.q + (h * rows + r0) * b.q_pitch, n, lines);
    for (int r = 0; r < n; ++r) {
      const int64_t at = int64_t{h} * w.rows + r0 + r;
      uint64_t seen[kStepTiles];
      for (int t = 0; t < b.num_tiles; ++t) seen[t] = b.masks[t][(r0 + r) / w.group];
      const auto softmax = b.num_tiles == 1 ? softmax_row<1> : softmax_row<kStepTiles>;
      softmax(w, b, b.s + r * kStepTokens, seen, Product::kChunk, b.p + r * kStepTokens, w.m[at], w.l[at],
              w.output(h, r0 + r));
    }
    add(w, b, w.output(h, r0), n, lines);
  }
  b.num_tiles = 0;
}

inline bool rows_have_nonfinite(const Bf16Rows& v, uint64_t tokens, int dim) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  for (; tokens != 0; tokens &= tokens - 1) {
    const uint16_t* row = v.row[__builtin_ctzll(tokens)];
    for (int d = 0; d < dim; d += 32)
      if (_mm512_cmpeq_epi16_mask(_mm512_and_si512(row_elements(row, d, dim), exponent), exponent)) return true;
  }
  return false;
}

template <class Product>
inline void attend_tile_panels(Work& w, Panels& b, const Tile& tile, int h, uint64_t all, uint64_t any) {
  take_tile(w, b, tile, h);
  const Bf16Rows& values = b.decoded[b.direct ? b.num_tiles - 1 : 0][w.shares_kv() ? 0 : 2];
  if (all != any && rows_have_nonfinite(values, any & ~all, w.args->v_dim)) {
    --b.num_tiles;
    attend_tile(w, tile, h, all, any);  // keeps what a row does not see out of its sums
    return;
  }
  if (b.num_tiles < kStepTiles && w.num_heads == 1) return;
  b.ahead.begin(*w.args, w.item->sequence, w.head + h, w.ahead == nullptr ? 0 : w.ahead->start,
                w.ahead == nullptr ? 0 : w.ahead->start + kStepTokens);
  work_step<Product>(w, b, h);
}

// True when a call's formats can be packed, and its scales meet panels at their borders.
inline bool fits_panels(const AttendArgs& a) {
  if (a.q.dtype != DType::bf16 || !fits_panels(*a.v)) return false;
  for (int i = 0; i < a.num_k; ++i)
    if (!fits_panels(*a.k[i])) return false;
  if (!has_segment_scales(*a.v)) return true;
  for (int j = 0, begin = 0; j < a.v->num_segments && begin < a.v_dim; begin += a.v->segments[j], ++j)
    if (begin % kPanelColumns != 0) return false;
  return true;
}

template <class Product>
inline void attend_panels(const AttendArgs& a, int item, int head_block, Scratch& scratch) {
  Panels b;
  each_pass(a, item, head_block, kRowPitch, [&](Work& w) {
    carve_panels<Product>(w, b, scratch);
    begin_panels<Product>(w, b);
    walk(w, [&](Work& w, const Tile& tile, uint64_t all, uint64_t any) {
      for (int h = 0; h < w.num_heads; ++h) attend_tile_panels<Product>(w, b, tile, h, all, any);
    });
    b.ahead.begin(a, w.item->sequence, w.head, 0, 0);
    work_step<Product>(w, b, 0);
    end(w);
  });
}

}  // namespace
}  // namespace kvpool
