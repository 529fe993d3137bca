// `index-fp4`: E2M1 with a UE8M0 scale for 32 channels, the least power of two not below amax / 6; zeros have
// exponent 0. An element is c * 2^(e - 127).
#pragma once

#include "kernels/codecs/codec.hpp"
#include "kernels/codecs/elements.hpp"

namespace kvpool {
namespace {

constexpr int kIndexFp4Block = 32;

// 2^(e - 127); 255 is NaN.
inline float ue8m0(uint32_t e) { return from_bits(e == 255 ? 0x7fc00000 : e == 0 ? 1u << 22 : e << 23); }

template <>
struct Codec<CodecId::index_fp4> {
  static void encode(const Store& s, const float* x, Place at) {
    for (int b = 0; b < s.dim / kIndexFp4Block; ++b) {
      const float* block = x + b * kIndexFp4Block;
      uint8_t* data = at.data + b * (kIndexFp4Block / 2);
      const uint32_t scale = bits(scale_of(amax_bits(block, kIndexFp4Block), E2m1::largest));
      const uint32_t e = scale > kInfBits ? 255 : (scale >> 23) + ((scale & 0x7fffff) != 0);
      at.block_scale[b] = static_cast<uint8_t>(e);
      if (e == 0 || e == 255) {
        std::memset(data, 0, kIndexFp4Block / 2);
        continue;
      }
      const float inverse = 1.0f / ue8m0(e);
      const float largest = e < 253 ? 6.0f : 3.0f;  // 4 * 2^126 is beyond fp32
      float y[kIndexFp4Block];
      for (int i = 0; i < kIndexFp4Block; ++i) {
        const float v = block[i] * inverse;
        y[i] = from_bits(umin(magnitude(v), bits(largest)) | (bits(v) & 0x80000000));
      }
      pack_e2m1(y, data);
      pack_e2m1(y + 16, data + 8);
    }
  }

  static void decode(const Store& s, Place at, float* out) {
    for (int b = 0; b < s.dim / 16; ++b) unpack_e2m1(at.data + b * 8, ue8m0(at.block_scale[b / 2]), out + b * 16);
  }
};

}  // namespace
}  // namespace kvpool
