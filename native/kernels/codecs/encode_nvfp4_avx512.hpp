// Vector version of the nvfp4 writes from bf16 rows, with the bits of the scalar one: chunks of 64 elements, four at a
// time. Elements are never divided: an element's code is the number of steps of its block that its magnitude has
// reached, and a step is a bf16 number, the same in every octave of the block's scale.
//
// Included only where AVX-512 is compiled.
#pragma once

#include "kernels/codecs/encode_avx512.hpp"

namespace kvpool {
namespace {

// Where the codes of a block change, by the three bits m of mantissa of its E4M3 scale, for one scale of the vector.
// The octaves of a block begin where 1.25 rounds up; octave 4 holds 1.25 itself. `from[m]` is twice the bf16 bits of
// the begin of octave 0 for a block scale in [1, 2), less twice its exponent's. The others are twice how far from the
// begin of an octave the next code is reached. A line of the cache, so that a lookup in it takes bytes of 64.
struct alignas(64) Nvfp4Steps {
  uint8_t quarter[8], three_quarters[8], other[8];  // in octaves 1, 3, 4 and 5
  uint16_t from[8];
  uint8_t none[24];  // 255: of the other octaves, in which nothing is reached
};

constexpr void make_nvfp4_steps(float g, Nvfp4Steps& steps) {
  for (uint8_t& none : steps.none) none = 255;
  for (uint32_t m = 0; m < 8; ++m) {
    const float scale = (1.0f + static_cast<float>(m) / 8) * g, inverse = 1.0f / scale;
    const uint32_t c = least_bf16(1.25f, true, scale, inverse) >> 16,
                   d = least_bf16(1.75f, false, scale, inverse) >> 16;
    const uint32_t a = least_bf16(0.25f, true, scale, inverse) >> 16,
                   b = least_bf16(0.75f, false, scale, inverse) >> 16;
    steps.from[m] = static_cast<uint16_t>(2 * (c - (4 << 7) - (127 << 7)));
    steps.quarter[m] = static_cast<uint8_t>(2 * (a - c + (3 << 7)));
    steps.three_quarters[m] = static_cast<uint8_t>(2 * (b - c + (1 << 7)));
    steps.other[m] = static_cast<uint8_t>(2 * (d - c));
  }
}

// Of vectors with a scale of their own, by the mantissa of their largest magnitude, which decides the scale's.
struct Nvfp4TokenSteps {
  Nvfp4Steps of[128];
};

constexpr Nvfp4TokenSteps make_nvfp4_token_steps() {
  Nvfp4TokenSteps all{};
  for (uint32_t top = 0; top < 128; ++top) make_nvfp4_steps(from_bits(0x3f800000 | top << 16) / 2688.0f, all.of[top]);
  return all;
}

constexpr Nvfp4TokenSteps kNvfp4TokenSteps = make_nvfp4_token_steps();

// The scales of the rows of a batch. Four rows behind the last are read, not used.
struct Nvfp4BatchScales {
  const Nvfp4Steps* steps[Bf16Batch::kRows + 4];
  float six_g[Bf16Batch::kRows + 4];
  int32_t exponent[Bf16Batch::kRows + 4];  // of g against the one that the steps are of, times 256
};

// Codes in bits 4 to 6 at the begin of an octave, and the bytes of `Nvfp4Steps` where it has its steps.
alignas(64) constexpr auto kOctaveCodes = byte_places([](size_t i) {
  constexpr uint8_t code[16] = {0x00, 0x00, 0x10, 0x10, 0x30, 0x50, 0x70, 0x70};
  return code[i % 16];
});
alignas(64) constexpr auto kOctaveSteps = byte_places([](size_t i) {
  constexpr uint8_t at[16] = {56, 0, 56, 8, 16, 16, 56, 56};
  return at[i % 16];
});

// Quadwords of the two vectors that hold words 0 to 3 and 4 to 7 of eight blocks become eight bytes each: of the high
// or low bytes, those of odd words and then those of even ones.
constexpr uint8_t byte_of_word(size_t i, size_t high) {
  const size_t b = i % 8, word = b < 4 ? 2 * b + 1 : 2 * (b - 4);
  return static_cast<uint8_t>(word / 4 * 64 + i / 8 * 8 + word % 4 * 2 + high);
}
alignas(64) constexpr auto kHighOfBlocks = byte_places([](size_t i) { return byte_of_word(i, 1); });
alignas(64) constexpr auto kLowOfBlocks = byte_places([](size_t i) { return byte_of_word(i, 0); });

// Eight blocks lie in the order 0 2 1 3 4 6 5 7.
constexpr size_t place_of_block(size_t b) { return b % 4 == 1 ? b + 1 : b % 4 == 2 ? b - 1 : b; }

// Codes in order, from the four bytes of elements 0 to 7 of each block and those of the others.
alignas(64) constexpr auto kCodesOfBlocks = byte_places([](size_t i) {
  return 8 * place_of_block(i / 8) + i % 4 + (i % 8 < 4 ? 0 : 64);
});

// A word or byte of the first dword of each quadword in all of it.
alignas(64) constexpr auto kSpreadWord = byte_places([](size_t i) { return i % 16 / 8 * 8 + i % 2; });
alignas(64) constexpr auto kSpreadByte = byte_places([](size_t i) { return i % 16 / 8 * 8 + 2; });

// Two chunks as eight blocks: vector i holds words 4 i to 4 i + 3 of each.
struct Blocks {
  __m512i v[4];

