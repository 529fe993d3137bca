// `fp8-tensor`, `fp8e5m2-tensor`, `int8-tensor`: one constant decode scale a layer and plane. A NaN or an infinity is
// NaN, alone; int8 has no such code, stores 0 and counts it.
#pragma once

#include "kernels/codecs/codec.hpp"
#include "kernels/codecs/elements.hpp"

#if defined(__AVX512BF16__)
#include "kernels/codecs/encode_constant_avx512.hpp"
#endif

namespace kvpool {
namespace {

template <class Element, bool has_nan>
struct Constant {
  static void encode(const Store& s, const float* x, Place at) {
    const float inverse = 1.0f / s.constant_scale;
    int saturated = 0, flushed = 0, nonfinite = 0;
    for (int i = 0; i < s.dim; ++i) {
      const uint32_t m = magnitude(x[i]);
      const bool finite = m < kInfBits;
      const float y = x[i] * inverse;
      const uint8_t code = Element::encode(finite ? y : has_nan ? from_bits(0x7fc00000) : 0.0f);
      at.data[i] = code;
      saturated += finite & (magnitude(y) > bits(Element::largest));
      flushed += finite & (m != 0) & ((has_nan ? code & 0x7f : code) == 0);
      nonfinite += !finite;
    }
    count(s.counters->saturated, saturated);
    count(s.counters->flushed, flushed);
    if (!has_nan) count(s.counters->nonfinite, nonfinite);
  }

#if defined(__AVX512BF16__)
  // The same from bf16 elements, for the stores that `fits` names. What is lost is counted once, at the end: an atomic
  // addition waits for all stores before it.
  struct FromBf16 {
    const Store& s;
    ConstantRows<Element> rows;
    Lost lost;

    static bool fits(const Store& s) { return s.dim % 64 == 0 && is_usual_scale(s.constant_scale); }

    explicit FromBf16(const Store& store) : s(store), rows(store.constant_scale) {}

    ~FromBf16() {
      count(s.counters->saturated, lost.saturated);
      count(s.counters->flushed, lost.flushed);
    }

    void operator()(const Bf16Batch& batch) {
      switch (s.dim) {  // of the usual ones loops unroll
        case 64:
          return encode(batch, 64);
        case 128:
          return encode(batch, 128);
        default:
          return encode(batch, s.dim);
      }
    }

    KVPOOL_INLINE void encode(const Bf16Batch& batch, int dim) {
      for (int r = 0; r < batch.rows; ++r) {
        const uint16_t* x = batch.x[r];
        uint8_t* out = batch.at[r].data;
        if (rows.loses_nothing(x, dim)) {
          rows.template encode<false>(x, dim, out, batch.past, lost);
        } else if (_mm512_cmpge_epu16_mask(farthest_above(x, dim, 0), words(kInfBits >> 16)) == 0) {
          rows.template encode<true>(x, dim, out, batch.past, lost);
        } else {
          encode_scalar(s, x, batch.at[r]);
        }
      }
    }

    [[gnu::noinline]] static void encode_scalar(const Store& s, const uint16_t* row, const Place& at) {
      alignas(64) float x[kMaxDim];
      load_row(reinterpret_cast<const uint8_t*>(row), DType::bf16, s.dim, x);
      Constant::encode(s, x, at);
    }
  };
#endif

  static void decode(const Store& s, Place at, float* out) {
    for (int i = 0; i < s.dim; ++i) out[i] = Element::decode(at.data[i]) * s.constant_scale;
  }
};

template <>
struct Codec<CodecId::fp8_tensor> : Constant<E4m3, true> {};
template <>
struct Codec<CodecId::fp8e5m2_tensor> : Constant<E5m2, true> {};
template <>
struct Codec<CodecId::int8_tensor> : Constant<Int8, false> {};

}  // namespace
}  // namespace kvpool
