// Scores and sums of a few query rows straight from stored codes: each code is widened to bf16 in registers, once for
// all rows that share it, and meets the row by vdpbf16ps. Elements come out of the lookups in an order of their own:
// queries are put into it once an item, sums are put back once a tile.
//
// Included by *_avx512.cpp only.
#pragma once

#include "kernels/bf16_rows_avx512.hpp"

namespace kvpool {
namespace {

constexpr int kFewRows = 8;  // most rows that these functions take

// Where the vectors of a tile lie; absent tokens are zeros. An element is code * block scale * factor.
struct CodeRows {
  const uint8_t* data[kTile];
  const uint8_t* block_scale[kTile];
  alignas(64) float factor[kTile];
  bool has_factor;  // false: all are 1
};

// What a row gives each token, [rows][64]: in bf16, or in fp32 where the kernel asks for it.
struct Probabilities {
  const uint16_t* narrow;
  const float* wide;
};

// Memory to fetch while other work goes on, some lines at a time, in the order it is given.
struct Stream {
  static constexpr int kPieces = 16 * kTile;
  const uint8_t *begin[kPieces], *end[kPieces];
  int num_pieces = 0, piece = 0, num_lines = 0;
  const uint8_t* at = nullptr;

  void clear() {
    num_pieces = piece = num_lines = 0;
    at = nullptr;
  }

  void add(const uint8_t* p, int64_t bytes) {
    if (num_pieces == kPieces) return;
    const auto first = reinterpret_cast<uintptr_t>(p) & ~uintptr_t{63};
    begin[num_pieces] = reinterpret_cast<const uint8_t*>(first);
    end[num_pieces] = p + bytes;
    num_lines += static_cast<int>((p + bytes - begin[num_pieces] + 63) / 64);
    if (num_pieces++ == 0) at = begin[0];
  }

  // Lines of one of `parts`.
  int share(int parts) const { return (num_lines + parts - 1) / parts; }

  void fetch(int lines) {
    while (lines > 0 && piece < num_pieces) {
      const uint8_t* p = at;
      const auto left = static_cast<int>((end[piece] - p + 63) / 64), n = lines < left ? lines : left;
      for (int i = 0; i < n; ++i) _mm_prefetch(reinterpret_cast<const char*>(p + 64 * i), _MM_HINT_T1);
      lines -= n;
      at = p + 64 * n;
      if (n == left && ++piece < num_pieces) at = begin[piece];
    }
  }
};

inline __m512 dot(__m512 acc, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

inline __m512i load_part(const uint8_t* p, int bytes) {
  return bytes >= 64 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi8(bytes > 0 ? (uint64_t{1} << bytes) - 1 : 0, p);
}

// 32 bytes at `x` and 32 at `y`, those from `bytes` on zero.
inline __m512i load_halves(const uint8_t* x, const uint8_t* y, int bytes) {
  const auto part = [bytes](const uint8_t* p) {
    return bytes >= 32 ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))
                       : _mm256_maskz_loadu_epi8((uint32_t{1} << bytes) - 1, p);
  };
  return _mm512_inserti64x4(_mm512_castsi256_si512(part(x)), part(y), 1);
}

// A format is a class with
//   kDims: elements in 32 bytes; kVectors: vectors they become beside those of another token
//   element(i): which of the kDims elements of a token stands at place i of its halves, vector after vector
//   keys(x, y, bytes, w): 32 bytes of two tokens, one a half; from `bytes` on they are zero
//   bytes(d): where element d stands
//   pair(x, y, left, w): the vectors of 64 elements of two tokens, pairs side by side; ordered(w) puts sums in order

// bf16 as it is.
struct PlainCodes {
  static constexpr int kDims = 16, kVectors = 1;
  static constexpr int element(int i) { return i; }
  static constexpr int bytes(int d) { return 2 * d; }