  Blocks() = default;
  Blocks(const uint16_t* x, const uint16_t* y) {
    const __m512i a = _mm512_loadu_si512(x), b = _mm512_loadu_si512(x + 32);
    const __m512i c = _mm512_loadu_si512(y), d = _mm512_loadu_si512(y + 32);
    const __m512i ab = _mm512_unpacklo_epi64(a, b), cd = _mm512_unpacklo_epi64(c, d);
    const __m512i ab1 = _mm512_unpackhi_epi64(a, b), cd1 = _mm512_unpackhi_epi64(c, d);
    v[0] = _mm512_shuffle_i64x2(ab, cd, 0x88);
    v[1] = _mm512_shuffle_i64x2(ab1, cd1, 0x88);
    v[2] = _mm512_shuffle_i64x2(ab, cd, 0xdd);
    v[3] = _mm512_shuffle_i64x2(ab1, cd1, 0xdd);
  }

  __m512i doubled(int i) const { return _mm512_add_epi16(v[i], v[i]); }  // without sign

  // Twice the largest magnitude of each block, in all of its quadword.
  __m512i largest() const {
    __m512i m = _mm512_max_epu16(_mm512_max_epu16(doubled(0), doubled(1)), _mm512_max_epu16(doubled(2), doubled(3)));
    m = _mm512_max_epu16(m, _mm512_rol_epi64(m, 32));
    return _mm512_max_epu16(m, _mm512_rol_epi64(m, 16));
  }
};

// Packed codes of two chunks. `scales` has for each block, in the first dword of its quadword, `from` of its octaves
// and above it m, and 64 in the second chunk.
inline __m512i encode_blocks(const Blocks& x, __m512i scales, __m512i steps, __m512i steps_of_second) {
  const __m512i from = _mm512_shuffle_epi8(scales, _mm512_load_si512(kSpreadWord.data()));
  const __m512i m = _mm512_shuffle_epi8(scales, _mm512_load_si512(kSpreadByte.data()));
  const __m512i high = _mm512_load_si512(kHighOfBlocks.data()), low = _mm512_load_si512(kLowOfBlocks.data());
  const auto half = [&](int i) {
    const __m512i a = _mm512_subs_epu16(x.doubled(i), from), b = _mm512_subs_epu16(x.doubled(i + 1), from);
    const __m512i octave = _mm512_permutex2var_epi8(a, high, b), beyond = _mm512_permutex2var_epi8(a, low, b);
    const __m512i at = _mm512_shuffle_epi8(_mm512_load_si512(kOctaveSteps.data()), octave);
    const __m512i step = _mm512_permutex2var_epi8(steps, _mm512_or_si512(at, m), steps_of_second);
    const __m512i begin = _mm512_shuffle_epi8(_mm512_load_si512(kOctaveCodes.data()), octave);
    const __m512i code =
        _mm512_mask_add_epi8(begin, _mm512_cmpge_epu8_mask(beyond, step), begin, _mm512_set1_epi8(0x10));
    const __m512i sign = _mm512_permutex2var_epi8(x.v[i], high, x.v[i + 1]);
    const __m512i c = _mm512_ternarylogic_epi32(code, sign, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);
    // Even elements below odd ones.
    return _mm512_ternarylogic_epi32(_mm512_set1_epi8(static_cast<char>(0xf0)), c, _mm512_srli_epi64(c, 36), 0xca);
  };
  return _mm512_permutex2var_epi8(half(0), _mm512_load_si512(kCodesOfBlocks.data()), half(2));
}

// Of four chunks: lane 2 j + c / 2 is that of block j, as they lie, of chunks c = 0 and 2, then 1 and 3.
alignas(64) constexpr int32_t kChunkOfLane[16] = {0, 2, 0, 2, 0, 2, 0, 2, 1, 3, 1, 3, 1, 3, 1, 3};

// Four chunks between the stages.
struct FourChunks {
  Blocks blocks[2];
  __m512i top, scales;
  const Nvfp4Steps* steps[4];
  uint8_t *data[4], *block_scale[4];
};

// Encodes the rows of a batch, of `dim` elements (a multiple of 64) each: what a stage finds waits in memory for the
// next one, so that no four waits for the long chain from its elements to its block scales.
class Nvfp4Encoder {
 public:
  Nvfp4Encoder(const Bf16Batch& batch, int dim, float limit) : batch_(batch), limit_(limit), each_(dim / 64) {}

