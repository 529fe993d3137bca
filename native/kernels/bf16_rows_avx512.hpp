// Tokens as rows of bf16 that hold every code exactly, with one fp32 factor a token beside them: what the bf16
// kernels multiply. 8-bit codes are exact in bf16, and so are products of an E2M1 code and an E4M3 block scale
// (2 + 4 bits of significand).
//
// Included by *_avx512.cpp only.
#pragma once

#include <bit>
#include <type_traits>

#include "kernels/attend.hpp"

namespace kvpool {
namespace {

constexpr int kRowPitch = 64;  // rows are padded with zeros to a multiple of so many elements

// Rows of one tile: pointers to bf16 rows and factors. Absent tokens point to zeros.
struct Bf16Rows {
  const uint16_t* row[kTile];
  alignas(64) float factor[kTile];
  bool has_factor;  // false: all are 1
};

inline __m512i load_codes(const uint8_t* p, int left) {
  return left >= 64 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi8((uint64_t{1} << left) - 1, p);
}

// The bf16 of the 128 non-negative codes of an 8-bit format, as low and high bytes.
struct ByteTable {
  alignas(64) uint8_t low[128], high[128];
};

template <class Element>
constexpr ByteTable make_byte_table() {
  ByteTable t{};
  for (int c = 0; c < 128; ++c) {
    const uint32_t u = std::bit_cast<uint32_t>(Element::value(c)) >> 16;
    t.low[c] = static_cast<uint8_t>(u);
    t.high[c] = static_cast<uint8_t>(u >> 8);
  }
  return t;
}

template <class Element>
constexpr ByteTable kByteTable = make_byte_table<Element>();

// 64 codes at a time: a lookup for each byte of the result, then both joined in order.
template <class Element>
inline void byte_row(const uint8_t* data, int dim, const ByteTable& table, uint16_t* out) {
  const __m512i l0 = _mm512_load_si512(table.low), l1 = _mm512_load_si512(table.low + 64);
  const __m512i h0 = _mm512_load_si512(table.high), h1 = _mm512_load_si512(table.high + 64);
  alignas(64) static constexpr uint8_t join0[64] = {0,  64, 1,  65, 2,  66, 3,  67, 4,  68, 5,  69, 6,  70, 7,  71,
                                                    8,  72, 9,  73, 10, 74, 11, 75, 12, 76, 13, 77, 14, 78, 15, 79,
                                                    16, 80, 17, 81, 18, 82, 19, 83, 20, 84, 21, 85, 22, 86, 23, 87,
                                                    24, 88, 25, 89, 26, 90, 27, 91, 28, 92, 29, 93, 30, 94, 31, 95};
  const __m512i j0 = _mm512_load_si512(join0), j1 = _mm512_add_epi8(j0, _mm512_set1_epi8(32));
  for (int i = 0; i < dim; i += 64) {
    const __m512i c = load_codes(data + i, dim - i);
    const __m512i index = std::is_same_v<Element, Int8> ? _mm512_abs_epi8(c) : c;
    const __m512i low = _mm512_permutex2var_epi8(l0, index, l1);
    // high | (c & 0x80)
    const __m512i high = _mm512_ternarylogic_epi64(_mm512_permutex2var_epi8(h0, index, h1), c,
                                                   _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);
    _mm512_storeu_si512(out + i, _mm512_permutex2var_epi8(low, j0, high));
    _mm512_storeu_si512(out + i + 32, _mm512_permutex2var_epi8(low, j1, high));
  }
}

// E2M1 with block scales in E4M3: 32 codes at a time by a table of the products of two blocks.
inline void nvfp4_row(const uint8_t* data, const uint8_t* block_scale, int dim, uint16_t* out) {
  const __m512 values = _mm512_set_ps(-6, -4, -3, -2, -1.5f, -1, -.5f, -0.0f, 6, 4, 3, 2, 1.5f, 1, .5f, 0);
  const __m512i nibbles = _mm512_set1_epi32(0x000f000f);
  const __m512i second = _mm512_set_epi32(0x100010, 0x100010, 0x100010, 0x100010, 0x100010, 0x100010, 0x100010,
                                          0x100010, 0, 0, 0, 0, 0, 0, 0, 0);
  alignas(64) float scales[kMaxDim / 16 + 16];
  const int blocks = dim / 16;
  for (int i = 0; i < blocks; i += 16) {
    const __m512i c = _mm512_cvtepu8_epi32(
        _mm_maskz_loadu_epi8(blocks - i >= 16 ? 0xffff : (1u << (blocks - i)) - 1, block_scale + i));
    // E4M3 by fp32: subnormals are multiples of 2^-9; block scales have no sign.
    const __m512 normal = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(c, 20), _mm512_set1_epi32(120 << 23)));
    const __m512 small = _mm512_mul_ps(_mm512_cvtepi32_ps(c), _mm512_set1_ps(0x1p-9f));
    __m512 s = _mm512_mask_mov_ps(normal, _mm512_cmplt_epi32_mask(c, _mm512_set1_epi32(8)), small);
    s = _mm512_mask_mov_ps(s, _mm512_cmpeq_epi32_mask(c, _mm512_set1_epi32(0x7f)),
                           _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
    _mm512_store_ps(scales + i, s);
  }
  for (int i = 0; i < dim; i += 32) {
    const int left = dim - i;
    const __m128i bytes = left >= 32 ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(data + i / 2))
                                     : _mm_loadl_epi64(reinterpret_cast<const __m128i*>(data + i / 2));
    const __m512i x = _mm512_cvtepu8_epi32(bytes);
    const __m512i codes = _mm512_and_si512(_mm512_or_si512(x, _mm512_slli_epi32(x, 12)), nibbles);
    const __m512 a = _mm512_mul_ps(values, _mm512_set1_ps(scales[i / 16]));
    const __m512 b = _mm512_mul_ps(values, _mm512_set1_ps(left >= 32 ? scales[i / 16 + 1] : 0.0f));
    // Exact: the low halves of the products are zero.
    const __m512i table =
        _mm512_permutex2var_epi16(_mm512_castps_si512(a),
                                  _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31,
                                                   29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1),
                                  _mm512_castps_si512(b));
    _mm512_storeu_si512(out + i, _mm512_permutexvar_epi16(_mm512_or_si512(codes, second), table));
  }
  for (int i = round_up(dim, 32); i < round_up(dim, kRowPitch); ++i) out[i] = 0;
}