  void keys(const uint8_t* x, const uint8_t* y, int bytes, __m512i (&w)[1]) const { w[0] = load_halves(x, y, bytes); }

  void pair(const uint8_t* x, const uint8_t* y, int left, __m512i (&w)[4]) const {
    for (int i = 0; i < 2; ++i) {
      const __m512i a = load_part(x + 64 * i, 2 * left - 64 * i), b = load_part(y + 64 * i, 2 * left - 64 * i);
      w[2 * i] = _mm512_unpacklo_epi16(a, b);
      w[2 * i + 1] = _mm512_unpackhi_epi16(a, b);
    }
  }

  static void ordered(__m512 (&s)[4]) {
    const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i second = _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8);
    for (int i = 0; i < 4; i += 2) {
      const __m512 x = s[i], y = s[i + 1];
      s[i] = _mm512_permutex2var_ps(x, first, y);
      s[i + 1] = _mm512_permutex2var_ps(x, second, y);
    }
  }
};

// 8-bit codes by a lookup for each byte of their bf16.
template <bool is_int8>
struct ByteCodes {
  static constexpr int kDims = 32, kVectors = 2;
  __m512i l0, l1, h0, h1;

  explicit ByteCodes(const ByteTable& table)
      : l0(_mm512_load_si512(table.low)),
        l1(_mm512_load_si512(table.low + 64)),
        h0(_mm512_load_si512(table.high)),
        h1(_mm512_load_si512(table.high + 64)) {}

  static constexpr int element(int i) { return i % 16 / 8 * 16 + i / 16 * 8 + i % 8; }
  static constexpr int bytes(int d) { return d; }

  // 64 codes; those at 16 k + [0, 8) in the first vector.
  void widen(__m512i c, __m512i& first, __m512i& second) const {
    const __m512i index = is_int8 ? _mm512_abs_epi8(c) : c;
    const __m512i low = _mm512_permutex2var_epi8(l0, index, l1);
    // high | (c & 0x80)
    const __m512i high = _mm512_ternarylogic_epi64(_mm512_permutex2var_epi8(h0, index, h1), c,
                                                   _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);
    first = _mm512_unpacklo_epi8(low, high);
    second = _mm512_unpackhi_epi8(low, high);
  }

  void keys(const uint8_t* x, const uint8_t* y, int bytes, __m512i (&w)[2]) const {
    widen(load_halves(x, y, bytes), w[0], w[1]);
  }

  void pair(const uint8_t* x, const uint8_t* y, int left, __m512i (&w)[4]) const {
    const __m512i a = load_part(x, left), b = load_part(y, left);
    widen(_mm512_unpacklo_epi8(a, b), w[0], w[1]);
    widen(_mm512_unpackhi_epi8(a, b), w[2], w[3]);
  }

  // Lane i of vector j holds elements 16 i + 4 j.
  static void ordered(__m512 (&s)[4]) {
    const __m512 a = _mm512_shuffle_f32x4(s[0], s[1], 0x44), b = _mm512_shuffle_f32x4(s[0], s[1], 0xee);
    const __m512 c = _mm512_shuffle_f32x4(s[2], s[3], 0x44), d = _mm512_shuffle_f32x4(s[2], s[3], 0xee);
    s[0] = _mm512_shuffle_f32x4(a, c, 0x88);
    s[1] = _mm512_shuffle_f32x4(a, c, 0xdd);
    s[2] = _mm512_shuffle_f32x4(b, d, 0x88);
    s[3] = _mm512_shuffle_f32x4(b, d, 0xdd);
  }
};

constexpr int padded_rows(int rows) { return rows <= 2 ? rows : rows <= 4 ? 4 : 8; }