  // Returns a bit for each row that needs the scalar code: a block's scale is beyond `limit`, is flushed or is not
  // finite. Where rows have scales of their own, `set_scales(top, each)` sets them by the largest magnitudes of their
  // chunks, `each` a row.
  template <bool own, class SetScales>
  KVPOOL_INLINE uint64_t encode(const Nvfp4BatchScales& rows, SetScales&& set_scales) const {
    return each_ == 2 ? encode<own>(2, rows, set_scales) : encode<own>(each_, rows, set_scales);  // 2 is usual
  }

 private:
  static constexpr int kFours = 16;

  template <bool own, class SetScales>
  KVPOOL_INLINE uint64_t encode(int each, const Nvfp4BatchScales& rows, SetScales&& set_scales) const {
    FourChunks fours[kFours];
    uint32_t top[4 * kFours];
    const int n = (batch_.rows + 3) / 4 * each;
    for (int i = 0; i < n; ++i) {
      load(each, 4 * i, fours[i]);
      if (own) _mm_storeu_si128(reinterpret_cast<__m128i*>(top + 4 * i), top_of_chunks(fours[i].top));
    }
    if (own) set_scales(top, each);
    uint64_t refused = 0;
    for (int i = 0; i < n; ++i) refused |= scale(each, 4 * i, rows, fours[i]);
    for (int i = 0; i < n; ++i) store(fours[i]);
    return refused;
  }

  // Largest magnitude of each of four chunks, as the bits of fp32, from those of their blocks.
  static __m128i top_of_chunks(__m512i top) {
    top = _mm512_max_epu16(top, _mm512_shuffle_epi32(top, static_cast<_MM_PERM_ENUM>(0x4e)));
    top = _mm512_max_epu16(top, _mm512_shuffle_i64x2(top, top, 0xb1));
    const __m512i order = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9, 1, 8, 0);  // of kChunkOfLane
    const __m128i chunks = _mm512_castsi512_si128(_mm512_permutexvar_epi32(order, top));
    return _mm_and_si128(_mm_srli_epi32(chunks, 1), _mm_set1_epi32(static_cast<int>(0xffff0000)));
  }

  // Row of a chunk, by the upper half of a product.
  static int row_of(int each, int chunk) { return chunk * (65536 / each + 1) >> 16; }

  KVPOOL_INLINE void load(int each, int chunk, FourChunks& four) const {
    const uint16_t* x[4];
    for (int c = 0; c < 4; ++c) {
      const int row = row_of(each, chunk + c), piece = chunk + c - row * each;
      x[c] = batch_.x[row] + 64 * piece;
      four.data[c] = batch_.at[row].data + 32 * piece;
      four.block_scale[c] = batch_.at[row].block_scale + 4 * piece;
    }
    four.blocks[0] = Blocks(x[0], x[1]);
    four.blocks[1] = Blocks(x[2], x[3]);
    four.top = _mm512_mask_mov_epi32(four.blocks[0].largest(), 0xaaaa, four.blocks[1].largest());
  }

