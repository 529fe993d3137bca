// Elements of the 8-bit and 4-bit formats, branch-free. Encoding rounds to nearest even and saturates; NaN becomes
// 0x7F. The subnormal half adds a power of two whose unit in the last place is the format's step, so that the
// addition rounds.
//
// Source: OCP 8-bit Floating Point Specification 1.0; OCP Microscaling Formats 1.0.
#pragma once

#include "kernels/codecs/numeric.hpp"

namespace kvpool {
namespace {

constexpr uint32_t kInfBits = 0x7f800000;
constexpr float kSmallestScale = 0x1p-126f;
constexpr uint8_t kNanCode = 0x7f;

constexpr uint32_t magnitude(float x) { return bits(x) & 0x7fffffff; }
constexpr uint32_t umin(uint32_t a, uint32_t b) { return a < b ? a : b; }

// A float of `mantissa` bits and the given bias from its code without sign, at compile time.
constexpr float float_value(int code, int mantissa, int bias) {
  const int exponent = code >> mantissa, fraction = code & ((1 << mantissa) - 1);
  float v = exponent == 0 ? static_cast<float>(fraction) : static_cast<float>(fraction + (1 << mantissa));
  for (int i = (exponent == 0 ? 1 : exponent) - bias - mantissa; i != 0; i += i < 0 ? 1 : -1) v *= i < 0 ? 0.5f : 2.0f;
  return v;
}

// s eeee mmm, bias 7.
struct E4m3 {
  static constexpr float value(int code) { return code == 0x7f ? __builtin_nanf("") : float_value(code, 3, 7); }

  static constexpr float largest = 448.0f;
  static constexpr int kShift = 20;                             // bits of an fp32 below the code's
  static constexpr uint32_t kExponent = 120u << 23;             // by which its exponent is less
  static constexpr float kNormal = 0x1p-6f, kMagic = 16384.0f;  // the least normal; what rounds the others

  static constexpr uint8_t encode(float y) {
    const uint32_t m = magnitude(y), a = umin(m, bits(largest));
    const uint32_t normal = (a + 0x7ffff + (a >> kShift & 1) - kExponent) >> kShift;
    const uint32_t subnormal = bits(from_bits(a) + kMagic) - bits(kMagic);
    const uint32_t code = (a < bits(kNormal) ? subnormal : normal) | (bits(y) >> 24 & 0x80);
    return static_cast<uint8_t>(m > kInfBits ? kNanCode : code);
  }

  static float decode(uint8_t c) {
    const uint32_t m = c & 0x7fu;
    const uint32_t subnormal = bits(static_cast<float>(static_cast<int32_t>(m)) * 0x1p-9f);
    const uint32_t normal = (m << 20) + (120u << 23);
    const uint32_t value = m == 0x7f ? 0x7fc00000 : m < 8 ? subnormal : normal;
    return from_bits(value | (c & 0x80u) << 24);
  }
};

// s eeeee mm, bias 15: the upper half of an fp16.
struct E5m2 {
  static constexpr float value(int code) {
    return code > 0x7c ? __builtin_nanf("") : code == 0x7c ? __builtin_huge_valf() : float_value(code, 2, 15);
  }
  static constexpr float largest = 57344.0f;
  static constexpr int kShift = 21;
  static constexpr uint32_t kExponent = 112u << 23;
  static constexpr float kNormal = 0x1p-14f, kMagic = 128.0f;

  static constexpr uint8_t encode(float y) {
    const uint32_t m = magnitude(y), a = umin(m, bits(largest));
    const uint32_t normal = (a + 0xfffff + (a >> kShift & 1) - kExponent) >> kShift;
    const uint32_t subnormal = bits(from_bits(a) + kMagic) - bits(kMagic);
    const uint32_t code = (a < bits(kNormal) ? subnormal : normal) | (bits(y) >> 24 & 0x80);
    return static_cast<uint8_t>(m > kInfBits ? kNanCode : code);
  }

