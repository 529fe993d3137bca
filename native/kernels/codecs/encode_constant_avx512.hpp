// Vector versions of the writes from bf16 rows in units of a constant scale, with the bits of the scalar ones.
//
// Included only where AVX-512 is compiled.
#pragma once

#include "kernels/codecs/encode_avx512.hpp"

namespace kvpool {
namespace {

// Elements that rows with a constant scale lost.
struct Lost {
  int64_t saturated = 0, flushed = 0;
};

inline __m512i words(uint32_t value) { return _mm512_set1_epi16(static_cast<int16_t>(value)); }

// Largest of how far the magnitudes of a row are above `first`; what is below it is the farthest.
KVPOOL_INLINE __m512i farthest_above(const uint16_t* x, int n, uint32_t first) {
  const __m512i from = words(first);
  __m512i top = _mm512_sub_epi16(magnitudes_bf16(x), from);
  for (int i = 32; i < n; i += 32) top = _mm512_max_epu16(top, _mm512_sub_epi16(magnitudes_bf16(x + i), from));
  return top;
}

// Scales within which no element that is neither flushed nor saturated comes near the ends of fp32.
constexpr bool is_usual_scale(float scale) { return scale >= 0x1p-60f && scale <= 0x1p60f; }

// Codes of a format's subnormals by, from the left, the low bits of the fp32 exponent of an element in units of the
// scale, its leading bits of mantissa, and whether a bit behind these is set. 0 in octaves of other numbers.
template <class Element>
constexpr std::array<uint8_t, 128> make_subnormal_codes() {
  constexpr int kMantissa = 23 - Element::kShift;
  std::array<uint8_t, 128> codes{};
  uint32_t u = bits(Element::kNormal);
  for (int octave = 0; octave <= kMantissa; ++octave) {
    u -= 1u << 23;
    for (uint32_t f = 0; f < 2u << kMantissa; ++f) {
      const uint32_t y = u | f >> 1 << Element::kShift | (f & 1);
      codes[(y >> Element::kShift << 1 | (f & 1)) % 128] = Element::encode(from_bits(y));
    }
  }
  return codes;
}

template <class Element>
alignas(64) constexpr std::array<uint8_t, 128> kSubnormalCodes = make_subnormal_codes<Element>();

// Floats. How an element is rounded, in units of the scale, depends on its mantissa alone: codes of normal numbers are
// the same in every octave, and subnormals follow from the octave and the leading bits of mantissa. A row that loses
// nothing takes lookups; no element is multiplied.
template <class Element>
class ConstantRows {
 public:
  explicit ConstantRows(float scale) {
    const float inverse = 1.0f / scale;
    const float least = from_bits(bits(Element::kNormal) - ((23u - Element::kShift) << 23));
    first_ = least_bf16(least / 2, true, scale, inverse) >> 16;  // half of the least rounds to 0
    span_ = (least_bf16(Element::largest, true, scale, inverse) >> 16) - first_;
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (int m = 0; m < 128; m += 16) {
      const __m512i x = _mm512_add_epi32(lane, _mm512_set1_epi32(0x3f80 + m));
      const __m512i u =
          _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), _mm512_set1_ps(inverse)));
      const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, Element::kShift), _mm512_set1_epi32(1));
      const __m512i half = _mm512_set1_epi32(static_cast<int>((1u << (Element::kShift - 1)) - 1 - Element::kExponent));
      const __m512i code = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, odd), half), Element::kShift);
      const __mmask16 behind = _mm512_test_epi32_mask(u, _mm512_set1_epi32((1 << Element::kShift) - 1));
      __m512i octave = _mm512_slli_epi32(_mm512_srli_epi32(u, Element::kShift), 1);
      octave = _mm512_mask_add_epi32(octave, behind, octave, _mm512_set1_epi32(1));
      const __m512i middle = _mm512_srli_epi32(x, kBelow);
      store(normal_ + m, _mm512_sub_epi32(code, middle));
      store(subnormal_ + m, _mm512_sub_epi32(octave, _mm512_add_epi32(middle, middle)));
    }
  }

  KVPOOL_INLINE bool loses_nothing(const uint16_t* x, int n) const {
    return _mm512_cmpge_epu16_mask(farthest_above(x, n, first_), words(span_)) == 0;
  }

  // One row of finite elements.
  template <bool loses>
  KVPOOL_INLINE void encode(const uint16_t* x, int n, uint8_t* out, bool past, Lost& lost) const {
    const __m512i low = _mm512_load_si512(kLowBytes.data()), high = _mm512_add_epi8(low, _mm512_set1_epi8(1));
    for (int i = 0; i < n; i += 64) {
      const __m512i a = within<loses>(x + i, lost), b = within<loses>(x + i + 32, lost);
      const __m512i l = _mm512_permutex2var_epi8(a, low, b), h = _mm512_permutex2var_epi8(a, high, b);
      // Eight bits of an element: those of the mantissa that a code has, and the exponent's above.
      const __m512i middle =
          _mm512_ternarylogic_epi32(_mm512_slli_epi16(h, 8 - kBelow), _mm512_srli_epi16(l, kBelow),
                                    _mm512_set1_epi8(static_cast<char>(256 - (256 >> kBelow))), 0xe4);
      const __m512i normal = _mm512_add_epi8(middle, lookup(normal_, l));
      const __m512i octave = _mm512_add_epi8(_mm512_add_epi8(middle, middle), lookup(subnormal_, l));
      // Each is the larger one in its own octaves.
      const __m512i code = _mm512_max_epi8(normal, lookup(kSubnormalCodes<Element>.data(), octave));
      store_line(out + i, _mm512_ternarylogic_epi32(code, h, _mm512_set1_epi8(0x7f), 0xe4), past);
    }
  }

 private:
  static constexpr int kBelow = Element::kShift - 16;  // bits of a bf16 below the code's

  static void store(uint8_t* out, __m512i dwords) {
    _mm_store_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(dwords));
  }
  static __m512i lookup(const uint8_t* table, __m512i at) {  // by seven bits
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), at, _mm512_load_si512(table + 64));
  }

  // 32 elements, those that are lost replaced by the nearest that have the same codes.
  template <bool loses>
  KVPOOL_INLINE __m512i within(const uint16_t* x, Lost& lost) const {
    const __m512i v = _mm512_loadu_si512(x);
    if (!loses) return v;
    const __m512i a = magnitudes_bf16(x), below = words(first_ - 1), end = words(first_ + span_);
    lost.saturated += __builtin_popcount(_mm512_cmpge_epu16_mask(a, end));
    lost.flushed += __builtin_popcount(_mm512_mask_cmple_epu16_mask(_mm512_test_epi16_mask(a, a), a, below));
    const __m512i near = _mm512_max_epu16(_mm512_min_epu16(a, words(first_ + span_ - 1)), below);
    return _mm512_ternarylogic_epi32(near, v, _mm512_set1_epi16(0x7fff), 0xe4);
  }

  // By an element's mantissa, what its middle bits need to become a code, and twice them a place in kSubnormalCodes.
  alignas(64) uint8_t normal_[128], subnormal_[128];
  uint32_t first_, span_;  // the least magnitude that is not flushed, and how many do not saturate from there
};

