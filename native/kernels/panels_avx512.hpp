// Tokens packed for products of blocks: 64 columns wide, two bf16 rows of the inner axis in one 32-bit word, the form
// that vdpbf16ps and AMX tiles both take. Packed once a step of tokens and used by all query rows of a KV head.
//
// Included by attend_panels.hpp only.
#pragma once

#include "kernels/bf16_rows_avx512.hpp"

namespace kvpool {
namespace {

constexpr int kPanelColumns = 64;  // of one panel: tokens of a tile, or elements of a value
constexpr int kInner = 32;         // inner sizes are padded with zeros to a multiple: one tile of AMX
constexpr int kMaxParts = 8;       // scales that one vector may have
constexpr int kStepTiles = 2;      // tiles that are worked on together
constexpr int kStepTokens = kStepTiles * kTile;

// Elements [d, d + 32) of a row of `dim`, zeros behind its end.
inline __m512i row_elements(const uint16_t* row, int d, int dim) {
  return dim - d >= 32 ? _mm512_loadu_si512(row + d) : _mm512_maskz_loadu_epi16((1u << (dim - d)) - 1, row + d);
}

// Elements [begin, begin + count) of the tile's keys: out[i / 2][t] is the pair (i, i + 1) of token t.
inline void pack_keys(const Bf16Rows& rows, int begin, int count, uint32_t* out) {
  for (int d = 0; d < count; d += kInner)
    for (int t = 0; t < kTile; t += 16) {
      __m512i r[16];
      for (int i = 0; i < 16; ++i) r[i] = row_elements(rows.row[t + i] + begin, d, count);
      transpose_words(r);
      for (int i = 0; i < 16; ++i) _mm512_store_si512(out + int64_t{d / 2 + i} * kPanelColumns + t, r[i]);
    }
}

// Elements of two rows alternate: indices of the first half of the result.
alignas(64) constexpr uint16_t kPairOrder[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};

// Values of a tile: panel d / 64, row t / 2, column d % 64 is the pair (t, t + 1) of element d. `pitch` words lie
// between panels.
inline void pack_values(const Bf16Rows& rows, int dim, uint32_t* out, int64_t pitch) {
  const __m512i low = _mm512_load_si512(kPairOrder), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int t = 0; t < kTile; t += 2)
    for (int d = 0; d < round_up(dim, 32); d += 32) {
      const __m512i x = row_elements(rows.row[t], d, dim), y = row_elements(rows.row[t + 1], d, dim);
      uint32_t* to = out + d / kPanelColumns * pitch + int64_t{t / 2} * kPanelColumns + d % kPanelColumns;
      _mm512_store_si512(to, _mm512_permutex2var_epi16(x, low, y));
      _mm512_store_si512(to + 16, _mm512_permutex2var_epi16(x, high, y));
    }
}

// Rows of memory to fetch into the second-level cache while other work goes on, some lines at a time: the tokens
// behind the ones worked on.
struct Ahead {
  const AttendArgs* args = nullptr;
  int sequence = 0, head = 0, next = 0, end = 0;  // positions [next, end) are still to be named
  const Store* stores[3] = {};
  int num_stores = 0, store = 0;
  int64_t row_lines = 0;
  int run = 0, token = 0;
  int64_t line = 0;
  Tile tile;

  void begin(const AttendArgs& a, int in_sequence, int of_head, int start, int stop) {
    args = &a;
    sequence = in_sequence;
    head = of_head;
    next = start;
    end = stop;
    num_stores = 0;
    for (int i = 0; i < a.num_k; ++i) stores[num_stores++] = a.k[i];
    if (a.v != a.k[0]) stores[num_stores++] = a.v;
    store = num_stores - 1;
    tile.num_runs = run = 0;
  }

  // False when nothing is left to name.
  bool more() {
    if (run < tile.num_runs) return true;
    if (store + 1 == num_stores) {
      tile.num_runs = 0;
      if (next < end) tile_of_blocks(*args, *stores[0], sequence, next, span(0, end - next), tile);
      next += kTile;
      if (tile.num_runs == 0) return false;
      store = 0;
    } else {
      ++store;
    }
    run = token = 0;
    line = 0;
    const Store& s = *stores[store];
    // All containers of a row: the head's next token, or the next head, is never nearer than they reach.
    const int64_t bytes = s.data.stride_n < s.data.stride_h || s.num_heads == 1 ? s.data.stride_n : s.data.stride_h;
    row_lines = (bytes + 63) / 64;
    return true;
  }

  void fetch(int lines) {
    for (; lines > 0 && more();) {
      const Run& r = tile.runs[run];
      const uint8_t* row = stores[store]->data.at(r.block, head, r.offset + token);
      for (; lines > 0 && line < row_lines; ++line, --lines)
        _mm_prefetch(reinterpret_cast<const char*>(row + 64 * line), _MM_HINT_T1);
      if (line < row_lines) return;
      line = 0;
      if (++token == r.count) {
        token = 0;
        ++run;
      }
    }
  }
};

}  // namespace
}  // namespace kvpool
