// Scalar number formats, branch-free so that loops over them become vector code of the including file's
// instruction set with the same bits. Round to nearest even, no flush to zero.
#pragma once

#include <bit>

#include "kernels/simd.hpp"

namespace kvpool {
namespace {

constexpr uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }
constexpr float from_bits(uint32_t u) { return std::bit_cast<float>(u); }

inline float bf16_to_f32(uint16_t x) { return from_bits(uint32_t{x} << 16); }

inline uint16_t f32_to_bf16(float x) {
  const uint32_t u = bits(x);
  const uint32_t rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
  return static_cast<uint16_t>((u & 0x7fffffff) > 0x7f800000 ? (u >> 16 | 0x40) : rounded);
}

inline float f16_to_f32(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  // Shifted into place and multiplied by 2^112, which also normalises subnormals; inf and NaN apart.
  const uint32_t magnitude = uint32_t{h} & 0x7fff, sign = (uint32_t{h} & 0x8000) << 16;
  const uint32_t finite = bits(from_bits(magnitude << 13) * 0x1p112f);
  const uint32_t special = 0x7f800000 | magnitude << 13;
  return from_bits(sign | (magnitude >= 0x7c00 ? special : finite));
#endif
}

inline uint16_t f32_to_f16(float x) {
#if defined(__F16C__)
  return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
  const uint32_t u = bits(x), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
  // Below 2^-14: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits.
  const uint32_t subnormal = bits(from_bits(a) + 0.5f) - 0x3f000000;
  const uint32_t normal = (a + 0xfff + (a >> 13 & 1) - (112u << 23)) >> 13;
  const uint32_t finite = a < 0x38800000 ? subnormal : normal;
  const uint32_t special = a > 0x7f800000 ? (0x7e00 | (a >> 13 & 0x3ff)) : 0x7c00;
  return static_cast<uint16_t>(sign | (a >= 0x47800000 ? special : finite > 0x7c00 ? 0x7c00 : finite));
#endif
}

// The row `src` of `n` elements as fp32.
inline void load_row(const uint8_t* src, DType dtype, int n, float* out) {
  if (dtype == DType::fp32) {
    std::memcpy(out, src, 4 * static_cast<size_t>(n));
  } else if (dtype == DType::bf16) {
    const auto* p = reinterpret_cast<const uint16_t*>(src);
    for (int i = 0; i < n; ++i) out[i] = bf16_to_f32(p[i]);
  } else {
    const auto* p = reinterpret_cast<const uint16_t*>(src);
    int i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= n; i += 16)
      store(out + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i))));
#elif defined(__F16C__)
    for (; i + 8 <= n; i += 8)
      store(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i))));
#endif
    for (; i < n; ++i) out[i] = f16_to_f32(p[i]);
  }
}

inline void store_row(const float* x, DType dtype, int n, uint8_t* dst) {
  if (dtype == DType::fp32) {
    std::memcpy(dst, x, 4 * static_cast<size_t>(n));
  } else if (dtype == DType::bf16) {
    auto* p = reinterpret_cast<uint16_t*>(dst);
    for (int i = 0; i < n; ++i) p[i] = f32_to_bf16(x[i]);
  } else {
    auto* p = reinterpret_cast<uint16_t*>(dst);
    for (int i = 0; i < n; ++i) p[i] = f32_to_f16(x[i]);
  }
}

}  // namespace
}  // namespace kvpool
