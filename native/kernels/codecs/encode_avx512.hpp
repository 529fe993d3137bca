// Vector versions of the quantising writes from bf16 rows, with the bits of the scalar ones: of several rows at a
// time, so that the latencies of one hide behind the work of another.
//
// Included only where AVX-512 is compiled.
#pragma once

#include <array>

#include "kernels/codecs/codec.hpp"
#include "kernels/codecs/elements.hpp"

namespace kvpool {
namespace {

struct Bf16Batch {
  static constexpr int kRows = 16;
  const uint16_t* x[kRows] = {};
  Place at[kRows];
  int rows = 0;
  bool past = false;  // codes are whole lines and go past the cache

  // Measured: more at a time are slower from memory, fewer from cache.
  static int rows_of(int dim) { return dim <= 64 ? 16 : dim <= 256 ? 8 : 4; }

  void add(const uint16_t* row, const Place& place) {
    x[rows] = row;
    at[rows++] = place;
  }

  // Makes all rows up to a multiple of four the first: they may be encoded, and stored, again.
  void pad() {
    for (int r = rows; r % 4 != 0; ++r) {
      x[r] = x[0];
      at[r] = at[0];
    }
  }
};

inline void store_line(uint8_t* out, __m512i v, bool past) {
  if (past) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(out), v);
  } else {
    _mm512_storeu_si512(out, v);
  }
}

inline __m512i magnitudes_bf16(const uint16_t* x) {
  return _mm512_and_si512(_mm512_loadu_si512(x), _mm512_set1_epi16(0x7fff));
}

// Maxima of the halves of a beside those of b.
inline __m512i max_of_halves(__m512i a, __m512i b) {
  return _mm512_max_epu16(_mm512_shuffle_i64x2(a, b, 0x44), _mm512_shuffle_i64x2(a, b, 0xee));
}

// Largest magnitudes of four rows of `n` bf16 elements (a multiple of 64), as the bits of fp32.
KVPOOL_INLINE __m128i amax_of_rows(const uint16_t* const* x, int n) {
  __m512i top[4];
  for (int r = 0; r < 4; ++r) {
    top[r] = _mm512_max_epu16(magnitudes_bf16(x[r]), magnitudes_bf16(x[r] + 32));
    for (int i = 64; i < n; i += 64)
      top[r] = _mm512_max_epu16(top[r], _mm512_max_epu16(magnitudes_bf16(x[r] + i), magnitudes_bf16(x[r] + i + 32)));
  }
  const __m512i a = max_of_halves(top[0], top[1]), b = max_of_halves(top[2], top[3]);
  __m512i m = _mm512_max_epu16(_mm512_shuffle_i64x2(a, b, 0x88), _mm512_shuffle_i64x2(a, b, 0xdd));  // a row a lane
  m = _mm512_max_epu16(m, _mm512_shuffle_epi32(m, static_cast<_MM_PERM_ENUM>(0x4e)));
  m = _mm512_max_epu16(m, _mm512_shuffle_epi32(m, static_cast<_MM_PERM_ENUM>(0xb1)));
  m = _mm512_slli_epi32(_mm512_max_epu16(m, _mm512_srli_epi32(m, 16)), 16);
  const __m512i first = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0);
  return _mm512_castsi512_si128(_mm512_permutexvar_epi32(first, m));
}

// scale_of, for bf16 magnitudes.
inline __m128 scales_of(__m128i amax, float largest) {
  const __m128 s = _mm_max_ps(_mm_div_ps(_mm_castsi128_ps(amax), _mm_set1_ps(largest)), _mm_set1_ps(kSmallestScale));
  const __mmask8 finite = _mm_cmplt_epu32_mask(amax, _mm_set1_epi32(kInfBits));
  return _mm_maskz_mov_ps(_mm_test_epi32_mask(amax, amax),
                          _mm_mask_mov_ps(_mm_set1_ps(from_bits(0x7fc00000)), finite, s));
}

