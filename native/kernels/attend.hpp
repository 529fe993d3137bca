// Attention over paged keys and values, for any codec pair: keys are decoded to a tile of fp32, scores become
// probabilities, values are decoded to a tile of fp32. The score stage knows K's codec, the accumulate stage V's.
// Everything is fp32; this is the path that specialised kernels are checked against.
//
// Source: online softmax (Milakov and Gimelshein 2018), split and merge by log-sum-exp (flash-decoding, Dao 2023).
#pragma once

#include "cpu/scratch.hpp"
#include "kernels/gemm.hpp"
#include "kernels/heads.hpp"
#include "kernels/rows.hpp"
#include "kernels/tokens.hpp"

namespace kvpool {
namespace {

constexpr int kMaxRows = 128;  // query rows x heads of a group that share a decoded tile
constexpr int kDotRows = 8;    // at most so many: dot products; more: a transposed tile
constexpr float kMinusInf = -__builtin_huge_valf();

// Sizes and places of one item's working memory.
struct Work {
  const AttendArgs* args;
  const WorkItem* item;
  int group;           // query heads a KV head
  int k_dim, k_pitch;  // of all K stores together, padded to the vector width
  int v_pitch;
  int num_heads;         // KV heads walked together
  int head;              // the first of them
  int row, num_rows;     // query rows [row, row + num_rows) of the sequence
  int rows;              // num_rows * group
  bool last_pass;        // of the piece
  float *q, *o, *m, *l;  // [heads][rows][pitch], [heads][rows]
  float *s, *k, *kt, *v;
  int64_t piece;      // of work: item and heads
  const Tile* ahead;  // the tile after this one, null at the end: kernels may fetch it early
  const Tile* next;   // at the end: the first tile of the piece this worker most likely does next
  int next_head, next_heads;
  RowView views[kMaxRows];
  uint64_t masks[kMaxRows];

