// The maps before quantised codecs: smoothing (a factor per head and channel), rotation (normalised Hadamard in blocks
// of `rotation_block` channels, its own inverse), mixing (a matrix per head, with the rotation in it).
#pragma once

#include "kernels/codecs/plain.hpp"

namespace kvpool {
namespace {

// x [dim] <- H x, block by block: butterflies of span 1, 2, 4, ..., then one product by fl32(1 / sqrt(block)).
inline void rotate(float* x, int dim, int block) {
  const float norm = static_cast<float>(1.0 / std::sqrt(static_cast<double>(block)));
  for (int begin = 0; begin < dim; begin += block) {
    float* y = x + begin;
    for (int span = 1; span < block; span *= 2)
      for (int i = 0; i < block; i += 2 * span)
        for (int j = i; j < i + span; ++j) {
          const float a = y[j], b = y[j + span];
          y[j] = a + b;
          y[j + span] = a - b;
        }
    for (int i = 0; i < block; ++i) y[i] *= norm;
  }
}

// x [dim] <- x M for one head's matrix of [heads][dim][dim]: products are rounded, then added channel after channel.
inline void mix(const float* matrices, int head, float* x, int dim) {
  const float* m = matrices + int64_t{head} * dim * dim;
  alignas(64) float sum[kMaxDim];
  for (int j = 0; j < dim; ++j) sum[j] = x[0] * m[j];
  for (int i = 1; i < dim; ++i)
    for (int j = 0; j < dim; ++j) sum[j] += x[i] * m[int64_t{i} * dim + j];
  std::memcpy(x, sum, sizeof(float) * static_cast<size_t>(dim));
}

// What is stored, from what the model computed. Finite elements beyond 2^90 are cut to it first, so that neither map
// makes an infinity of them.
inline void to_stored(const Store& s, int head, float* x) {
  if (!s.has_maps()) return;
  for (int i = 0; i < s.dim; ++i) x[i] = clamp_finite(x[i], 0x1p90f);
  if (s.mix_store != nullptr) return mix(s.mix_store, head, x, s.dim);
  if (s.smoothing != nullptr) {
    const float* f = s.smoothing + int64_t{head} * s.dim;
    for (int i = 0; i < s.dim; ++i) x[i] = x[i] / f[i];
  }
  if (s.rotation) rotate(x, s.dim, s.rotation_block);
}

// The inverse, on the first `dim` channels; with mixing, on all.
inline void from_stored(const Store& s, int head, float* x, int dim) {
  if (s.mix_restore != nullptr) return mix(s.mix_restore, head, x, dim);
  if (s.rotation) rotate(x, dim, s.rotation_block);
  if (s.smoothing != nullptr) {
    const float* f = s.smoothing + int64_t{head} * s.dim;
    for (int i = 0; i < dim; ++i) x[i] = x[i] * f[i];
  }
}

// A query that meets stored keys: smoothing goes to the other factor of the product.
inline void to_query(const Store& s, int head, float* q) {
  if (s.mix_ask != nullptr) return mix(s.mix_ask, head, q, s.dim);
  if (s.smoothing != nullptr) {
    const float* f = s.smoothing + int64_t{head} * s.dim;
    for (int i = 0; i < s.dim; ++i) q[i] = q[i] * f[i];
  }
  if (s.rotation) rotate(q, s.dim, s.rotation_block);
}

}  // namespace
}  // namespace kvpool
