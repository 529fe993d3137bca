// Which tokens a tile holds and which query row sees which of them. Tiles are 64 positions, so a row's view of a
// tile is one 64-bit mask.
#pragma once

#include "kernels/simd.hpp"

namespace kvpool {
namespace {

constexpr int kTile = 64;

// Consecutive tokens of one block inside a tile.
struct Run {
  int64_t block;
  int offset;  // token in block
  int count;
  int at;  // token in tile
};

struct Tile {
  int start = 0;         // position of token 0 (of index 0 for sparse attention)
  uint64_t present = 0;  // tokens that are stored
  int num_runs = 0;
  Run runs[kTile];
};

// Bits [begin, end) of a tile; both may lie outside it.
inline uint64_t span(int begin, int end) {
  if (begin < 0) begin = 0;
  if (end > kTile) end = kTile;
  if (begin >= end) return 0;
  return (end == kTile ? ~uint64_t{0} : (uint64_t{1} << end) - 1) & ~((uint64_t{1} << begin) - 1);
}

// Positions one row sees: [low, high), and [0, sinks) besides.
struct RowView {
  int low, high, sinks;
  const uint64_t* tree;  // over the rows of this step, which start at position `tree_start`
  int tree_start;

  uint64_t mask(int start) const {
    uint64_t m = span(low - start, high - start) | span(-start, (sinks < high ? sinks : high) - start);
    if (tree != nullptr && start + kTile > tree_start) {
      for (int i = tree_start > start ? tree_start - start : 0; i < kTile && start + i < high; ++i) {
        const int row = start + i - tree_start;
        if (!(tree[row >> 6] >> (row & 63) & 1)) m &= ~(uint64_t{1} << i);
      }
    }
    return m;
  }
};

inline RowView row_view(const AttendArgs& a, int sequence, int row) {
  const StepView& step = *a.step;
  const int rows = step.cu_seqlens[sequence + 1] - step.cu_seqlens[sequence];
  const int length = step.seq_lens[sequence], position = length - rows + row;
  RowView view{0, position + 1, 0, nullptr, length - rows};
  if (position < 0) view.high = 0;
  if (step.window > 0) view.low = imax(0, position - step.window + 1);
  if (step.chunk > 0 && position >= 0) view.low = position / step.chunk * step.chunk;
  if (step.window > 0) view.sinks = step.sink_tokens;
  if (a.tree_mask != nullptr) {
    view.tree = a.tree_mask + int64_t{step.cu_seqlens[sequence] + row} * a.tree_words;
    view.high = position < 0 ? 0 : length;  // draft rows are no chain: the mask alone says who sees whom
  }
  return view;
}

// Fills runs and `present` for the wanted positions of a sequence, by its block table.
inline void tile_of_blocks(const AttendArgs& a, const Store& s, int sequence, int start, uint64_t wanted, Tile& tile) {
  const int32_t* table = a.step->block_table + int64_t{sequence} * a.step->table_stride;
  tile.start = start;
  tile.present = 0;
  tile.num_runs = 0;
  const int n = s.tokens_per_block;
  for (int i = 0; i < kTile;) {
    const int offset = (start + i) & (n - 1), count = imin(n - offset, kTile - i);
    const uint64_t part = span(i, i + count) & wanted;
    if (part != 0) {
      const int32_t block = table[(start + i) >> s.block_shift];
      if (block >= 0) {
        const int first = __builtin_ctzll(part), last = 63 - __builtin_clzll(part);
        tile.runs[tile.num_runs++] = {block, offset + first - i, last - first + 1, first};
        tile.present |= span(first, last + 1);
      }
    }
    i += count;
  }
}

// The same for slots given one by one.
inline void tile_of_slots(const Store& s, const int64_t* slots, int start, int count, Tile& tile) {
  tile.start = start;
  tile.present = 0;
  tile.num_runs = 0;
  const int64_t limit = s.num_blocks * s.tokens_per_block;
  for (int i = 0; i < count; ++i) {
    const int64_t slot = slots[start + i];
    if (slot < 0 || slot >= limit) continue;
    const int64_t block = slot >> s.block_shift;
    const int offset = static_cast<int>(slot & (s.tokens_per_block - 1));
    tile.present |= uint64_t{1} << i;
    if (tile.num_runs > 0) {
      Run& last = tile.runs[tile.num_runs - 1];
      if (last.block == block && last.offset + last.count == offset && last.at + last.count == i) {
        ++last.count;
        continue;
      }
    }
    tile.runs[tile.num_runs++] = {block, offset, 1, i};
  }
}

}  // namespace
}  // namespace kvpool
