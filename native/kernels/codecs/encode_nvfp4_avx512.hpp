// Vector version of the nvfp4 writes from bf16 rows, with the bits of the scalar one: chunks of 64 elements, whose
// block scales are made for four chunks at a time.
//
// Included only where AVX-512 is compiled.
#pragma once

#include "kernels/codecs/encode_avx512.hpp"

namespace kvpool {
namespace {

// Of four chunks: lane 4 b + c is the largest magnitude of block b of chunk c, as the bits of an fp32.
inline __m512i amax_of_blocks(const uint16_t* const* x) {
  __m512i half[4];  // lane b: eight words of block b
  for (int c = 0; c < 4; ++c) {
    const __m512i a = magnitudes_bf16(x[c]), b = magnitudes_bf16(x[c] + 32);
    half[c] = _mm512_max_epu16(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
  }
  const auto joined = [](__m512i a, __m512i b) {
    return _mm512_castsi512_ps(_mm512_max_epu16(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b)));
  };
  const __m512 a = joined(half[0], half[1]), b = joined(half[2], half[3]);
  const __m512i m = _mm512_max_epu16(_mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88)),
                                     _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xdd)));
  return _mm512_slli_epi32(_mm512_max_epu16(m, _mm512_srli_epi32(m, 16)), 16);
}

// The block scales of four chunks with the scales of their vectors `g`, and what elements are multiplied by. False
// when a block needs the scalar code: its scale is beyond `limit`, is flushed or is not finite, all of which are rare.
inline bool encode_block_scales(const uint16_t* const* x, __m512 g, float limit, uint8_t* const* out, float* inverse) {
  const __m512i amax = amax_of_blocks(x);
  const __m512 finite = _mm512_castsi512_ps(_mm512_min_epu32(amax, _mm512_set1_epi32(kLargestAmax)));
  const __m512 wanted = _mm512_div_ps(finite, _mm512_mul_ps(_mm512_set1_ps(6.0f), g));
  const __m512i code = encode16<E4m3>(wanted);
  const __m512 normal =
      _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(code, 20), _mm512_set1_epi32(E4m3::kExponent)));
  const __m512 small = _mm512_mul_ps(_mm512_cvtepi32_ps(code), _mm512_set1_ps(0x1p-9f));
  const __mmask16 is_small = _mm512_cmplt_epu32_mask(code, _mm512_set1_epi32(8));
  const __m512 scale = _mm512_mul_ps(_mm512_mask_mov_ps(normal, is_small, small), g);
  const __mmask16 plain = _mm512_cmp_ps_mask(scale, _mm512_set1_ps(kSmallestScale), _CMP_GE_OQ) &
                          _mm512_cmp_ps_mask(wanted, _mm512_set1_ps(limit), _CMP_LE_OQ) &
                          _mm512_cmplt_epu32_mask(amax, _mm512_set1_epi32(kInfBits));
  const __m128i bytes =
      _mm_shuffle_epi8(_mm512_cvtepi32_epi8(code), _mm_set_epi8(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0));
  _mm_storeu_si32(out[0], bytes);
  _mm_storeu_si32(out[1], _mm_shuffle_epi32(bytes, 1));
  _mm_storeu_si32(out[2], _mm_shuffle_epi32(bytes, 2));
  _mm_storeu_si32(out[3], _mm_shuffle_epi32(bytes, 3));
  const __m512i chunks = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
  _mm512_store_ps(inverse, _mm512_permutexvar_ps(chunks, _mm512_div_ps(_mm512_set1_ps(1.0f), scale)));
  return plain == 0xffff;
}

// (a + half + the last kept bit + offset) >> bits: to nearest even, the exponent moved.
template <int bits>
inline __m512i rounded_words(__m512i a, int offset) {
  const __m512i last = _mm512_and_si512(_mm512_srli_epi16(a, bits), _mm512_set1_epi16(1));
  const auto add = static_cast<int16_t>((1 << (bits - 1)) - 1 + offset);
  return _mm512_srai_epi16(_mm512_add_epi16(_mm512_add_epi16(a, last), _mm512_set1_epi16(add)), bits);
}