// One piece of the keys for U pairs of tokens (x[u], y[u]) and R rows.
template <class Codes, int R, int T, int U>
KVPOOL_INLINE void score_piece(const Codes& codes, const uint8_t* const* x, const uint8_t* const* y, int at, int bytes,
                               const uint16_t* q, __m512* acc) {
  __m512i w[U][Codes::kVectors];
  for (int u = 0; u < U; ++u) codes.keys(x[u] + at, y[u] + at, bytes, w[u]);
  for (int n = 0; n < Codes::kVectors; ++n)
    for (int r = 0; r < R; ++r) {
      const __m512i qr = _mm512_load_si512(q + (r * Codes::kVectors + n) * 32);
      for (int u = 0; u < U; ++u) acc[r * T + u] = dot(acc[r * T + u], w[u][n], qr);
    }
}

// Sums of the halves of 16 vectors, P rows of 16 / P pairs of tokens, to s[row][token].
template <int P, int R>
KVPOOL_INLINE void half_sums(const __m512 (&a)[16], float* s) {
  constexpr int T = 16 / P, n = T < 4 ? T : 4;
  __m512 d[2];
  eighths(a, d);  // four first halves, four second halves, and again
  if constexpr (P == 4) {
    for (int r = 0; r < R; ++r)
      _mm256_storeu_ps(s + r * kTile,
                       r % 2 == 0 ? _mm512_castps512_ps256(d[r / 2]) : _mm512_extractf32x8_ps(d[r / 2], 1));
  } else {
    alignas(64) float out[32];
    for (int i = 0; i < 2; ++i) _mm512_store_ps(out + 16 * i, d[i]);
    for (int i = 0; i / T < R; i += n) {
      const float* from = out + i / 4 * 8 + i % 4;
      std::memcpy(s + i / T * kTile + i % T, from, n * sizeof(float));
      std::memcpy(s + i / T * kTile + T + i % T, from + 4, n * sizeof(float));
    }
  }
}

// s[r][t] = q[r] . k[t] for tokens [0, tokens). Queries: [piece][R][kVectors][twice 16], in the format's order.
template <class Codes, int R>
inline void scores_of(const Codes& codes, const uint16_t* q, const CodeRows& k, int tokens, int dim, float* s,
                      Stream& ahead, int lines) {
  constexpr int P = padded_rows(R), T = 16 / P, U = 2;
  const int row = Codes::bytes(dim);
  for (int t = 0; t < tokens; t += 2 * T) {
    ahead.fetch(lines * 2 * T);
    __m512 acc[16];
    for (__m512& a : acc) a = _mm512_setzero_ps();
    const uint8_t *const *x = k.data + t, *const *y = x + T;
    const uint16_t* piece = q;
    int at = 0;
    for (; at + 32 <= row; at += 32, piece += R * Codes::kVectors * 32)
#pragma GCC unroll 16
      for (int j = 0; j < T; j += U) score_piece<Codes, R, T, U>(codes, x + j, y + j, at, 32, piece, acc + j);
    if (at < row)
#pragma GCC unroll 16
      for (int j = 0; j < T; j += U) score_piece<Codes, R, T, U>(codes, x + j, y + j, at, row - at, piece, acc + j);
    half_sums<P, R>(acc, s + t);
  }
}

