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

// 16 E2M1 codes of a block of bf16 elements times `inverse`, as 8 bytes.
inline void encode_block_bf16(const uint16_t* x, float inverse, uint8_t* out) {
  const __m512i v =
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))), 16);
  const __m512i u = _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(v), _mm512_set1_ps(inverse)));
  const __m512i a = _mm512_min_epu32(_mm512_and_si512(u, _mm512_set1_epi32(0x7fffffff)), _mm512_set1_epi32(0x40c00000));
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(a, 22), _mm512_set1_epi32(1));
  const __m512i normal =
      _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(a, odd), _mm512_set1_epi32(0x1fffff - (126 << 23))), 22);
  const __m512 magic = _mm512_set1_ps(4194304.0f);
  const __m512i subnormal =
      _mm512_sub_epi32(_mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(a), magic)), _mm512_castps_si512(magic));
  const __m512i code =
      _mm512_mask_mov_epi32(normal, _mm512_cmplt_epu32_mask(a, _mm512_set1_epi32(0x3f800000)), subnormal);
  const __m512i c = _mm512_ternarylogic_epi32(code, _mm512_srli_epi32(u, 28), _mm512_set1_epi32(8), 0xf8);
  const __m512i pairs = _mm512_or_si512(c, _mm512_srli_epi64(c, 28));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm512_cvtepi64_epi8(pairs));
}

// Largest magnitudes of four blocks of 16 bf16 elements, as bits of fp32.
inline __m128i amax_of_blocks(const uint16_t* x) {
  const __m512i mask = _mm512_set1_epi16(0x7fff);
  const __m512i a = _mm512_and_si512(_mm512_loadu_si512(x), mask);       // blocks 0, 1
  const __m512i b = _mm512_and_si512(_mm512_loadu_si512(x + 32), mask);  // blocks 2, 3
  // Lanes: a0 a0' a1 a1' and b0 b0' b1 b1'.
  const __m512i m = _mm512_max_epu16(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
  __m512i r = _mm512_max_epu16(m, _mm512_shuffle_epi32(m, static_cast<_MM_PERM_ENUM>(0x4e)));
  r = _mm512_max_epu16(r, _mm512_shuffle_epi32(r, static_cast<_MM_PERM_ENUM>(0xb1)));
  r = _mm512_max_epu16(r, _mm512_srli_epi32(r, 16));
  const __m512i first = _mm512_slli_epi32(r, 16);  // of each lane's dword 0
  return _mm512_castsi512_si128(
      _mm512_permutexvar_epi32(_mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0), first));
}

}  // namespace
}  // namespace kvpool
