// fp32, fp16, bf16: elements as they are. Finite values saturate (fp16 at 65,504); NaN and inf stay.
#pragma once

#include "kernels/codecs/codec.hpp"

namespace kvpool {
namespace {

inline float clamp_finite(float x, float top) {
  const uint32_t a = bits(x) & 0x7fffffff;
  const uint32_t clamped = a > bits(top) && a < 0x7f800000 ? bits(top) : a;
  return from_bits((bits(x) & 0x80000000) | clamped);
}

template <DType type>
struct Plain {
  static void encode(const Store& s, const float* x, Place at) {
    if constexpr (type == DType::fp32) {
      std::memcpy(at.data, x, 4 * static_cast<size_t>(s.dim));
    } else {
      constexpr float top = type == DType::fp16 ? 65504.0f : 0x1.fep127f;
      auto* p = reinterpret_cast<uint16_t*>(at.data);
      for (int i = 0; i < s.dim; ++i) {
        const float y = clamp_finite(x[i], top);
        p[i] = type == DType::fp16 ? f32_to_f16(y) : f32_to_bf16(y);
      }
    }
  }

  static void decode(const Store& s, Place at, float* out) { load_row(at.data, type, s.dim, out); }
};

template <>
struct Codec<CodecId::fp32> : Plain<DType::fp32> {};
template <>
struct Codec<CodecId::fp16> : Plain<DType::fp16> {};
template <>
struct Codec<CodecId::bf16> : Plain<DType::bf16> {};

}  // namespace
}  // namespace kvpool
