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
  // The same from bf16 elements; `fits_bf16` says for which stores.
  static bool fits_bf16(const Store& s) { return s.num_segments == 1 && s.dim % 64 == 0; }

  static void encode_bf16(const Store& s, const Bf16Batch& batch) {
    alignas(64) uint32_t amax[Bf16Batch::kRows];
    alignas(64) float scale[Bf16Batch::kRows], inverse[Bf16Batch::kRows];
    const __m512i top = amax_of_batch(batch, s.dim);
    const __m512 scales = scales_of(top, Element::largest);
    _mm512_store_si512(amax, top);
    _mm512_store_ps(scale, scales);
    _mm512_store_ps(inverse, _mm512_div_ps(_mm512_set1_ps(1.0f), scales));
    for (int r = 0; r < batch.rows; ++r) {
      uint8_t* out = batch.at[r].data;
      *batch.at[r].scale = scale[r];
      if (scale[r] > 0) {
        encode_row<Element>(batch.x[r], s.dim, amax[r], inverse[r], out, batch.past);
      } else {
        for (int i = 0; i < s.dim; i += 64) store_line(out + i, _mm512_setzero_si512(), batch.past);
      }
    }
  }
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