  bool shares_kv() const { return args->v == args->k[0]; }
  float* query(int h, int r) { return q + (int64_t{h} * rows + r) * k_pitch; }
  float* output(int h, int r) { return o + (int64_t{h} * rows + r) * v_pitch; }
};

inline int64_t query_row(const Work& w, int r) {
  return w.args->step->cu_seqlens[w.item->sequence] + w.row + r / w.group;
}

inline int query_head(const Work& w, int h, int r) { return (w.head + h) * w.group + r % w.group; }

// Carves the working memory out of the worker's scratch; returns `extra` bytes more, aligned to 64.
inline uint8_t* carve(Work& w, Scratch& scratch, int64_t extra = 0) {
  const int64_t rows = int64_t{w.num_heads} * w.rows;
  const int64_t sizes[] = {rows * w.k_pitch,
                           rows * w.v_pitch,
                           rows,
                           rows,
                           int64_t{w.rows} * kTile,
                           int64_t{kTile} * w.k_pitch,
                           int64_t{kTile} * w.k_pitch,
                           int64_t{kTile} * w.v_pitch};
  float** places[] = {&w.q, &w.o, &w.m, &w.l, &w.s, &w.k, &w.kt, &w.v};
  int64_t total = 0;
  for (int64_t size : sizes) total += (size + 15) / 16 * 16;
  float* p = reinterpret_cast<float*>(
      scratch.reserve(static_cast<size_t>(total) * sizeof(float) + static_cast<size_t>(extra)));
  for (int i = 0; i < 8; ++i) {
    *places[i] = p;
    p += (sizes[i] + 15) / 16 * 16;
  }
  return reinterpret_cast<uint8_t*>(p);
}

// Queries as fp32, scaled, with the options of K folded in; the state of the softmax empty.
inline void begin(Work& w) {
  const AttendArgs& a = *w.args;
  for (int h = 0; h < w.num_heads; ++h)
    for (int r = 0; r < w.rows; ++r) {
      float* q = w.query(h, r);
      load_row(a.q.at(query_row(w, r), query_head(w, h, r)), a.q.dtype, w.k_dim, q);
      for (int i = 0; i < w.k_dim; ++i) q[i] *= a.scale;
      for (int i = w.k_dim; i < w.k_pitch; ++i) q[i] = 0;
      int at = 0;
      for (int i = 0; i < a.num_k; at += a.k[i]->dim, ++i) to_query(*a.k[i], w.head + h, q + at);
      w.m[h * w.rows + r] = kMinusInf;
      w.l[h * w.rows + r] = 0;
      std::memset(w.output(h, r), 0, sizeof(float) * static_cast<size_t>(w.v_pitch));
    }
}

// Decoded tiles start as zeros: what pads a row is multiplied too.
inline void clear_tiles(Work& w) {
  std::memset(w.k, 0, sizeof(float) * kTile * static_cast<size_t>(w.k_pitch));
  std::memset(w.v, 0, sizeof(float) * kTile * static_cast<size_t>(w.v_pitch));
}

// Rows of the tile no token stands behind become zero, so that nothing unwritten is ever multiplied.
inline void clear_absent(const Tile& tile, int tokens, float* rows, int pitch) {
  for (uint64_t absent = ~tile.present & span(0, tokens); absent != 0; absent &= absent - 1)
    std::memset(rows + int64_t{__builtin_ctzll(absent)} * pitch, 0, sizeof(float) * static_cast<size_t>(pitch));
}

inline void load_keys(Work& w, const Tile& tile, int tokens, int h) {
  const AttendArgs& a = *w.args;
  int at = 0;
  for (int i = 0; i < a.num_k; at += a.k[i]->dim, ++i) {
    const auto decode = codec_functions(*a.k[i]).decode_run;
    for (int j = 0; j < tile.num_runs; ++j) {
      const Run& run = tile.runs[j];
      decode(*a.k[i], run.block, w.head + h, run.offset, run.count, w.k + int64_t{run.at} * w.k_pitch + at, w.k_pitch);
    }
  }
  clear_absent(tile, tokens, w.k, w.k_pitch);
}

inline void load_values(Work& w, const Tile& tile, int tokens, int h) {
  const Store& v = *w.args->v;
  const auto decode = codec_functions(v).decode_run;
  for (int j = 0; j < tile.num_runs; ++j) {
    const Run& run = tile.runs[j];
    decode(v, run.block, w.head + h, run.offset, run.count, w.v + int64_t{run.at} * w.v_pitch, w.v_pitch);
  }
  clear_absent(tile, tokens, w.v, w.v_pitch);
}

inline void apply_softcap(float* s, int n, float cap) {
  const Vec c = splat(cap), inverse = splat(1.0f / cap);
  for (int i = 0; i < n; i += W) store(s + i, c * tanh(load(s + i) * inverse));
}

// Scores of one row become probabilities in place; its sum, maximum and output are brought to the new maximum.
inline void softmax_row(float* s, int tokens, uint64_t mask, float& m, float& l, float* o, int v_pitch) {
  if (mask != span(0, tokens))
    for (int t = 0; t < tokens; ++t) s[t] = mask >> t & 1 ? s[t] : kMinusInf;
  Vec top = splat(kMinusInf);
  for (int t = 0; t < tokens; t += W) top = vmax(load(s + t), top);
  const float highest = largest(top);
  if (highest > m) {
    if (m != kMinusInf) {
      float factor[W];
      store(factor, exp(splat(m - highest)));
      l *= factor[0];
      const Vec f = splat(factor[0]);
      for (int d = 0; d < v_pitch; d += W) store(o + d, load(o + d) * f);
    }
    m = highest;
  }
  Vec total{};
  const Vec shift = splat(m == kMinusInf ? 0.0f : m);
  for (int t = 0; t < tokens; t += W) {
    const Vec p = exp(load(s + t) - shift);
    store(s + t, p);
    total += p;
  }
  l += sum(total);
}

// True when a value that not every row sees is NaN or inf: zero times it would reach rows that do not see it.
inline bool has_hidden_nonfinite(const Work& w, const float* v, int pitch, uint64_t seen_by_all, uint64_t seen) {
  for (uint64_t hidden = seen & ~seen_by_all; hidden != 0; hidden &= hidden - 1) {
    const float* row = v + int64_t{__builtin_ctzll(hidden)} * pitch;
    uint32_t worst = 0;
    for (int d = 0; d < w.args->v_dim; ++d) {
      const uint32_t x = bits(row[d]) & 0x7f800000;
      worst = x > worst ? x : worst;
    }
    if (worst == 0x7f800000) return true;
  }
  return false;
}

inline void accumulate(Work& w, const Tile& tile, int h, int tokens, const float* v, int pitch, uint64_t all,
                       uint64_t any) {
  if (all != tile.present && has_hidden_nonfinite(w, v, pitch, all, tile.present & span(0, tokens))) {
    for (int r = 0; r < w.rows; ++r)
      for (uint64_t seen = w.masks[r / w.group] & any; seen != 0; seen &= seen - 1) {
        const int t = __builtin_ctzll(seen);
        float* o = w.output(h, r);
        for (int d = 0; d < w.args->v_dim; ++d) o[d] += w.s[r * kTile + t] * v[int64_t{t} * pitch + d];
      }
    return;
  }
  gemm<true>(w.rows, round_up(w.args->v_dim, W), tokens, w.s, kTile, v, pitch, w.output(h, 0), w.v_pitch);
}

// One tile against all rows of one KV head. `w.masks` hold what each query row sees of it.
inline void attend_tile(Work& w, const Tile& tile, int h, uint64_t all, uint64_t any) {
  const int tokens = round_up(64 - __builtin_clzll(any), 16);
  load_keys(w, tile, tokens, h);
  if (w.rows <= kDotRows) {
    scores_by_dots(w.query(h, 0), w.k_pitch, w.rows, w.k, w.k_pitch, tokens, w.k_pitch, w.s, kTile);
  } else {
    transpose(w.k, w.k_pitch, tokens, w.k_pitch, w.kt, kTile);
    gemm<false>(w.rows, tokens, w.k_dim, w.query(h, 0), w.k_pitch, w.kt, kTile, w.s, kTile);
  }
  for (int r = 0; r < w.rows; ++r) {
    float* s = w.s + int64_t{r} * kTile;
    if (w.args->softcap > 0) apply_softcap(s, tokens, w.args->softcap);
    const int64_t at = int64_t{h} * w.rows + r;
    softmax_row(s, tokens, w.masks[r / w.group], w.m[at], w.l[at], w.output(h, r), w.v_pitch);
  }
  const float* v = w.k;
  int pitch = w.k_pitch;
  if (!w.shares_kv()) {
    load_values(w, tile, tokens, h);
    v = w.v;
    pitch = w.v_pitch;
  }
  accumulate(w, tile, h, tokens, v, pitch, all, any);
}

// Names the first tile of the piece of work that this worker most likely does next. Pieces are given out in order.
inline bool tile_of_next_piece(Work& w, Tile& tile) {
  const AttendArgs& a = *w.args;
  const int64_t piece = w.piece + a.num_workers, blocks = num_head_blocks(a);
  if (piece >= a.step->num_items * blocks) return false;
  const WorkItem& item = a.step->items[piece / blocks];
  w.next_head = static_cast<int>(piece % blocks) * a.heads_together;
  w.next_heads = imin(a.heads_together, a.k[0]->num_heads - w.next_head);
  const RowView view = row_view(a, item.sequence, item.row_begin);
  const int low = view.sinks == 0 ? view.low : 0, begin = imax(item.first ? 0 : item.token_begin, low);
  const int end = item.last ? a.step->seq_lens[item.sequence] : item.token_end, start = begin / kTile * kTile;
  tile_of_blocks(a, *a.k[0], item.sequence, start, span(begin - start, end - start), tile);
  return tile.num_runs > 0;
}

// Walks the tiles of [token_begin, token_end) for the rows and heads of `w`; `attend(w, tile, all, any)` does a tile.
template <class Attend>
inline void walk_positions(Work& w, Attend&& attend) {
  const AttendArgs& a = *w.args;
  int low = 1 << 30, high = 0, sinks = 0;
  for (int i = 0; i < w.num_rows; ++i) {
    w.views[i] = row_view(a, w.item->sequence, w.row + i);
    low = imin(low, w.views[i].low);
    high = imax(high, w.views[i].high);
    sinks = imax(sinks, w.views[i].sinks);
  }
  // The piece that starts the range also looks at the sink tokens before it.
  const int begin = w.item->first ? 0 : w.item->token_begin;
  const int end = w.item->last ? high : imin(high, w.item->token_end);
  if (w.item->first && sinks == 0) low = imax(low, w.item->token_begin);
  Tile tile, ahead;
  for (int start = begin / kTile * kTile; start < end; start += kTile) {
    if (start >= sinks && start + kTile <= low) {
      start = low / kTile * kTile - kTile;
      continue;
    }
    w.ahead = w.next = nullptr;
    if (const int next = start + kTile; next < end) {
      tile_of_blocks(a, *a.k[0], w.item->sequence, next, span(0, end - next), ahead);
      w.ahead = &ahead;
    } else if (w.last_pass && tile_of_next_piece(w, ahead)) {
      w.next = &ahead;
    }
    uint64_t any = 0, all = ~uint64_t{0};
    const uint64_t inside = span(begin - start, end - start);
    for (int i = 0; i < w.num_rows; ++i) any |= w.masks[i] = w.views[i].mask(start) & inside;
    tile_of_blocks(a, *a.k[0], w.item->sequence, start, any, tile);
    any &= tile.present;
    if (any == 0) continue;
    for (int i = 0; i < w.num_rows; ++i) all &= w.masks[i] &= any;
    attend(w, tile, all, any);
  }
}

// The same over given slots, for one query row.
template <class Attend>
inline void walk_indices(Work& w, Attend&& attend) {
  const AttendArgs& a = *w.args;
  const int64_t* slots = a.indices + query_row(w, 0) * a.num_indices;
  const int begin = w.item->first ? 0 : imin(w.item->token_begin, a.num_indices);
  const int end = w.item->last ? a.num_indices : imin(w.item->token_end, a.num_indices);
  Tile tile;
  w.ahead = w.next = nullptr;
  for (int start = begin; start < end; start += kTile) {
    tile_of_slots(*a.k[0], slots, start, imin(kTile, end - start), tile);
    if (tile.present == 0) continue;
    w.masks[0] = tile.present;
    attend(w, tile, tile.present, tile.present);
  }
}

// Adds the sink to the sum, divides by it, undoes the options of V and stores one row.
inline void finish_row(const AttendArgs& a, float* o, float m, float l, int kv_head, int64_t row, int head) {
  if (a.sinks != nullptr && l != 0) {
    const float top = a.sinks[head] > m ? a.sinks[head] : m, factor = std::exp(m - top);
    l = l * factor + std::exp(a.sinks[head] - top);
    for (int d = 0; d < a.v_dim; ++d) o[d] *= factor;
    m = top;
  }
  if (a.lse != nullptr) a.lse[row * a.num_q_heads + head] = l == 0 ? kMinusInf : m + std::log(l);
  if (l == 0) {
    std::memset(o, 0, sizeof(float) * static_cast<size_t>(a.v_dim));
  } else {
    const float inverse = 1.0f / l;
    for (int d = 0; d < a.v_dim; ++d) o[d] *= inverse;
    from_stored(*a.v, kv_head, o, a.v_dim);
  }
  store_row(o, a.out.dtype, a.v_dim, a.out.at(row, head));
}

inline float* partial(const AttendArgs& a, int split, int row, int head) {
  const int64_t at = int64_t{a.step->split_rows[split]} + row;
  return a.partials + (at * a.num_q_heads + head) * (a.v_dim + 2);
}

inline void end(Work& w) {
  const AttendArgs& a = *w.args;
  for (int h = 0; h < w.num_heads; ++h)
    for (int r = 0; r < w.rows; ++r) {
      const int64_t at = int64_t{h} * w.rows + r;
      const int head = query_head(w, h, r);
      if (w.item->split < 0) {
        finish_row(a, w.output(h, r), w.m[at], w.l[at], w.head + h, query_row(w, r), head);
        continue;
      }
      float* p = partial(a, w.item->split, w.row - w.item->row_begin + r / w.group, head);
      p[0] = w.m[at];
      p[1] = w.l[at];
      std::memcpy(p + 2, w.output(h, r), sizeof(float) * static_cast<size_t>(a.v_dim));
    }
}

// Splits an item into passes over heads and rows; `pass(w)` does one.
template <class Pass>
inline void each_pass(const AttendArgs& a, int item, int head_block, int pitch, Pass&& pass) {
  Work w;
  w.args = &a;
  w.item = a.step->items + item;
  w.piece = int64_t{item} * num_head_blocks(a) + head_block;
  w.group = a.num_q_heads / a.k[0]->num_heads;
  w.k_dim = a.k[0]->dim + (a.num_k > 1 ? a.k[1]->dim : 0);
  w.k_pitch = round_up(w.k_dim, pitch);
  w.v_pitch = round_up(a.v_dim, pitch);
  const int each = a.heads_together;
  const int head_end = imin((head_block + 1) * each, a.k[0]->num_heads);
  const int total_rows = w.item->row_end - w.item->row_begin;
  const int most = a.indices != nullptr ? 1 : imax(1, kMaxRows / w.group);
  // Many rows reuse a decoded tile often enough; then one head at a time keeps the working set small.
  const int together = total_rows * w.group * each <= kMaxRows ? each : 1;
  for (int head = head_block * each; head < head_end; head += together)
    for (int row = 0; row < total_rows; row += most) {
      w.head = head;
      w.num_heads = imin(together, head_end - head);
      w.row = w.item->row_begin + row;
      w.num_rows = imin(most, total_rows - row);
      w.rows = w.num_rows * w.group;
      w.last_pass = head + together >= head_end && row + most >= total_rows;
      pass(w);
    }
}

template <class Attend>
inline void walk(Work& w, Attend&& attend) {
  if (w.args->indices != nullptr) {
    walk_indices(w, attend);
  } else {
    walk_positions(w, attend);
  }
}

inline void attend_item(const AttendArgs& a, int item, int head_block, Scratch& scratch) {
  each_pass(a, item, head_block, 16, [&](Work& w) {
    carve(w, scratch);
    begin(w);
    clear_tiles(w);
    walk(w, [](Work& w, const Tile& tile, uint64_t all, uint64_t any) {
      for (int h = 0; h < w.num_heads; ++h) attend_tile(w, tile, h, all, any);
    });
    end(w);
  });
}

// Joins the splits of one item's rows, in order.
inline void merge_item(const AttendArgs& a, int index, Scratch& scratch) {
  const Merge& merge = a.step->merges[index];
  const int pitch = round_up(a.v_dim, 16);
  float* o = reinterpret_cast<float*>(scratch.reserve(sizeof(float) * static_cast<size_t>(pitch)));
  const int group = a.num_q_heads / a.k[0]->num_heads;
  for (int row = 0; row < merge.row_end - merge.row_begin; ++row)
    for (int head = 0; head < a.num_q_heads; ++head) {
      float m = kMinusInf, l = 0;
      for (int i = 0; i < merge.num_splits; ++i) {
        const float* p = partial(a, merge.first_split + i, row, head);
        m = p[0] > m ? p[0] : m;
      }
      std::memset(o, 0, sizeof(float) * static_cast<size_t>(pitch));
      for (int i = 0; i < merge.num_splits; ++i) {
        const float* p = partial(a, merge.first_split + i, row, head);
        if (p[1] == 0) continue;
        const float factor = std::exp(p[0] - m);
        l += p[1] * factor;
        for (int d = 0; d < a.v_dim; ++d) o[d] += p[2 + d] * factor;
      }
      finish_row(a, o, m, l, head / group, a.step->cu_seqlens[merge.sequence] + merge.row_begin + row, head);
    }
}

}  // namespace
}  // namespace kvpool
