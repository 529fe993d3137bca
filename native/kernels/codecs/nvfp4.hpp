// `nvfp4`, `nvfp4-token`: E2M1 with an E4M3 scale for 16 elements and a decode scale g, constant or one a vector; an
// element is fl32(c * fl32(bs * g)). Block scales are linear in memory.
#pragma once

#include <algorithm>
#include <iterator>

#include "kernels/codecs/codec.hpp"
#include "kernels/codecs/elements.hpp"

#if defined(__AVX512BF16__)
#include "kernels/codecs/encode_nvfp4_avx512.hpp"
#endif

namespace kvpool {
namespace {

constexpr int kNvfp4Block = 16;

struct Nvfp4Block {
  int saturated, flushed;
};

// One block of 16; what it lost when `counted`.
inline Nvfp4Block encode_nvfp4_block(const float* x, float g, uint8_t* data, uint8_t* block_scale, bool counted) {
  const uint32_t amax = amax_bits(x, kNvfp4Block);
  const float wanted = amax >= kInfBits ? from_bits(0x7fc00000) : from_bits(umin(amax, kLargestAmax)) / (6.0f * g);
  *block_scale = E4m3::encode(wanted);
  const float s = E4m3::decode(*block_scale) * g;
  Nvfp4Block lost{0, 0};
  if (!(s >= kSmallestScale)) {  // NaN as well: then it is in the block scale
    std::memset(data, 0, kNvfp4Block / 2);
    if (counted && amax < kInfBits)
      for (int i = 0; i < kNvfp4Block; ++i) lost.flushed += magnitude(x[i]) != 0;
    return lost;
  }
  const float inverse = 1.0f / s;
  float y[kNvfp4Block];
  for (int i = 0; i < kNvfp4Block; ++i) y[i] = x[i] * inverse;
  pack_e2m1(y, data);
  if (counted && wanted > E4m3::largest)
    for (int i = 0; i < kNvfp4Block; ++i) lost.saturated += magnitude(y[i]) > bits(E2m1::largest);
  return lost;
}

inline void decode_nvfp4(const Store& s, Place at, float g, float* out) {
  for (int i = 0; i < s.dim / kNvfp4Block; ++i)
    unpack_e2m1(at.data + i * (kNvfp4Block / 2), E4m3::decode(at.block_scale[i]) * g, out + i * kNvfp4Block);
}

#if defined(__AVX512BF16__)
// Rows the vector code refused, from bf16.
template <class Encode>
inline void encode_refused(const Store& s, const Bf16Batch& batch, uint64_t rows, Encode&& encode) {
  if (rows == 0) return;
  if (batch.past) _mm_sfence();  // before the same bytes are written again
  alignas(64) float x[kMaxDim];
  for (; rows != 0; rows &= rows - 1) {
    const int r = __builtin_ctzll(rows);
    load_row(reinterpret_cast<const uint8_t*>(batch.x[r]), DType::bf16, s.dim, x);
    encode(s, x, batch.at[r]);
  }
}
#endif

template <>
struct Codec<CodecId::nvfp4> {
  static void encode(const Store& s, const float* x, Place at) {
    Nvfp4Block total{0, 0};
    for (int i = 0; i < s.dim / kNvfp4Block; ++i) {
      const Nvfp4Block lost = encode_nvfp4_block(x + i * kNvfp4Block, s.constant_scale, at.data + i * (kNvfp4Block / 2),
                                                 at.block_scale + i, true);
      total.saturated += lost.saturated;
      total.flushed += lost.flushed;
    }
    count(s.counters->saturated, total.saturated);
    count(s.counters->flushed, total.flushed);
  }

#if defined(__AVX512BF16__)
  // The same from bf16 elements, for the stores that `fits` names.
  struct FromBf16 {
    const Store& s;
    Nvfp4Steps steps;
    Nvfp4BatchScales rows;

    static bool fits(const Store& s) {
      return s.dim % 64 == 0 && s.constant_scale >= 0x1p-60f && s.constant_scale <= 0x1p60f;
    }

