// Indexer scores of sparse attention: for each query row and key, sum over heads of weight * relu(q . k).
//
// Source: DeepSeek-V3.2, lightning indexer (the caller folds the softmax scale, which is positive, into the weights).
#pragma once

#include "kernels/gemm.hpp"
#include "kernels/rows.hpp"
#include "kernels/tokens.hpp"

namespace kvpool {
namespace {

// Scores of tokens [begin, end) of a sequence for rows [row_begin, row_end): out[row - row_begin][token - begin].
// Tokens a row does not see get -inf. `begin` is a multiple of the tile.
inline void score_item(const ScoreArgs& a, const ScoreItem& item, float* out, Scratch& scratch) {
  const Store& s = *a.store;
  const int pitch = round_up(s.dim, 16), heads = a.num_q_heads;
  float* k = reinterpret_cast<float*>(
      scratch.reserve(sizeof(float) * static_cast<size_t>(2 * kTile * pitch + heads * (pitch + kTile))));
  float *kt = k + kTile * pitch, *q = kt + kTile * pitch, *products = q + heads * pitch;
  std::memset(k, 0, sizeof(float) * static_cast<size_t>(kTile * pitch));
  AttendArgs view;  // positions only
  view.step = a.step;
  Tile tile;
  const auto decode = codec_functions(s).decode_run;
  for (int start = item.begin; start < item.end; start += kTile) {
    const int tokens = imin(kTile, item.end - start);
    tile_of_blocks(view, s, item.sequence, start, span(0, tokens), tile);
    for (int j = 0; j < tile.num_runs; ++j) {
      const Run& run = tile.runs[j];
      decode(s, run.block, 0, run.offset, run.count, k + int64_t{run.at} * pitch, pitch);
    }
    for (uint64_t absent = ~tile.present; absent != 0; absent &= absent - 1)
      std::memset(k + int64_t{__builtin_ctzll(absent)} * pitch, 0, sizeof(float) * static_cast<size_t>(pitch));
    transpose(k, pitch, kTile, pitch, kt, kTile);
    for (int row = item.row_begin; row < item.row_end; ++row) {
      const int64_t t = a.step->cu_seqlens[item.sequence] + row;
      const uint64_t seen = row_view(view, item.sequence, row).mask(start) & tile.present;
      float* to = out + int64_t{row - item.row_begin} * (item.end - item.begin) + (start - item.begin);
      alignas(64) float total[kTile] = {};
      if (seen != 0) {
        for (int h = 0; h < heads; ++h) {
          load_row(a.q.at(t, h), a.q.dtype, s.dim, q + h * pitch);
          to_query(s, 0, q + h * pitch);
          for (int i = s.dim; i < pitch; ++i) q[h * pitch + i] = 0;
        }
        gemm<false>(heads, kTile, s.dim, q, pitch, kt, kTile, products, kTile);
        for (int h = 0; h < heads; ++h) {
          const Vec weight = splat(a.weights[t * heads + h]);
          for (int i = 0; i < kTile; i += W)
            store(total + i, fma(weight, vmax(Vec{}, load(products + h * kTile + i)), load(total + i)));
        }
      }
      for (int i = 0; i < tokens; ++i) to[i] = seen >> i & 1 ? total[i] : -__builtin_huge_valf();
    }
  }
}

}  // namespace
}  // namespace kvpool