// Stored fp32 and fp16 values are rounded; bf16 rows that need padding are copied.
inline void plain_row(const uint8_t* data, DType type, int dim, uint16_t* out) {
  const int padded = round_up(dim, kRowPitch);
  if (type == DType::bf16) {
    std::memcpy(out, data, 2 * static_cast<size_t>(dim));
  } else {
    alignas(64) float x[kMaxDim];
    load_row(data, type, dim, x);
    for (int i = 0; i < dim; ++i) out[i] = f32_to_bf16(x[i]);
  }
  for (int i = dim; i < padded; ++i) out[i] = 0;
}

// True when the formats of a store can stand as bf16 rows with one factor a token.
inline bool has_bf16_rows(const Store& s) {
  switch (s.codec) {
    case CodecId::bf16:
    case CodecId::fp8_tensor:
    case CodecId::fp8e5m2_tensor:
    case CodecId::int8_tensor:
    case CodecId::nvfp4:
      return true;
    case CodecId::fp8:
    case CodecId::int8:
    case CodecId::index_fp8:
      return s.num_segments == 1;
    case CodecId::nvfp4_token:
      return true;
    default:
      return false;
  }
}

// One format's rows: `row` decodes one vector, `factor` is what all its elements are multiplied by.
template <CodecId>
struct RowsOf;

template <class Element>
struct ByteRows {
  static void row(const Store& s, const Place& at, uint16_t* out) {
    byte_row<Element>(at.data, s.dim, kByteTable<Element>, out);
  }
};

struct Nvfp4Rows {
  static void row(const Store& s, const Place& at, uint16_t* out) { nvfp4_row(at.data, at.block_scale, s.dim, out); }
};

struct ScaleFactor {
  static float factor(const Store&, const Place& at) { return *at.scale; }
};

struct ConstantFactor {
  static float factor(const Store& s, const Place&) { return s.constant_scale; }
};

