// Write and read of single vectors: the codec's own arithmetic around the options.
#pragma once

#include "kernels/codecs/table.hpp"
#include "kernels/transform.hpp"

namespace kvpool {
namespace {

// Copies one row of a plain format; past the cache when it is not read soon and both ends are whole lines.
inline void copy_row(uint8_t* dst, const uint8_t* src, int64_t bytes, bool bulk) {
#if defined(__AVX512F__)
  if (bulk && (reinterpret_cast<uintptr_t>(dst) | static_cast<uintptr_t>(bytes)) % 64 == 0) {
    int64_t i = 0;
    for (; i + 256 <= bytes; i += 256) {  // all loads of a row of 128 before its stores: a twentieth faster
      __m512i x[4];
      for (int j = 0; j < 4; ++j) x[j] = _mm512_loadu_si512(src + i + 64 * j);
      for (int j = 0; j < 4; ++j) _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i) + j, x[j]);
    }
    for (; i < bytes; i += 64) _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i), _mm512_loadu_si512(src + i));
    return;
  }
#endif
  static_cast<void>(bulk);
  std::memcpy(dst, src, static_cast<size_t>(bytes));
}

// A write without a codec; whoever asks for it waits for the stores past the cache.
inline void copy_rows(const WriteArgs& a, int64_t begin, int64_t end) {
  const Store& s = *a.store;
  const int64_t mask = s.tokens_per_block - 1, bytes = s.dim * item_size(a.src.dtype);
  // Heads side by side on both ends are one row.
  const bool dense = s.data.stride_h == bytes && a.src.stride_h == bytes;
  for (int64_t t = begin; t < end; ++t) {
    const int64_t slot = a.slots[t];
    if (slot < 0) continue;
    const int n = static_cast<int>(slot & mask);
    if (dense) {
      copy_row(s.data.at(slot >> s.block_shift, 0, n), a.src.at(t, 0), bytes * s.num_heads, a.bulk);
      continue;
    }
    for (int h = 0; h < s.num_heads; ++h)
      copy_row(s.data.at(slot >> s.block_shift, h, n), a.src.at(t, h), bytes, a.bulk);
  }
}

#if defined(__AVX512BF16__)
template <CodecId codec>
concept EncodesBf16 = requires { typename Codec<codec>::FromBf16; };

// Tokens [begin, end) of a write of bf16 rows, all heads, some rows at a time.
template <CodecId codec>
void write_batches(const WriteArgs& a, int64_t begin, int64_t end) {
  const Store& s = *a.store;
  const int64_t mask = s.tokens_per_block - 1;
  const int64_t places = reinterpret_cast<int64_t>(s.data.base) | s.data.stride_b | s.data.stride_h | s.data.stride_n;
  typename Codec<codec>::FromBf16 encode{s};
  Bf16Batch batch;
  batch.past = a.bulk && places % 64 == 0;
  const int most = Bf16Batch::rows_of(s.dim);
  const auto flush = [&] {
    batch.pad();
    if (batch.rows > 0) encode(batch);
    batch.rows = 0;
  };
  for (int64_t t = begin; t < end; ++t) {
    const int64_t slot = a.slots[t];
    if (slot < 0) continue;
    Place at = place(s, slot >> s.block_shift, 0, static_cast<int>(slot & mask));
    const uint8_t* x = a.src.at(t, 0);
    for (int h = 0; h < s.num_heads; ++h, at = next_head(s, at), x += a.src.stride_h) {
      batch.add(reinterpret_cast<const uint16_t*>(x), at);
      if (batch.rows == most) flush();
    }
  }
  flush();
}
#endif

// Tokens [begin, end) of a write, all heads.
template <CodecId codec>
void write_rows(const WriteArgs& a, int64_t begin, int64_t end) {
  const Store& s = *a.store;
  if (is_copy(a)) return copy_rows(a, begin, end);
#if defined(__AVX512BF16__)
  if constexpr (EncodesBf16<codec>) {
    if (a.src.dtype == DType::bf16 && !s.has_maps() && Codec<codec>::FromBf16::fits(s))
      return write_batches<codec>(a, begin, end);
  }
#endif
  alignas(64) float x[kMaxDim];
  const int64_t mask = s.tokens_per_block - 1;
  for (int64_t t = begin; t < end; ++t) {
    const int64_t slot = a.slots[t];
    if (slot < 0) continue;
    for (int h = 0; h < s.num_heads; ++h) {
      load_row(a.src.at(t, h), a.src.dtype, s.dim, x);
      to_stored(s, h, x);
      Codec<codec>::encode(s, x, place(s, slot >> s.block_shift, h, static_cast<int>(slot & mask)));
    }
  }
}

// Tokens [begin, end) of a read, all heads.
template <CodecId codec>
void read_rows(const ReadArgs& a, int64_t begin, int64_t end) {
  const Store& s = *a.store;
  alignas(64) float x[kMaxDim];
  const int64_t mask = s.tokens_per_block - 1;
  for (int64_t t = begin; t < end; ++t)
    for (int h = 0; h < s.num_heads; ++h) {
      const int64_t slot = a.slots[t];
      if (slot < 0) {
        std::memset(x, 0, sizeof(float) * static_cast<size_t>(s.dim));
      } else {
        Codec<codec>::decode(s, place(s, slot >> s.block_shift, h, static_cast<int>(slot & mask)), x);
        from_stored(s, h, x, s.dim);
      }
      store_row(x, a.out.dtype, s.dim, a.out.at(t, h));
    }
}

// Tokens [n, n + count) of one block as fp32 rows of pitch `ld`: the codec's values, options not undone.
template <CodecId codec>
void decode_run(const Store& s, int64_t b, int h, int n, int count, float* out, int64_t ld) {
  for (int i = 0; i < count; ++i) Codec<codec>::decode(s, place(s, b, h, n + i), out + i * ld);
}

struct CodecFunctions {
  void (*write)(const WriteArgs&, int64_t, int64_t);
  void (*read)(const ReadArgs&, int64_t, int64_t);
  void (*decode_run)(const Store&, int64_t, int, int, int, float*, int64_t);
};

template <CodecId codec>
constexpr CodecFunctions functions_of() {
  return {write_rows<codec>, read_rows<codec>, decode_run<codec>};
}

// In the order of CodecId.
constexpr CodecFunctions kCodecs[] = KVPOOL_CODEC_TABLE;

inline const CodecFunctions& codec_functions(const Store& s) { return kCodecs[static_cast<int>(s.codec)]; }

}  // namespace
}  // namespace kvpool