    explicit FromBf16(const Store& store) : s(store) {
      make_nvfp4_steps(s.constant_scale, steps);
      std::fill(std::begin(rows.steps), std::end(rows.steps), &steps);
      std::fill(std::begin(rows.six_g), std::end(rows.six_g), 6.0f * s.constant_scale);
      std::fill(std::begin(rows.exponent), std::end(rows.exponent), 0);
    }

    void operator()(const Bf16Batch& batch) const {
      encode_refused(
          s, batch, Nvfp4Encoder(batch, s.dim, E4m3::largest).encode<false>(rows, [](const uint32_t*, int) {}), encode);
    }
  };
#endif

  static void decode(const Store& s, Place at, float* out) { decode_nvfp4(s, at, s.constant_scale, out); }
};

template <>
struct Codec<CodecId::nvfp4_token> {
  static void encode(const Store& s, const float* x, Place at) {
    uint32_t amax = 0;  // over the finite blocks: one bad block must not take the others with it
    for (int i = 0; i < s.dim / kNvfp4Block; ++i) {
      const uint32_t a = amax_bits(x + i * kNvfp4Block, kNvfp4Block);
      amax = a < kInfBits && a > amax ? a : amax;
    }
    const float ratio = from_bits(umin(amax, kLargestAmax)) / 2688.0f;
    const float g = ratio < kSmallestScale ? kSmallestScale : ratio;
    *at.scale = g;
    for (int i = 0; i < s.dim / kNvfp4Block; ++i)
      encode_nvfp4_block(x + i * kNvfp4Block, g, at.data + i * (kNvfp4Block / 2), at.block_scale + i, false);
  }

#if defined(__AVX512BF16__)
  // The same from bf16 elements, for the stores that `fits` names.
  struct FromBf16 {
    const Store& s;

    static bool fits(const Store& s) { return s.dim % 64 == 0; }

    void operator()(const Bf16Batch& batch) const {
      Nvfp4BatchScales rows;
      const auto set_scales = [&](const uint32_t* top, int each) {
        for (int first = 0; first < batch.rows; first += 4) {
          const auto largest = [&](int r) {
            uint32_t row = 0;
            for (int i = 0; i < each; ++i) row = std::max(row, top[(first + r) * each + i]);
            return static_cast<int>(row);
          };
          scale_rows(batch, first, _mm_set_epi32(largest(3), largest(2), largest(1), largest(0)), rows);
        }
      };
      // The largest block's scale may be an ulp above 448, and rounds to it.
      encode_refused(s, batch, Nvfp4Encoder(batch, s.dim, 460.0f).encode<true>(rows, set_scales), encode);
    }

    // Stores the scales of four rows by their largest magnitudes.
    static KVPOOL_INLINE void scale_rows(const Bf16Batch& batch, int first, __m128i amax, Nvfp4BatchScales& rows) {
      const __m128 g = _mm_div_ps(_mm_castsi128_ps(amax), _mm_set1_ps(2688.0f));
      // Steps of smaller rows would begin below the least normal bf16.
      const __mmask8 plain = _mm_cmpge_epu32_mask(amax, _mm_set1_epi32(bits(0x1p-96f)));
      const __m128 six_g = _mm_mask_mul_ps(_mm_set1_ps(from_bits(0x7fc00000)), plain, _mm_set1_ps(6.0f), g);
      const __m128i exponent = _mm_slli_epi32(_mm_sub_epi32(_mm_srli_epi32(amax, 23), _mm_set1_epi32(127)), 8);
      alignas(16) uint32_t top[4];
      alignas(16) float scale[4];
      _mm_store_si128(reinterpret_cast<__m128i*>(top), amax);
      _mm_store_ps(scale, g);
      _mm_storeu_ps(rows.six_g + first, six_g);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(rows.exponent + first), exponent);
      for (int r = 0; r < 4; ++r) {
        *batch.at[first + r].scale = scale[r];
        rows.steps[first + r] = &kNvfp4TokenSteps.of[top[r] >> 16 & 127];
      }
    }
  };
#endif

  static void decode(const Store& s, Place at, float* out) { decode_nvfp4(s, at, *at.scale, out); }
};

}  // namespace
}  // namespace kvpool