template <>
struct RowsOf<CodecId::bf16> {
  static void row(const Store& s, const Place& at, uint16_t* out) { plain_row(at.data, DType::bf16, s.dim, out); }
  static float factor(const Store&, const Place&) { return 1.0f; }
};
template <>
struct RowsOf<CodecId::fp8> : ByteRows<E4m3>, ScaleFactor {};
template <>
struct RowsOf<CodecId::int8> : ByteRows<Int8>, ScaleFactor {};
template <>
struct RowsOf<CodecId::fp8_tensor> : ByteRows<E4m3>, ConstantFactor {};
template <>
struct RowsOf<CodecId::fp8e5m2_tensor> : ByteRows<E5m2>, ConstantFactor {};
template <>
struct RowsOf<CodecId::int8_tensor> : ByteRows<Int8>, ConstantFactor {};
template <>
struct RowsOf<CodecId::nvfp4> : Nvfp4Rows, ConstantFactor {};
template <>
struct RowsOf<CodecId::nvfp4_token> : Nvfp4Rows, ScaleFactor {};

template <CodecId codec>
inline void fill_rows(const Store& s, const Tile& tile, int head, uint16_t* memory, int pitch, Bf16Rows& rows) {
  for (int j = 0; j < tile.num_runs; ++j) {
    const Run& run = tile.runs[j];
    Place at = place(s, run.block, head, run.offset);
    for (int t = run.at; t < run.at + run.count; ++t) {
      uint16_t* out = memory + int64_t{t} * pitch;
      RowsOf<codec>::row(s, at, out);
      rows.row[t] = out;
      rows.factor[t] = RowsOf<codec>::factor(s, at);
      at.data += s.data.stride_n;
      at.scale = reinterpret_cast<float*>(reinterpret_cast<uint8_t*>(at.scale) + s.scale.stride_n);
      at.block_scale += s.block_scale.stride_n;
    }
  }
}

// Rows of bf16 that lie in the pool as they are needed.
inline void direct_rows(const Store& s, const Tile& tile, int head, Bf16Rows& rows) {
  for (int j = 0; j < tile.num_runs; ++j) {
    const Run& run = tile.runs[j];
    const uint8_t* data = s.data.at(run.block, head, run.offset);
    for (int t = run.at; t < run.at + run.count; ++t, data += s.data.stride_n)
      rows.row[t] = reinterpret_cast<const uint16_t*>(data);
  }
}

// Fills the rows of the present tokens of a tile; `memory` has 64 rows of `pitch` elements.
inline void bf16_rows(const Store& s, const Tile& tile, int head, uint16_t* memory, int pitch, Bf16Rows& rows) {
  alignas(64) static constexpr uint16_t zeros[2 * kMaxDim] = {};
  if (tile.present != ~uint64_t{0})
    for (int t = 0; t < kTile; ++t) {
      rows.row[t] = zeros;
      rows.factor[t] = 0;
    }
  rows.has_factor = s.codec != CodecId::bf16;
  switch (s.codec) {
    case CodecId::bf16:
      if (s.dim % kRowPitch == 0) return direct_rows(s, tile, head, rows);
      return fill_rows<CodecId::bf16>(s, tile, head, memory, pitch, rows);
    case CodecId::fp8:
    case CodecId::index_fp8:
      return fill_rows<CodecId::fp8>(s, tile, head, memory, pitch, rows);
    case CodecId::int8:
      return fill_rows<CodecId::int8>(s, tile, head, memory, pitch, rows);
    case CodecId::fp8_tensor:
      return fill_rows<CodecId::fp8_tensor>(s, tile, head, memory, pitch, rows);
    case CodecId::fp8e5m2_tensor:
      return fill_rows<CodecId::fp8e5m2_tensor>(s, tile, head, memory, pitch, rows);
    case CodecId::int8_tensor:
      return fill_rows<CodecId::int8_tensor>(s, tile, head, memory, pitch, rows);
    case CodecId::nvfp4:
      return fill_rows<CodecId::nvfp4>(s, tile, head, memory, pitch, rows);
    case CodecId::nvfp4_token:
      return fill_rows<CodecId::nvfp4_token>(s, tile, head, memory, pitch, rows);
    default:
      return;  // has_bf16_rows refused it
  }
}

}  // namespace
}  // namespace kvpool
