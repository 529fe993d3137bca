// Moves of whole blocks and of single tokens: bytes only, a codec never runs.
#include <algorithm>
#include <cstring>

#include "cpu/stream_copy.hpp"
#include "kernels/ops.hpp"

namespace kvpool {

namespace {

constexpr int64_t kPieceBytes = 64 << 10;  // work of one pick-up
constexpr int64_t kStreamBytes = 1 << 20;  // from here on the copies bypass the cache

}  // namespace

void copy_blocks(Workers& workers, Blocks src, Blocks dst, int64_t bytes, int pieces, const int32_t* src_ids,
                 const int32_t* dst_ids, int64_t count) {
  const int64_t cuts = (bytes + kPieceBytes - 1) / kPieceBytes;
  const bool stream = bytes * pieces * count >= kStreamBytes;
  workers.each(count * pieces * cuts, [&](int64_t i, Scratch&) {
    const int64_t cut = i % cuts, piece = i / cuts % pieces, block = i / cuts / pieces;
    const int64_t begin = cut * kPieceBytes, size = std::min(kPieceBytes, bytes - begin);
    uint8_t* to = dst.base + piece * dst.pitch + dst_ids[block] * dst.stride + begin;
    const uint8_t* from = src.base + piece * src.pitch + src_ids[block] * src.stride + begin;
    if (stream) {
      stream_copy(to, from, size);
    } else {
      std::memmove(to, from, static_cast<size_t>(size));
    }
  });
}

void move_slots(Workers& workers, const VectorPlane* planes, int num_planes, int tokens_per_block, const int64_t* src,
                const int64_t* dst, int64_t count) {
  workers.each(num_planes, [&](int64_t p, Scratch&) {
    const VectorPlane& v = planes[p];
    for (int64_t i = 0; i < count; ++i) {
      if (src[i] < 0 || dst[i] < 0 || src[i] == dst[i]) continue;
      const int64_t from = src[i] / tokens_per_block, to = dst[i] / tokens_per_block;
      for (int h = 0; h < v.num_heads; ++h)
        std::memcpy(v.plane.at(to, h, dst[i] % tokens_per_block), v.plane.at(from, h, src[i] % tokens_per_block),
                    static_cast<size_t>(v.bytes));
    }
  });
}

}  // namespace kvpool