// The least bf16 magnitude, as fp32 bits, that times `inverse` is at least t, or beyond it.
constexpr uint32_t least_bf16(float t, bool beyond, float scale, float inverse) {
  const uint32_t near = (bits(t * scale) + 0x8000) & 0xffff0000;
  const float y = from_bits(near) * inverse;
  return (beyond ? y > t : y >= t) ? near : near + 0x10000;
}

// Elements of even and odd places as fp32, times a factor.
struct EvenOdd {
  __m512 even, odd;

  EvenOdd(__m512i v, __m512 factor)
      : even(_mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(v, 16)), factor)),
        odd(_mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(static_cast<int>(0xffff0000)))),
                          factor)) {}
};

// Codes of 16 elements in units of their scale, at most the largest, in the low byte of each dword.
template <class Element>
inline __m512i encode16(__m512 y) {
  const __m512i u = _mm512_castps_si512(y);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, Element::kShift), _mm512_set1_epi32(1));
  // The sign stays above the code: the exponent of a normal number does not borrow from it.
  const __m512i half = _mm512_set1_epi32(static_cast<int>((1u << (Element::kShift - 1)) - 1 - Element::kExponent));
  __m512i n = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, odd), half), Element::kShift);
  const __m512 a = _mm512_abs_ps(y), magic = _mm512_set1_ps(Element::kMagic);
  const __mmask16 small = _mm512_cmp_ps_mask(a, _mm512_set1_ps(Element::kNormal), _CMP_LT_OQ);
  n = _mm512_mask_sub_epi32(n, small, _mm512_castps_si512(_mm512_add_ps(a, magic)), _mm512_castps_si512(magic));
  return _mm512_ternarylogic_epi32(n, _mm512_srli_epi32(u, 24), _mm512_set1_epi32(0x7f), 0xe4);  // 7 bits and the sign
}

template <>
inline __m512i encode16<Int8>(__m512 y) {
  return _mm512_cvtps_epi32(y);
}

// Places for vpermi2b: bytes of two vectors, `of(i)` the one that becomes byte i.
template <class Of>
constexpr std::array<uint8_t, 64> byte_places(Of of) {
  std::array<uint8_t, 64> place{};
  for (size_t i = 0; i < 64; ++i) place[i] = static_cast<uint8_t>(of(i));
  return place;
}

alignas(64) constexpr auto kLowBytes = byte_places([](size_t i) { return 2 * i; });  // of words
alignas(64) constexpr auto kJoined = byte_places([](size_t i) {
  return i % 32 / 2 * 4 + i % 2 * 64;
});  // low, of dwords

// 64 codes in order, from those of even and odd places in dwords.
inline __m512i joined(const __m512i (&even)[2], const __m512i (&odd)[2]) {
  const __m512i order = _mm512_load_si512(kJoined.data());  // both halves alike
  return _mm512_mask_mov_epi64(_mm512_permutex2var_epi8(even[0], order, odd[0]), 0xf0,
                               _mm512_permutex2var_epi8(even[1], order, odd[1]));
}

template <class Element>
inline __m512i encode64(const uint16_t* x, __m512 factor) {
  __m512i even[2], odd[2];
  for (int j = 0; j < 2; ++j) {
    const EvenOdd y(_mm512_loadu_si512(x + 32 * j), factor);
    even[j] = encode16<Element>(y.even);
    odd[j] = encode16<Element>(y.odd);
  }
  return joined(even, odd);
}

// E4M3 codes of a row by the mantissa of its largest magnitude, which alone decides how a mantissa is rounded: scales
// and codes of normal numbers are the same in every octave. With the largest's exponent, and less the upper three
// bits of the mantissa m, a code is least + one[m] + 2 two[m]; the bits keep the table in the first-level cache.
struct E4m3Rows {
  struct alignas(32) Masks {
    uint64_t one[2], two[2];
  };
  Masks masks[128];
  uint8_t least[128];
};