// Whole numbers. Elements that become 0 are usual, and counted on the way.
template <>
class ConstantRows<Int8> {
 public:
  explicit ConstantRows(float scale)
      : inverse_(1.0f / scale),
        first_(least_bf16(0.5f, true, scale, inverse_) >> 16),
        end_(least_bf16(Int8::largest, true, scale, inverse_) >> 16) {}

  KVPOOL_INLINE bool loses_nothing(const uint16_t* x, int n) const {  // but flushed elements
    return _mm512_cmpge_epu16_mask(farthest_above(x, n, 0), words(end_)) == 0;
  }

  template <bool loses>
  KVPOOL_INLINE void encode(const uint16_t* x, int n, uint8_t* out, bool past, Lost& lost) const {
    const __m512 factor = _mm512_set1_ps(inverse_), largest = _mm512_set1_ps(Int8::largest);
    const auto encode = [&](__m512 y) {  // the lesser magnitude, the sign of y
      return _mm512_cvtps_epi32(loses ? _mm512_range_ps(y, largest, 2) : y);
    };
    for (int i = 0; i < n; i += 64) {
      __m512i even[2], odd[2];
      for (int j = 0; j < 2; ++j) {
        const __m512i a = magnitudes_bf16(x + i + 32 * j);
        if (loses) lost.saturated += __builtin_popcount(_mm512_cmpge_epu16_mask(a, words(end_)));
        lost.flushed += __builtin_popcount(_mm512_cmplt_epu16_mask(_mm512_sub_epi16(a, words(1)), words(first_ - 1)));
        const EvenOdd y(_mm512_loadu_si512(x + i + 32 * j), factor);
        even[j] = encode(y.even);
        odd[j] = encode(y.odd);
      }
      store_line(out + i, joined(even, odd), past);
    }
  }

 private:
  float inverse_;
  uint32_t first_, end_;  // magnitudes that neither become 0 nor saturate
};

}  // namespace
}  // namespace kvpool
