// A copy with non-temporal stores.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace kvpool {

// Copies past the cache where the destination is 16-byte aligned: large moves are bound by memory, and ordinary stores
// read each line before they write it. The ranges do not overlap.
inline void stream_copy(uint8_t* dst, const uint8_t* src, int64_t bytes) {
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

}  // namespace kvpool
