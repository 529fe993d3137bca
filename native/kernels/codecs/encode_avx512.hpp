// Vector versions of the quantising writes, from bf16 rows, with the bits of the scalar ones beside them: even and
// odd elements are widened by a shift or a mask, and joined again as low and high bytes of a word.
//
// Included only where AVX-512 is compiled.
#pragma once

#include "kernels/codecs/elements.hpp"

namespace kvpool {
namespace {

// Largest magnitude of `n` bf16 elements (a multiple of 32), as the bits of an fp32.
inline uint32_t amax_bits_bf16(const uint16_t* x, int n) {
  __m512i top = _mm512_setzero_si512();
  for (int i = 0; i < n; i += 32)
    top = _mm512_max_epu16(top, _mm512_and_si512(_mm512_loadu_si512(x + i), _mm512_set1_epi16(0x7fff)));
  const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(top), _mm512_extracti64x4_epi64(top, 1));
  const __m128i quarter = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  // The largest is the complement of the smallest complement.
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(quarter, _mm_set1_epi16(-1)));
  return static_cast<uint32_t>(static_cast<uint16_t>(~_mm_extract_epi16(least, 0))) << 16;
}

// Codes of 16 elements in units of their scale, one in each dword.
template <class Element>
inline __m512i encode16(__m512 y);

template <>
inline __m512i encode16<Int8>(__m512 y) {
  return _mm512_and_si512(_mm512_cvtps_epi32(y), _mm512_set1_epi32(0xff));
}

template <>
inline __m512i encode16<E4m3>(__m512 y) {
  const __m512i u = _mm512_castps_si512(y), one = _mm512_set1_epi32(1);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 20), one);
  // The sign only reaches bit 11, since the exponent of a normal code does not borrow from it.
  __m512i n = _mm512_add_epi32(_mm512_add_epi32(u, odd), _mm512_set1_epi32(0x7ffff - (120 << 23)));
  n = _mm512_srli_epi32(n, 20);
  const __mmask16 small = _mm512_cmplt_epu32_mask(_mm512_slli_epi32(u, 1), _mm512_set1_epi32(0x79000000));  // 2^-6
  if (__builtin_expect(small != 0, 0)) {
    const __m512 magic = _mm512_set1_ps(16384.0f);
    const __m512 shifted = _mm512_add_ps(_mm512_abs_ps(y), magic);
    n = _mm512_mask_sub_epi32(n, small, _mm512_castps_si512(shifted), _mm512_castps_si512(magic));
  }
  return _mm512_ternarylogic_epi32(n, _mm512_srli_epi32(u, 24), _mm512_set1_epi32(0x7f), 0xe4);  // 7 bits and the sign
}

// One row of `n` elements (a multiple of 64) whose scale is known; |x * inverse| is at most the largest code, but for
// rounding, which never reaches the next one.
template <class Element>
inline void encode_row_bf16(const uint16_t* x, int n, float inverse, uint8_t* out) {
  const __m512 factor = _mm512_set1_ps(inverse);
  const __m512i order = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0), high = _mm512_set1_epi32(0xffff0000);
  for (int i = 0; i < n; i += 64) {
    __m512i words[2];
    for (int j = 0; j < 2; ++j) {
      const __m512i v = _mm512_loadu_si512(x + i + 32 * j);
      const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
      const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(v, high));
      words[j] = _mm512_or_si512(encode16<Element>(_mm512_mul_ps(even, factor)),
                                 _mm512_slli_epi32(encode16<Element>(_mm512_mul_ps(odd, factor)), 8));
    }
    const __m512i packed = _mm512_packus_epi32(words[0], words[1]);
    _mm512_storeu_si512(out + i, _mm512_permutexvar_epi64(order, packed));
  }
}

inline __m512i magnitudes_bf16(const uint16_t* x) {
  return _mm512_and_si512(_mm512_loadu_si512(x), _mm512_set1_epi16(0x7fff));
}

// Elements of even and odd places as fp32, times a factor.
struct EvenOdd {
  __m512 even, odd;