constexpr E4m3Rows make_e4m3_rows() {
  E4m3Rows rows{};
  for (uint32_t top = 0; top < 128; ++top) {
    const float inverse = 1.0f / scale_of(0x3f800000 | top << 16, E4m3::largest);
    uint8_t codes[128] = {}, least = 255;
    for (uint32_t m = 0; m < 128; ++m) {
      const float x = from_bits(0x3f000000 | m << 16);  // an octave lower, where it cannot pass the largest
      codes[m] = static_cast<uint8_t>(E4m3::encode(x * inverse) + 8 - (m >> 4));
      least = codes[m] < least ? codes[m] : least;
    }
    rows.least[top] = least;
    for (uint32_t m = 0; m < 128; ++m) {
      const uint64_t above = codes[m] - least;
      rows.masks[top].one[m / 64] |= (above & 1) << m % 64;
      rows.masks[top].two[m / 64] |= (above >> 1) << m % 64;
    }
  }
  return rows;
}

constexpr E4m3Rows kE4m3Rows = make_e4m3_rows();

// One row of `n` elements (a multiple of 64) by its largest magnitude and the inverse of its scale. Where these are 0
// or not finite, what is stored means nothing.
template <class Element>
KVPOOL_INLINE void encode_row(const uint16_t* x, int n, uint32_t, float inverse, uint8_t* out, bool past) {
  for (int i = 0; i < n; i += 64) store_line(out + i, encode64<Element>(x + i, _mm512_set1_ps(inverse)), past);
}

template <>
KVPOOL_INLINE void encode_row<E4m3>(const uint16_t* x, int n, uint32_t amax, float inverse, uint8_t* out, bool past) {
  const uint32_t top = amax >> 16, exponent = top >> 7;
  __m512i smallest = magnitudes_bf16(x);
  for (int i = 32; i < n; i += 32) smallest = _mm512_min_epu16(smallest, magnitudes_bf16(x + i));
  // Codes of elements below the largest / 28672 may be subnormal, and scales of rows below 2^-95. In bf16, 32 steps
  // are a factor of at least 8 / 7.
  const __m512i normal = _mm512_set1_epi16(static_cast<int16_t>(exponent < 32 ? 0x7fff : top - (15 << 7) + 32));
  if (__builtin_expect(_mm512_cmplt_epu16_mask(smallest, normal) != 0, 0)) {
    for (int i = 0; i < n; i += 64) store_line(out + i, encode64<E4m3>(x + i, _mm512_set1_ps(inverse)), past);
    return;
  }
  const E4m3Rows::Masks& masks = kE4m3Rows.masks[top & 127];
  const __m512i least = _mm512_set1_epi8(static_cast<char>(kE4m3Rows.least[top & 127] - exponent * 8));
  const auto codes = [&](int i) {
    const __m512i c = _mm512_mask_add_epi8(least, masks.one[i], least, _mm512_set1_epi8(1));
    return _mm512_mask_add_epi8(c, masks.two[i], c, _mm512_set1_epi8(2));
  };
  const __m512i first = codes(0), second = codes(1);
  const __m512i low = _mm512_load_si512(kLowBytes.data()), high = _mm512_add_epi8(low, _mm512_set1_epi8(1));
  for (int i = 0; i < n; i += 64) {
    const __m512i a = _mm512_loadu_si512(x + i), b = _mm512_loadu_si512(x + i + 32);
    const __m512i l = _mm512_permutex2var_epi8(a, low, b), h = _mm512_permutex2var_epi8(a, high, b);
    // Bits 4 to 11 of an element: five of the exponent, three of the mantissa.
    const __m512i middle = _mm512_ternarylogic_epi32(_mm512_slli_epi16(h, 4), _mm512_srli_epi16(l, 4),
                                                     _mm512_set1_epi8(static_cast<char>(0xf0)), 0xe4);
    const __m512i code = _mm512_add_epi8(middle, _mm512_permutex2var_epi8(first, l, second));
    store_line(out + i, _mm512_ternarylogic_epi32(code, h, _mm512_set1_epi8(0x7f), 0xe4), past);
  }
}

}  // namespace
}  // namespace kvpool