  static float decode(uint8_t c) {
    const uint32_t m = c & 0x7fu;
    const uint32_t subnormal = bits(static_cast<float>(static_cast<int32_t>(m)) * 0x1p-16f);
    const uint32_t normal = (m << 21) + (112u << 23);
    const uint32_t special = m == 0x7c ? kInfBits : 0x7fc00000;
    return from_bits((m >= 0x7c ? special : m < 4 ? subnormal : normal) | (c & 0x80u) << 24);
  }
};

// -127..127; NaN becomes 0.
struct Int8 {
  static constexpr float value(int code) { return static_cast<float>(code); }
  static constexpr float largest = 127.0f;

  static constexpr uint8_t encode(float y) {
    const uint32_t m = magnitude(y);
    const float a = from_bits(umin(m > kInfBits ? 0 : m, 0x42fe0000) | (bits(y) & 0x80000000));
    return static_cast<uint8_t>(bits(a + 12582912.0f) - 0x4b400000);  // 1.5 * 2^23
  }

  static float decode(uint8_t c) { return static_cast<float>(static_cast<int32_t>(static_cast<int8_t>(c))); }
};

// s ee m: 0 .5 1 1.5 2 3 4 6. `y` is finite.
struct E2m1 {
  static constexpr float largest = 6.0f;

  static uint32_t encode(float y) {
    const uint32_t a = umin(magnitude(y), 0x40c00000);
    const uint32_t normal = (a + 0x1fffff + (a >> 22 & 1) - (126u << 23)) >> 22;
    const uint32_t subnormal = bits(from_bits(a) + 4194304.0f) - 0x4a800000;
    return (a < 0x3f800000 ? subnormal : normal) | (bits(y) >> 28 & 8);
  }

  static float decode(uint32_t c) {
    const uint32_t m = c & 7;
    const uint32_t small = m == 1 ? 0x3f000000 : 0;
    return from_bits((m < 2 ? small : (m << 22) + (126u << 23)) | (c & 8) << 28);
  }
};

// Largest magnitude of n elements as bits: at least kInfBits when one is not finite.
inline uint32_t amax_bits(const float* x, int n) {
  uint32_t top = 0;
  for (int i = 0; i < n; ++i) {
    const uint32_t m = magnitude(x[i]);
    top = m > top ? m : top;
  }
  return top;
}

// The largest bf16; beyond it the rounding of a scale could make a decoded element infinite.
constexpr uint32_t kLargestAmax = 0x7f7f0000;

// max(amax / largest, 2^-126); 0 for 0, NaN when an element is not finite.
constexpr float scale_of(uint32_t amax, float largest) {
  if (amax >= kInfBits) return from_bits(0x7fc00000);
  if (amax == 0) return 0;
  const float s = from_bits(umin(amax, kLargestAmax)) / largest;
  return s < kSmallestScale ? kSmallestScale : s;
}

// E2M1 codes of 16 elements in units of their scale, packed: element 2i in the low nibble.
inline void pack_e2m1(const float* y, uint8_t* out) {
  uint32_t c[16];
  for (int i = 0; i < 16; ++i) c[i] = E2m1::encode(y[i]);
  for (int i = 0; i < 8; ++i) out[i] = static_cast<uint8_t>(c[2 * i] | c[2 * i + 1] << 4);
}

// 16 elements times s.
inline void unpack_e2m1(const uint8_t* data, float s, float* out) {
#if defined(__AVX512F__)
  const __m512 table = _mm512_set_ps(-6, -4, -3, -2, -1.5f, -1, -.5f, -0.0f, 6, 4, 3, 2, 1.5f, 1, .5f, 0);
  const __m512i x = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(data)));
  const __m512i codes = _mm512_or_si512(x, _mm512_slli_epi64(x, 28));  // vpermps uses the low 4 bits
  _mm512_storeu_ps(out, _mm512_mul_ps(_mm512_permutexvar_ps(codes, table), _mm512_set1_ps(s)));
#else
  for (int i = 0; i < 8; ++i) {
    out[2 * i] = E2m1::decode(data[i] & 15u) * s;
    out[2 * i + 1] = E2m1::decode(data[i] >> 4) * s;
  }
#endif
}

inline void count(int64_t& counter, int64_t amount) {
  if (amount != 0) __atomic_fetch_add(&counter, amount, __ATOMIC_RELAXED);
}

}  // namespace
}  // namespace kvpool