  EvenOdd(const uint16_t* x, __m512 factor) {
    const __m512i v = _mm512_loadu_si512(x);
    even = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(v, 16)), factor);
    odd = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(0xffff0000))), factor);
  }

  // The upper halves in order, and where the lower half was not zero.
  void halves(__m512i& high, __m512i& sticky) const {
    const __m512i e = _mm512_castps_si512(even), o = _mm512_castps_si512(odd);
    const __m512i low = _mm512_mask_mov_epi16(_mm512_slli_epi32(o, 16), 0x55555555, e);
    high = _mm512_mask_mov_epi16(_mm512_srli_epi32(e, 16), 0xaaaaaaaa, o);
    sticky = _mm512_min_epu16(low, _mm512_set1_epi16(1));
  }
};

// A magnitude rounded to odd: the upper half of an fp32 whose last bit also tells that something was cut off. Rounding
// it to nearest even with at least two bits less gives what rounding the fp32 gives.
inline __m512i rounded_to_odd(__m512i high, __m512i sticky) {
  return _mm512_ternarylogic_epi32(high, sticky, _mm512_set1_epi16(0x7fff), 0xec);  // high & 0x7fff | sticky
}

// (a + half + the last kept bit + offset) >> bits: to nearest even, the exponent moved.
template <int bits>
inline __m512i rounded_words(__m512i a, int offset) {
  const __m512i last = _mm512_and_si512(_mm512_srli_epi16(a, bits), _mm512_set1_epi16(1));
  const auto add = static_cast<int16_t>((1 << (bits - 1)) - 1 + offset);
  return _mm512_srli_epi16(_mm512_add_epi16(_mm512_add_epi16(a, last), _mm512_set1_epi16(add)), bits);
}

// Largest magnitudes of four blocks of 16 bf16 elements, as bits of fp32.
inline __m128i amax_of_blocks(const uint16_t* x) {
  const __m512i a = magnitudes_bf16(x), b = magnitudes_bf16(x + 32);  // blocks 0, 1 and 2, 3
  // Lanes: a0 a0' a1 a1' and b0 b0' b1 b1'.
  const __m512i m = _mm512_max_epu16(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
  __m512i r = _mm512_max_epu16(m, _mm512_shuffle_epi32(m, static_cast<_MM_PERM_ENUM>(0x4e)));
  r = _mm512_max_epu16(r, _mm512_shuffle_epi32(r, static_cast<_MM_PERM_ENUM>(0xb1)));
  r = _mm512_slli_epi32(_mm512_max_epu16(r, _mm512_srli_epi32(r, 16)), 16);  // in each dword of a lane
  return _mm512_castsi512_si128(
      _mm512_permutexvar_epi32(_mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0), r));
}

// E2M1 codes of two blocks of 16 elements, packed; `inverse` has those of the first block in its lower half.
inline __m128i encode_blocks_bf16(const uint16_t* x, __m512 inverse) {
  const EvenOdd y(x, inverse);
  __m512i high, sticky;
  y.halves(high, sticky);
  const __m512i one = _mm512_set1_epi16(1);
  const __m512i a = _mm512_min_epu16(rounded_to_odd(high, sticky), _mm512_set1_epi16(0x40c0));  // 6
  const __m512i normal = rounded_words<6>(a, -(126 << 7));
  // Below 1: 0.5 from above 0.25 on, 1 from 0.75 on.
  const __m512i half = _mm512_min_epu16(_mm512_subs_epu16(a, _mm512_set1_epi16(0x3e80)), one);
  const __m512i whole = _mm512_min_epu16(_mm512_subs_epu16(a, _mm512_set1_epi16(0x3f3f)), one);
  const __m512i code =
      _mm512_mask_add_epi16(normal, _mm512_cmplt_epu16_mask(a, _mm512_set1_epi16(0x3f80)), half, whole);
  const __m512i c = _mm512_ternarylogic_epi32(code, _mm512_srli_epi16(high, 12), _mm512_set1_epi16(8), 0xf8);
  return _mm512_cvtepi32_epi8(_mm512_madd_epi16(c, _mm512_set1_epi32(0x100001)));  // element 2i in the low nibble
}

