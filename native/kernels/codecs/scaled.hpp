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
  // The same from bf16 elements; `fits` says for which stores.
  static bool fits_bf16(const Store& s) { return s.num_segments == 1 && s.dim % 64 == 0; }

  static void encode_bf16(const Store& s, const uint16_t* x, Place at) {
    const float scale = scale_of(amax_bits_bf16(x, s.dim), Element::largest);
    *at.scale = scale;
    if (!(scale > 0)) {
      std::memset(at.data, 0, static_cast<size_t>(s.dim));
    } else {
      encode_row_bf16<Element>(x, s.dim, 1.0f / scale, at.data);
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
