// What a codec is to a kernel: `encode` and `decode` of one vector at its place in the planes.
#pragma once

#include "kernels/codecs/numeric.hpp"

namespace kvpool {
namespace {

// Where one vector lies. Scales of a vector with several segments are dense.
struct Place {
  uint8_t* data;
  float* scale;
  uint8_t* block_scale;
};

KVPOOL_INLINE Place place(const Store& s, int64_t b, int h, int n) {
  return {s.data.at(b, h, n), s.scale.base ? reinterpret_cast<float*>(s.scale.at(b, h, n)) : nullptr,
          s.block_scale.base ? s.block_scale.at(b, h, n) : nullptr};
}

// The place of the same token's vector of the next head.
KVPOOL_INLINE Place next_head(const Store& s, Place p) {
  return {p.data + s.data.stride_h, reinterpret_cast<float*>(reinterpret_cast<uint8_t*>(p.scale) + s.scale.stride_h),
          p.block_scale + s.block_scale.stride_h};
}

// Specialised by one header a format: static `encode(const Store&, const float* x, Place)` and
// `decode(const Store&, Place, float* out)` over store.dim elements.
template <CodecId>
struct Codec;

}  // namespace
}  // namespace kvpool