// Block scales of a row, `s.dim` a multiple of 64, with the scale of a vector `g`. False when a block needs the scalar
// code: its scale is beyond `limit`, is flushed or is not finite, all of which are rare.
inline bool begin_nvfp4_row_bf16(const Store& s, const uint16_t* x, float g, float limit, uint8_t* block_scale,
                                 float* inverses) {
  const int blocks = s.dim / 16;
  for (int i = 0; i < blocks; i += 8) {
    const int left = blocks - i;
    const __m128i first = amax_of_blocks(x + i * 16);
    const __m256i amax =
        _mm256_inserti128_si256(_mm256_castsi128_si256(first), left > 4 ? amax_of_blocks(x + i * 16 + 64) : first, 1);
    const __m256 finite =
        _mm256_castsi256_ps(_mm256_min_epu32(amax, _mm256_set1_epi32(static_cast<int>(kLargestAmax))));
    const __m256 wanted = _mm256_div_ps(finite, _mm256_set1_ps(6.0f * g));
    // E4M3, from 2^-6 on and below it.
    const __m256i u = _mm256_castps_si256(wanted);
    const __m256i last = _mm256_and_si256(_mm256_srli_epi32(u, 20), _mm256_set1_epi32(1));
    const __m256i normal =
        _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, last), _mm256_set1_epi32(0x7ffff - (120 << 23))), 20);
    const __m256 magic = _mm256_set1_ps(16384.0f);
    const __m256i subnormal =
        _mm256_sub_epi32(_mm256_castps_si256(_mm256_add_ps(wanted, magic)), _mm256_castps_si256(magic));
    const __mmask8 small = _mm256_cmp_ps_mask(wanted, _mm256_set1_ps(0x1p-6f), _CMP_LT_OQ);
    const __m256i code = _mm256_mask_mov_epi32(normal, small, subnormal);
    const __m256 decoded = _mm256_mask_mov_ps(
        _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(code, 20), _mm256_set1_epi32(120 << 23))),
        _mm256_cmplt_epu32_mask(code, _mm256_set1_epi32(8)),
        _mm256_mul_ps(_mm256_cvtepi32_ps(code), _mm256_set1_ps(0x1p-9f)));
    const __m256 scale = _mm256_mul_ps(decoded, _mm256_set1_ps(g));
    const __mmask8 plain = _mm256_cmp_ps_mask(scale, _mm256_set1_ps(kSmallestScale), _CMP_GE_OQ) &
                           _mm256_cmp_ps_mask(wanted, _mm256_set1_ps(limit), _CMP_LE_OQ) &
                           _mm256_cmplt_epu32_mask(amax, _mm256_set1_epi32(static_cast<int>(kInfBits)));
    if (plain != 0xff) return false;
    const __m128i bytes = _mm256_cvtepi32_epi8(code);
    if (left >= 8) {
      _mm_storel_epi64(reinterpret_cast<__m128i*>(block_scale + i), bytes);
    } else {
      _mm_storeu_si32(block_scale + i, bytes);
    }
    _mm256_store_ps(inverses + i, _mm256_div_ps(_mm256_set1_ps(1.0f), scale));
  }
  return true;
}

inline void end_nvfp4_row_bf16(int blocks, const uint16_t* x, const float* inverses, uint8_t* data) {
  const __m512i second = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
  const auto codes = [&](int i) {
    const __m512 two = _mm512_castps128_ps512(_mm_castsi128_ps(_mm_loadu_si64(inverses + i)));
    return encode_blocks_bf16(x + i * 16, _mm512_permutexvar_ps(second, two));
  };
  int i = 0;
  for (; i + 8 <= blocks; i += 8) {
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(codes(i)), codes(i + 2), 1);
    const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(codes(i + 4)), codes(i + 6), 1);
    _mm512_storeu_si512(data + i * 8, _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
  }
  for (; i < blocks; i += 2) _mm_storeu_si128(reinterpret_cast<__m128i*>(data + i * 8), codes(i));
}

}  // namespace
}  // namespace kvpool
