// Moves of whole blocks and of single tokens: bytes only, a codec never runs.
#include <algorithm>
#include <cstring>

#include "kernels/ops.hpp"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace kvpool {

namespace {

constexpr int64_t kPieceBytes = 64 << 10;  // work of one pick-up
constexpr int64_t kStreamBytes = 1 << 20;  // from here on the copies bypass the cache

// Copies with non-temporal stores; 16-byte aligned destination.
void stream_copy(uint8_t* dst, const uint8_t* src, int64_t bytes) {
#if defined(__x86_64__)
  if (reinterpret_cast<uintptr_t>(dst) % 16 == 0) {
    int64_t i = 0;
    for (; i + 64 <= bytes; i += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(src + i + 1024), _MM_HINT_T0);
      const __m128i* from = reinterpret_cast<const __m128i*>(src + i);
      __m128i* to = reinterpret_cast<__m128i*>(dst + i);
      const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1), c = _mm_loadu_si128(from + 2),
                    d = _mm_loadu_si128(from + 3);
      _mm_stream_si128(to, a);
      _mm_stream_si128(to + 1, b);
      _mm_stream_si128(to + 2, c);
      _mm_stream_si128(to + 3, d);
    }
    _mm_sfence();
    std::memcpy(dst + i, src + i, static_cast<size_t>(bytes - i));
    return;
  }
#endif
  std::memcpy(dst, src, static_cast<size_t>(bytes));
}

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