// E2M1 codes of two blocks of 16 elements, joined in the low byte of each dword; `inverse` has those of the first
// block in its lower half.
inline __m512i encode_blocks(const uint16_t* x, __m512 inverse) {
  const __m512i v = _mm512_loadu_si512(x), one = _mm512_set1_epi16(1);
  const EvenOdd y(v, inverse);
  const __m512i e = _mm512_castps_si512(y.even), o = _mm512_castps_si512(y.odd);
  // Magnitudes rounded to odd: the upper half of an fp32 whose last bit also tells that something was cut off. Rounded
  // to nearest even with at least two bits less they give what the fp32 gives.
  const __m512i low = _mm512_mask_mov_epi16(_mm512_slli_epi32(o, 16), 0x55555555, e);
  const __m512i high = _mm512_mask_mov_epi16(_mm512_srli_epi32(e, 16), 0xaaaaaaaa, o);
  const __m512i cut = _mm512_min_epu16(low, one);
  const __m512i odd = _mm512_ternarylogic_epi32(high, cut, _mm512_set1_epi16(0x7fff), 0xec);  // high & 0x7fff | cut
  const __m512i a = _mm512_min_epu16(odd, _mm512_set1_epi16(0x40c0));                         // 6
  const __m512i normal = rounded_words<6>(a, -(126 << 7));
  // Below 1: 0.5 from above 0.25 on, 1 from 0.75 on; never less than what `normal` has there.
  const __m512i half = _mm512_min_epu16(_mm512_subs_epu16(a, _mm512_set1_epi16(0x3e80)), one);
  const __m512i whole = _mm512_min_epu16(_mm512_subs_epu16(a, _mm512_set1_epi16(0x3f3f)), one);
  const __m512i code = _mm512_max_epi16(normal, _mm512_add_epi16(half, whole));
  const __m512i c = _mm512_ternarylogic_epi32(code, _mm512_srli_epi16(v, 12), _mm512_set1_epi16(8), 0xf8);
  return _mm512_madd_epi16(c, _mm512_set1_epi32(0x100001));  // element 2i in the low nibble
}

alignas(64) constexpr auto kPacked = byte_places([](size_t i) { return i % 16 * 4 + i % 32 / 16 * 64; });

// The packed codes of a row of `chunks` chunks.
inline void encode_chunks(const uint16_t* x, int chunks, const float* inverse, uint8_t* out, bool past) {
  const auto chunk = [&](int i) {  // 32 bytes, twice
    const auto blocks = [&](int b) {
      const float* two = inverse + 4 * i + b;
      return encode_blocks(x + 64 * i + 16 * b,
                           _mm512_mask_mov_ps(_mm512_set1_ps(two[0]), 0xff00, _mm512_set1_ps(two[1])));
    };
    return _mm512_permutex2var_epi8(blocks(0), _mm512_load_si512(kPacked.data()), blocks(2));
  };
  int i = 0;
  for (; i + 2 <= chunks; i += 2) store_line(out + 32 * i, _mm512_mask_mov_epi64(chunk(i), 0xf0, chunk(i + 1)), past);
  if (i < chunks) _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 32 * i), _mm512_castsi512_si256(chunk(i)));
}

// Encodes rows of `dim` elements (a multiple of 64) with the scales `g` of the vectors; returns a bit for each row that
// needs the scalar code.
inline uint32_t encode_nvfp4_batch(const Bf16Batch& batch, int dim, const float* g, float limit) {
  alignas(64) float inverse[Bf16Batch::kRows * kMaxDim / 16];
  const int each = dim / 64;
  uint32_t refused = 0;
  int row = 0, piece = 0;
  for (int chunk = 0; chunk < batch.rows * each; chunk += 4) {
    const uint16_t* x[4];
    uint8_t* scales[4];
    alignas(16) float of_vector[4];
    uint32_t rows = 0;
    for (int c = 0; c < 4; ++c) {
      x[c] = batch.x[row] + 64 * piece;
      scales[c] = batch.at[row].block_scale + 4 * piece;
      of_vector[c] = g[row];
      rows |= 1u << row;
      if (++piece == each) {
        piece = 0;
        row += row + 1 < batch.rows;  // behind the last chunk some are made twice
      }
    }
    const __m512 vectors = _mm512_broadcast_f32x4(_mm_load_ps(of_vector));
    if (!encode_block_scales(x, vectors, limit, scales, inverse + 4 * chunk)) refused |= rows;
  }
  for (int r = 0; r < batch.rows; ++r)
    if (!(refused >> r & 1)) encode_chunks(batch.x[r], each, inverse + 4 * r * each, batch.at[r].data, batch.past);
  return refused;
}

}  // namespace
}  // namespace kvpool
