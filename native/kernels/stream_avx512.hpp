// What decode fetches of the next tile while it works on this one.
//
// Included by *_avx512.cpp only.
#pragma once

#include "kernels/tokens.hpp"

namespace kvpool {
namespace {

// Memory to fetch while other work goes on, in the order it is given and as evenly as the work goes on: memory takes a
// line every 8 cycles, and more at once make it slower.
class Stream {
 public:
  void clear() {
    num_lines_ = num_pieces_ = next_ = 0;
    at_ = end_ = 0;
  }

  // The first line of a piece far from the one before is fetched at once: the translation of its address takes as long
  // as memory does, and nothing else hides it.
  void add(const uint8_t* p, int64_t bytes) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(p) & ~uintptr_t{63};
    const uintptr_t end = (reinterpret_cast<uintptr_t>(p) + bytes + 63) & ~uintptr_t{63};
    num_lines_ += static_cast<int64_t>(end - begin) / 64;
    const uintptr_t last = num_pieces_ > 0 ? pieces_[num_pieces_ - 1].end : 0;
    if (begin == last) {
      pieces_[num_pieces_ - 1].end = end;
    } else if (num_pieces_ < kPieces) {
      pieces_[num_pieces_++] = {begin, end};
      if (begin - last > 4096) _mm_prefetch(reinterpret_cast<const char*>(begin), _MM_HINT_T0);
    }
  }

  // `share` of all lines is for the next `work` units of work, which `pass` is told of.
  void spread(double share, int64_t work) {
    rate_ = static_cast<uint32_t>(share * static_cast<double>(num_lines_ * kLine) / static_cast<double>(work));
    credit_ = 0;
  }

  KVPOOL_INLINE void pass(int work) {
    credit_ += static_cast<uint32_t>(work) * rate_;
    fetch(credit_ / kLine);
    credit_ %= kLine;
  }

  // Fetches what is left.
  void finish() { fetch_pieces(static_cast<uint64_t>(num_lines_)); }

 private:
  struct Piece {
    uintptr_t begin, end;
  };
  static constexpr int kPieces = 16 * kTile;
  static constexpr uint32_t kLine = 1 << 16;  // what rates are counted in

  KVPOOL_INLINE void fetch(uint64_t lines) {
    const uintptr_t to = at_ + 64 * lines;
    if (to > end_) return fetch_pieces(lines);
    fetch_to(to);
  }

  KVPOOL_INLINE void fetch_to(uintptr_t to) {
    for (uintptr_t p = at_; p < to; p += 64) {
      const auto* line = reinterpret_cast<const char*>(p);
      if (p % 4096 < 64) {  // the first line of a page into the first-level cache, so that its stream begins at once
        _mm_prefetch(line, _MM_HINT_T0);
      } else {
        _mm_prefetch(line, _MM_HINT_T1);
      }
    }
    at_ = to;
  }

  __attribute__((noinline)) void fetch_pieces(uint64_t lines) {
    while (lines > 0) {
      if (at_ == end_) {
        if (next_ == num_pieces_) return;
        at_ = pieces_[next_].begin;
        end_ = pieces_[next_++].end;
      }
      const uint64_t left = (end_ - at_) / 64, now = lines < left ? lines : left;
      fetch_to(at_ + 64 * now);
      lines -= now;
    }
  }

  uintptr_t at_ = 0, end_ = 0;      // of the piece that is being fetched
  uint32_t rate_ = 0, credit_ = 0;  // credit: what is due and no whole line yet
  int64_t num_lines_ = 0;
  int num_pieces_ = 0, next_ = 0;
  Piece pieces_[kPieces];
};

// Bytes of one vector's data.
inline int64_t row_bytes(const Store& s) {
  switch (s.codec) {
    case CodecId::bf16:
      return 2 * s.dim;
    case CodecId::nvfp4:
    case CodecId::nvfp4_token:
      return s.dim / 2;
    default:
      return s.dim;
  }
}

// What the tokens of a tile occupy in one plane, for `heads` heads; `bytes` of each vector.
inline void add_plane(const Plane& p, const Tile& tile, int head, int heads, int64_t bytes, Stream& ahead) {
  if (p.base == nullptr || bytes == 0) return;
  const bool heads_inside = heads > 1 && p.stride_h < p.stride_n;
  const int64_t row = heads_inside ? (heads - 1) * p.stride_h + bytes : bytes;
  for (int j = 0; j < tile.num_runs; ++j) {
    const Run& run = tile.runs[j];
    const int64_t all = row * run.count;
    const bool dense = row == p.stride_n, together = dense && (heads_inside || p.stride_h == all);
    if (together) {
      ahead.add(p.at(run.block, head, run.offset), heads_inside ? all : all * heads);
      continue;
    }
    for (int h = 0; h < (heads_inside ? 1 : heads); ++h) {
      const uint8_t* from = p.at(run.block, head + h, run.offset);
      if (dense) {
        ahead.add(from, all);
      } else {
        for (int i = 0; i < run.count; ++i) ahead.add(from + i * p.stride_n, row);
      }
    }
  }
}

}  // namespace
}  // namespace kvpool
