// `fp8`, `int8`, `index-fp8`: one fp32 scale a vector, or one a segment of it; an element is fl32(c * s).
#pragma once

#include "kernels/codecs/codec.hpp"
#include "kernels/codecs/elements.hpp"

#if defined(__AVX512BF16__)
#include "kernels/codecs/encode_avx512.hpp"
#endif

namespace kvpool {
namespace {

template <class Element>
struct Scaled {
  static void encode(const Store& s, const float* x, Place at) {
    int begin = 0;
    for (int i = 0; i < s.num_segments; begin += s.segments[i], ++i) {
      const int n = s.segments[i];
      const float scale = scale_of(amax_bits(x + begin, n), Element::largest);
      at.scale[i] = scale;
      uint8_t* data = at.data + begin;
      if (!(scale > 0)) {  // zeros, or not finite: then the NaN is in the scale
        std::memset(data, 0, static_cast<size_t>(n));
        continue;
      }
      const float inverse = 1.0f / scale;
      for (int j = 0; j < n; ++j) data[j] = Element::encode(x[begin + j] * inverse);
    }
  }

#if defined(__AVX512BF16__)
  // The same from bf16 elements, for the stores that `fits` names.
  struct FromBf16 {
    const Store& s;

    static bool fits(const Store& s) { return s.num_segments == 1 && s.dim % 64 == 0; }

    void operator()(const Bf16Batch& batch) const {
      switch (s.dim) {  // of the usual ones loops unroll
        case 64:
          return batch.past ? encode<true>(batch, 64) : encode<false>(batch, 64);
        case 128:
          return batch.past ? encode<true>(batch, 128) : encode<false>(batch, 128);
        default:
          return batch.past ? encode<true>(batch, s.dim) : encode<false>(batch, s.dim);
      }
    }

    template <bool past>
    KVPOOL_INLINE void encode(const Bf16Batch& batch, int dim) const {
      alignas(64) uint32_t amax[Bf16Batch::kRows];
      alignas(64) float scale[Bf16Batch::kRows], inverse[Bf16Batch::kRows];
      uint32_t usual = 0;  // rows that are neither zeros nor hold what is not finite
      for (int first = 0; first < batch.rows; first += 4) {
        const __m128i top = amax_of_rows(batch.x + first, dim);
        const __m128 scales = scales_of(top, Element::largest);
        usual |= uint32_t{_mm_cmp_ps_mask(scales, _mm_setzero_ps(), _CMP_GT_OQ)} << first;
        _mm_store_si128(reinterpret_cast<__m128i*>(amax + first), top);
        _mm_store_ps(scale + first, scales);
        _mm_store_ps(inverse + first, _mm_div_ps(_mm_set1_ps(1.0f), scales));
      }
      for (int r = 0; r < batch.rows; ++r) {
        *batch.at[r].scale = scale[r];
        encode_row<Element>(batch.x[r], dim, amax[r], inverse[r], batch.at[r].data, past);
      }
      uint32_t others = ~usual & ((1u << batch.rows) - 1);
      if (past && others != 0) _mm_sfence();  // before the same bytes are written again
      for (; others != 0; others &= others - 1) {
        uint8_t* out = batch.at[__builtin_ctz(others)].data;
        for (int i = 0; i < dim; i += 64) store_line(out + i, _mm512_setzero_si512(), past);
      }
    }
  };
#endif

  static void decode(const Store& s, Place at, float* out) {
    int begin = 0;
    for (int i = 0; i < s.num_segments; begin += s.segments[i], ++i) {
      const float scale = at.scale[i];
      const uint8_t* data = at.data + begin;
      for (int j = 0; j < s.segments[i]; ++j) out[begin + j] = Element::decode(data[j]) * scale;
    }
  }
};

template <>
struct Codec<CodecId::fp8> : Scaled<E4m3> {};
template <>
struct Codec<CodecId::index_fp8> : Scaled<E4m3> {};
template <>
struct Codec<CodecId::int8> : Scaled<Int8> {};

}  // namespace
}  // namespace kvpool