// o[r] += sum over tokens of p[r][t] * v[t]; `p` in bf16, columns in multiples of 64.
template <class Codes, int R>
inline void values_of(const Codes& codes, const uint16_t* p, const CodeRows& v, int tokens, int dim, float* o,
                      int64_t pitch, int rows, Stream& ahead, int lines) {
  constexpr int N = R <= 4 ? 4 : 2;  // vectors of sums that fit beside the tables
  for (int d = 0; d < dim; d += 64) {
    __m512 total[R][4];
    const int left = dim - d;
    const auto half = [&](auto first) {
      __m512 acc[R][N];
      for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) acc[r][n] = _mm512_setzero_ps();
      const auto sum = [&](int bytes_left) {
        for (int t = 0; t < tokens; t += 2) {
          if (t % 16 == 0) ahead.fetch(lines);
          __m512i w[4];
          codes.pair(v.data[t] + Codes::bytes(d), v.data[t + 1] + Codes::bytes(d), bytes_left, w);
          for (int r = 0; r < R; ++r) {
            int32_t both;
            std::memcpy(&both, p + r * kTile + t, 4);
            const __m512i pr = _mm512_set1_epi32(both);
            for (int n = 0; n < N; ++n) acc[r][n] = dot(acc[r][n], w[first + n], pr);
          }
        }
      };
      if (left >= 64) {
        sum(64);
      } else {
        sum(left);
      }
      for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) total[r][first + n] = acc[r][n];
    };
    half(std::integral_constant<int, 0>{});
    if constexpr (N == 2) half(std::integral_constant<int, 2>{});
    for (int r = 0; r < rows; ++r) {
      Codes::ordered(total[r]);
      float* to = o + r * pitch + d;
      for (int n = 0; n < 4; ++n)
        _mm512_storeu_ps(to + 16 * n, _mm512_add_ps(_mm512_loadu_ps(to + 16 * n), total[r][n]));
    }
  }
}

// Places and factors of the tokens of a tile.
inline void code_rows(const Store& s, const Tile& tile, int head, CodeRows& rows) {
  alignas(64) static constexpr uint8_t zeros[4 * kMaxDim] = {};
  if (tile.present != ~uint64_t{0})
    for (int t = 0; t < kTile; ++t) {
      rows.data[t] = rows.block_scale[t] = zeros;
      rows.factor[t] = 0;
    }
  rows.has_factor = s.codec != CodecId::bf16;
  for (int j = 0; j < tile.num_runs; ++j) {
    const Run& run = tile.runs[j];
    const uint8_t* data = s.data.at(run.block, head, run.offset);
    for (int i = 0; i < run.count; ++i) rows.data[run.at + i] = data + i * s.data.stride_n;
    if (s.block_scale.base != nullptr) {
      const uint8_t* scale = s.block_scale.at(run.block, head, run.offset);
      for (int i = 0; i < run.count; ++i) rows.block_scale[run.at + i] = scale + i * s.block_scale.stride_n;
    }
    if (s.scale.base == nullptr) {
      for (int i = 0; i < run.count; ++i) rows.factor[run.at + i] = s.constant_scale;
    } else if (s.scale.stride_n == sizeof(float)) {
      std::memcpy(rows.factor + run.at, s.scale.at(run.block, head, run.offset),
                  sizeof(float) * static_cast<size_t>(run.count));
    } else {
      for (int i = 0; i < run.count; ++i)
        rows.factor[run.at + i] = *reinterpret_cast<const float*>(s.scale.at(run.block, head, run.offset + i));
    }
  }
}

// Bytes of one vector's data.
inline int64_t row_bytes(const Store& s) {
  switch (s.codec) {
    case CodecId::bf16:
      return 2 * s.dim;
    case CodecId::nvfp4:
    case CodecId::nvfp4_token:
      return s.dim / 2;
    default:
      return s.dim;
  }
}

// What the tokens of a tile occupy in one plane, for `heads` heads; `bytes` of each vector.
inline void add_plane(const Plane& p, const Tile& tile, int head, int heads, int64_t bytes, Stream& ahead) {
  if (p.base == nullptr || bytes == 0) return;
  const bool heads_inside = heads > 1 && p.stride_h < p.stride_n;
  const int64_t row = heads_inside ? (heads - 1) * p.stride_h + bytes : bytes;
  for (int h = 0; h < (heads_inside ? 1 : heads); ++h)
    for (int j = 0; j < tile.num_runs; ++j) {
      const Run& run = tile.runs[j];
      const uint8_t* from = p.at(run.block, head + h, run.offset);
      if (row == p.stride_n) {
        ahead.add(from, row * run.count);
      } else {
        for (int i = 0; i < run.count; ++i) ahead.add(from + i * p.stride_n, row);
      }
    }
}

}  // namespace
}  // namespace kvpool