  KVPOOL_INLINE uint64_t scale(int each, int chunk, const Nvfp4BatchScales& rows, FourChunks& four) const {
    for (int c = 0; c < 4; ++c) four.steps[c] = rows.steps[row_of(each, chunk + c)];
    const __m512i chunk_of_lane = _mm512_load_si512(kChunkOfLane);
    const int first = row_of(each, chunk);
    // Rows after the first: (piece + c) / each, likewise.
    const __m512i twice =
        _mm512_slli_epi32(_mm512_add_epi32(chunk_of_lane, _mm512_set1_epi32(chunk - first * each)), 1);
    const __m512i row = _mm512_mulhi_epu16(twice, _mm512_set1_epi32(32768 / each + 1));
    const __m512 six_g = _mm512_permutexvar_ps(row, _mm512_broadcast_f32x4(_mm_loadu_ps(rows.six_g + first)));
    const __m512i exponent_of_g = _mm512_permutexvar_epi32(
        row, _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(rows.exponent + first))));
    const __m512 amax = _mm512_castsi512_ps(
        _mm512_and_si512(_mm512_srli_epi32(four.top, 1), _mm512_set1_epi32(static_cast<int>(0xffff0000))));
    const __m512 wanted = _mm512_div_ps(amax, six_g);
    // The block scale as fp32 and as a code, as E4m3::encode has it.
    const __m512i u = _mm512_castps_si512(wanted);
    const __m512i last = _mm512_and_si512(_mm512_srli_epi32(u, E4m3::kShift), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7ffff)), last);
    const __m512 magic = _mm512_set1_ps(E4m3::kMagic), shifted = _mm512_add_ps(wanted, magic);
    const __mmask16 small = _mm512_cmp_ps_mask(wanted, _mm512_set1_ps(E4m3::kNormal), _CMP_LT_OQ);
    const __m512i scale =
        _mm512_mask_mov_epi32(_mm512_and_si512(rounded, _mm512_set1_epi32(static_cast<int>(0xfff00000))), small,
                              _mm512_castps_si512(_mm512_sub_ps(shifted, magic)));
    const __m512i code = _mm512_mask_mov_epi32(
        _mm512_srli_epi32(_mm512_sub_epi32(rounded, _mm512_set1_epi32(E4m3::kExponent)), E4m3::kShift), small,
        _mm512_castps_si512(shifted));
    const __mmask16 plain = _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(wanted, _mm512_set1_ps(limit_), _CMP_LE_OQ),
                                                    wanted, _mm512_set1_ps(0x1p-10f), _CMP_GT_OQ);
    const auto load_from = [&](int c) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(four.steps[c]->from));
    };
    const __m512i from = _mm512_inserti64x4(
        _mm512_castsi256_si512(_mm256_inserti128_si256(_mm256_castsi128_si256(load_from(0)), load_from(1), 1)),
        _mm256_inserti128_si256(_mm256_castsi128_si256(load_from(2)), load_from(3), 1), 1);
    const __m512i m_of_chunk = _mm512_ternarylogic_epi32(_mm512_slli_epi32(chunk_of_lane, 3),
                                                         _mm512_srli_epi32(scale, 20), _mm512_set1_epi32(7), 0xf8);
    const __m512i exponent =
        _mm512_add_epi32(_mm512_and_si512(_mm512_srli_epi32(scale, 15), _mm512_set1_epi32(0xff00)), exponent_of_g);
    // Byte 2: m, and 64 in the second chunk of two.
    const __m512i second = _mm512_and_si512(_mm512_slli_epi32(chunk_of_lane, 22), _mm512_set1_epi32(1 << 22));
    const __m512i m = _mm512_ternarylogic_epi32(second, _mm512_srli_epi32(scale, 4), _mm512_set1_epi32(7 << 16), 0xf8);
    four.scales =
        _mm512_mask_mov_epi16(_mm512_add_epi16(_mm512_permutexvar_epi16(m_of_chunk, from), exponent), 0xaaaaaaaa, m);
    const __m128i bytes = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(code),
                                           _mm_set_epi8(15, 11, 13, 9, 7, 3, 5, 1, 14, 10, 12, 8, 6, 2, 4, 0));
    _mm_storeu_si32(four.block_scale[0], bytes);
    _mm_storeu_si32(four.block_scale[1], _mm_shuffle_epi32(bytes, 1));
    _mm_storeu_si32(four.block_scale[2], _mm_shuffle_epi32(bytes, 2));
    _mm_storeu_si32(four.block_scale[3], _mm_shuffle_epi32(bytes, 3));
    uint64_t refused = 0;
    if (__builtin_expect(plain != 0xffff, 0)) {
      constexpr __mmask16 lanes[4] = {0x0055, 0x5500, 0x00aa, 0xaa00};
      for (int c = 0; c < 4 && row_of(each, chunk + c) < batch_.rows; ++c)
        if ((plain & lanes[c]) != lanes[c]) refused |= uint64_t{1} << row_of(each, chunk + c);
    }
    return refused;
  }

  KVPOOL_INLINE void store(const FourChunks& four) const {
    for (int c = 0; c < 4; c += 2) {
      const __m512i codes = encode_blocks(four.blocks[c / 2], c == 0 ? four.scales : _mm512_srli_epi64(four.scales, 32),
                                          _mm512_load_si512(four.steps[c]), _mm512_load_si512(four.steps[c + 1]));
      if (four.data[c + 1] == four.data[c] + 32) {
        store_line(four.data[c], codes, batch_.past);
      } else {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(four.data[c]), _mm512_castsi512_si256(codes));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(four.data[c + 1]), _mm512_extracti64x4_epi64(codes, 1));
      }
    }
  }

  const Bf16Batch& batch_;
  const float limit_;
  const int each_;  // chunks of a row
};

}  // namespace
}  // namespace kvpool
