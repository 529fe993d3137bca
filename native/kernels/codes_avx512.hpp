// Scores and sums of a few query rows straight from stored codes: each code is widened to bf16 in registers, once for
// all rows that share it, and meets the row by vdpbf16ps. Elements come out of the lookups in an order of their own:
// queries are put into it once an item, sums are put back once a tile.
//
// Included by *_avx512.cpp only.
#pragma once

#include "kernels/bf16_rows_avx512.hpp"
#include "kernels/special.hpp"
#include "kernels/stream_avx512.hpp"

namespace kvpool {
namespace {

// Where the vectors of a tile lie; absent tokens are zeros. An element is code * block scale * the token's factor.
struct CodeRows {
  const uint8_t* data[kTile];
  const uint8_t* block_scale[kTile];
};

// What queries and probabilities are; `bytes` are whole numbers in two of them, see nvfp4.
enum class Form { bf16, fp32, int16, bytes };

// What a row gives each token, [rows][64]: in the form the kernel of the values asks for.
struct Probabilities {
  const uint16_t* narrow;  // bf16, or int16 in units of `unit[row]`
  const float *wide, *unit;
  const uint64_t* seen;  // tokens that rows [group i, group (i + 1)) see
  int group;
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

// Sums of products of pairs of bf16.
struct Bf16Products {
  using Sum = __m512;
  static constexpr Form kForm = Form::bf16;
  static Sum none() { return _mm512_setzero_ps(); }
  static Sum add(Sum sum, __m512i a, __m512i b) { return dot(sum, a, b); }
  static __m512 floats(Sum sum) { return sum; }
};

// Sums of products of pairs of int16: exact, as no lane sums more than 512 products of 2^7 and 2^15 - 1 (half of the
// longest key), which stay below 2^31.
struct Int16Products {
  using Sum = __m512i;
  static constexpr Form kForm = Form::int16;
  static Sum none() { return _mm512_setzero_si512(); }
  static Sum add(Sum sum, __m512i a, __m512i b) { return _mm512_dpwssd_epi32(sum, a, b); }
  static __m512 floats(Sum sum) { return _mm512_cvtepi32_ps(sum); }
};

// A format is a class with one of them and
//   kWords: vectors that 64 bytes of a token become by words(codes, w)
//   word_element(i): which of their elements stands at place i, vector after vector
//   kRowsInOrder: up to so many rows read tokens one after another
//   kRowsByTokens: from so many on they take a token a lane, of dwords(codes, w): even codes, odd ones
//   bytes(d): where element d stands
//   pair(x, y, left, w): the vectors of 64 elements of two tokens, pairs side by side
//   ordered(x, y): puts sums of the first two or the last two of them in order: elements of one half in a row, or,
//   where kInLanes, elements 16 i + 4 j and the three behind them in lane i of vector j

// bf16 as it is.
struct PlainCodes : Bf16Products {
  static constexpr int kRowsInOrder = 0, kRowsByTokens = kFewRows + 1;
  static constexpr bool kInLanes = false;
  static constexpr int word_element(int i) { return i; }
  static constexpr int bytes(int d) { return 2 * d; }

  void pair(const uint8_t* x, const uint8_t* y, int left, __m512i (&w)[4]) const {
    for (int i = 0; i < 2; ++i) {
      const __m512i a = load_part(x + 64 * i, 2 * left - 64 * i), b = load_part(y + 64 * i, 2 * left - 64 * i);
      w[2 * i] = _mm512_unpacklo_epi16(a, b);
      w[2 * i + 1] = _mm512_unpackhi_epi16(a, b);
    }
  }

  static void ordered(__m512& x, __m512& y) {
    const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i second = _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8);
    const __m512 low = x;
    x = _mm512_permutex2var_ps(low, first, y);
    y = _mm512_permutex2var_ps(low, second, y);
  }
};

// fp8 by a lookup for each byte of its bf16.
struct Fp8Codes : Bf16Products {
  static constexpr int kWords = 2, kRowsInOrder = 1, kRowsByTokens = 5;
  static constexpr int kDims = 32;  // elements in 32 bytes
  static constexpr bool kInLanes = true;
  __m512i l0, l1, h0, h1;

  explicit Fp8Codes(const ByteTable& table)
      : l0(_mm512_load_si512(table.low)),
        l1(_mm512_load_si512(table.low + 64)),
        h0(_mm512_load_si512(table.high)),
        h1(_mm512_load_si512(table.high + 64)) {}

  // Which of the 32 elements of a token stands at place i of its halves, vector after vector.
  static constexpr int half_element(int i) { return i % 16 / 8 * 16 + i / 16 * 8 + i % 8; }
  static constexpr int word_element(int i) { return i % 32 / 8 * 16 + i / 32 * 8 + i % 8; }
  static constexpr int bytes(int d) { return d; }

  // The bytes of the codes' bf16.
  void bytes(__m512i c, __m512i& low, __m512i& high) const {
    low = _mm512_permutex2var_epi8(l0, c, l1);
    // high | (c & 0x80)
    high = _mm512_ternarylogic_epi64(_mm512_permutex2var_epi8(h0, c, h1), c, _mm512_set1_epi8(static_cast<char>(0x80)),
                                     0xf8);
  }

  // Codes at 16 k + [0, 8) in the first vector.
  void words(__m512i c, __m512i (&w)[2]) const {
    __m512i low, high;
    bytes(c, low, high);
    w[0] = _mm512_unpacklo_epi8(low, high);
    w[1] = _mm512_unpackhi_epi8(low, high);
  }

  // Even codes, odd ones: they stay in their dwords.
  void dwords(__m512i c, __m512i (&w)[2]) const {
    __m512i low, high;
    bytes(c, low, high);
    const __m512i mask = _mm512_set1_epi16(255);  // mask ? first : second
    w[0] = _mm512_ternarylogic_epi64(mask, low, _mm512_slli_epi16(high, 8), 0xca);
    w[1] = _mm512_ternarylogic_epi64(mask, _mm512_srli_epi16(low, 8), high, 0xca);
  }

  void pair(const uint8_t* x, const uint8_t* y, int left, __m512i (&w)[4]) const {
    const __m512i a = load_part(x, left), b = load_part(y, left);
    __m512i low[2], high[2];
    words(_mm512_unpacklo_epi8(a, b), low);
    words(_mm512_unpackhi_epi8(a, b), high);
    for (int i = 0; i < 2; ++i) {
      w[i] = low[i];
      w[2 + i] = high[i];
    }
  }

  static void ordered(__m512&, __m512&) {}
};

// int8 as int16, by shifts: those never wait for a unit that multiplies. Queries and probabilities are int16 too.
struct Int8Codes : Int16Products {
  static constexpr int kWords = 2, kRowsInOrder = 1, kRowsByTokens = 3;
  static constexpr int kDims = 32;
  static constexpr bool kInLanes = true;

  static constexpr int half_element(int i) { return i % 16 * 2 + i / 16; }
  static constexpr int word_element(int i) { return i % 32 * 2 + i / 32; }
  static constexpr int bytes(int d) { return d; }

  // Even elements, odd ones.
  void words(__m512i c, __m512i (&w)[2]) const {
    w[0] = _mm512_srai_epi16(_mm512_slli_epi16(c, 8), 8);
    w[1] = _mm512_srai_epi16(c, 8);
  }

  void dwords(__m512i c, __m512i (&w)[2]) const { words(c, w); }

  void pair(const uint8_t* x, const uint8_t* y, int left, __m512i (&w)[4]) const {
    __m512i a[2], b[2];
    words(load_part(x, left), a);
    words(load_part(y, left), b);
    for (int i = 0; i < 2; ++i) {
      w[i] = _mm512_unpacklo_epi16(a[i], b[i]);
      w[2 + i] = _mm512_unpackhi_epi16(a[i], b[i]);
    }
  }

  static void ordered(__m512& x, __m512& y) {
    const __m512 even = x;
    x = _mm512_unpacklo_ps(even, y);
    y = _mm512_unpackhi_ps(even, y);
  }
};

constexpr int padded_rows(int rows) { return rows <= 2 ? rows : rows <= 4 ? 4 : 8; }

// 32 bytes of the keys for U pairs of tokens (x[u], y[u]) and R rows.
template <class Codes, int R, int T, int U>
KVPOOL_INLINE void score_piece(const Codes& codes, const uint8_t* const* x, const uint8_t* const* y, int at, int bytes,
                               const uint16_t* q, typename Codes::Sum* acc) {
  constexpr int n = Codes::kWords;
  __m512i w[U][n];
  for (int u = 0; u < U; ++u) codes.words(load_halves(x[u] + at, y[u] + at, bytes), w[u]);
  for (int i = 0; i < n; ++i)
    for (int r = 0; r < R; ++r) {
      const __m512i qr = _mm512_load_si512(q + (r * n + i) * 32);
      for (int u = 0; u < U; ++u) acc[r * T + u] = Codes::add(acc[r * T + u], w[u][i], qr);
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

// s[r][t] = q[r] . k[t] for tokens [0, tokens), where one row of bytes waits for memory: tokens are read from begin to
// end, one after another, and each has a vector of its own to sum. Queries: [64 bytes][R][kWords][32].
template <class Codes, int R>
inline void scores_in_order(const Codes& codes, const uint16_t* q, const CodeRows& k, int tokens, int dim, float* s,
                            Stream& ahead) {
  constexpr int n = Codes::kWords;
  const int row = Codes::bytes(dim);
  for (int t = 0; t < tokens; t += 16) {
    __m512 total[R][16];
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j) {
      ahead.pass(dim);
      typename Codes::Sum acc[R];
      for (auto& sum : acc) sum = Codes::none();
      const uint16_t* piece = q;
      for (int at = 0; at < row; at += 64) {
        __m512i w[n];
        codes.words(load_part(k.data[t + j] + at, row - at), w);
        for (int r = 0; r < R; ++r)
          for (int i = 0; i < n; ++i, piece += 32) acc[r] = Codes::add(acc[r], w[i], _mm512_load_si512(piece));
      }
      for (int r = 0; r < R; ++r) total[r][j] = Codes::floats(acc[r]);
    }
    for (int r = 0; r < R; ++r) _mm512_storeu_ps(s + r * kTile + t, sums(total[r]));
  }
}

// The same for bf16: a vector holds eight elements of two rows and the keys come from memory as often as
// they are needed, so that few lanes are left to sum. Queries: [8 elements][row][8].
template <int R>
inline void scores_by_pairs(const uint16_t* q, const CodeRows& k, int tokens, int dim, float* s, Stream& ahead) {
  constexpr int pairs = (R + 1) / 2, T = pairs <= 2 ? 8 : 4;
  for (int t = 0; t < tokens; t += T) {
    __m256 acc[pairs][T];
    for (auto& row : acc)
      for (__m256& a : row) a = _mm256_setzero_ps();
    const uint16_t* piece = q;
    const auto step = [&](auto load) __attribute__((always_inline)) {
      __m256i qr[pairs];
      for (int r = 0; r < pairs; ++r) qr[r] = _mm256_load_si256(reinterpret_cast<const __m256i*>(piece + 16 * r));
#pragma GCC unroll 8
      for (int j = 0; j < T; ++j) {
        const __m256i x = _mm256_broadcastsi128_si256(load(k.data[t + j]));
        for (int r = 0; r < pairs; ++r)
          acc[r][j] = _mm256_dpbf16_ps(acc[r][j], reinterpret_cast<__m256bh>(x), reinterpret_cast<__m256bh>(qr[r]));
      }
      if (pairs <= 2 || (piece - q) / (16 * pairs) % 2 == 0) ahead.pass(pairs <= 2 ? 8 * T : 16 * T);
      piece += 16 * pairs;
    };
    int d = 0;
    for (; d + 8 <= dim; d += 8)
      step([d](const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 2 * d)); });
    if (d < dim)
      step([d, dim](const uint8_t* p) {
        return _mm_maskz_loadu_epi16(static_cast<__mmask8>((1 << (dim - d)) - 1), p + 2 * d);
      });
    for (int r = 0; r < pairs; ++r)
      for (int j = 0; j < T; j += 4) {
        const __m256* a = acc[r] + j;
        const __m256d x =
            _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(a[0], a[1]), _mm256_unpackhi_ps(a[0], a[1])));
        const __m256d y =
            _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(a[2], a[3]), _mm256_unpackhi_ps(a[2], a[3])));
        const __m256 z =
            _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)), _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
        _mm_storeu_ps(s + 2 * r * kTile + t + j, _mm256_castps256_ps128(z));
        if (2 * r + 1 < R) _mm_storeu_ps(s + (2 * r + 1) * kTile + t + j, _mm256_extractf128_ps(z, 1));
      }
  }
}

// The same for codes that are widened in registers, two tokens side by side. Queries: [32 bytes][R][kWords][twice 16].
template <class Codes, int R>
inline void scores_by_halves(const Codes& codes, const uint16_t* q, const CodeRows& k, int tokens, int dim, float* s,
                             Stream& ahead) {
  constexpr int P = padded_rows(R), T = 16 / P, U = 2;
  const int row = Codes::bytes(dim);
  for (int t = 0; t < tokens; t += 2 * T) {
    typename Codes::Sum acc[16];
    for (auto& sum : acc) sum = Codes::none();
    const uint8_t *const *x = k.data + t, *const *y = x + T;
    const uint16_t* piece = q;
    for (int at = 0; at < row; at += 32, piece += R * Codes::kWords * 32) {
      ahead.pass(2 * T * 32);
      if (row - at >= 32) {
#pragma GCC unroll 16
        for (int j = 0; j < T; j += U) score_piece<Codes, R, T, U>(codes, x + j, y + j, at, 32, piece, acc + j);
      } else {
#pragma GCC unroll 16
        for (int j = 0; j < T; j += U) score_piece<Codes, R, T, U>(codes, x + j, y + j, at, row - at, piece, acc + j);
      }
    }
    __m512 total[16];
    for (int i = 0; i < 16; ++i) total[i] = Codes::floats(acc[i]);
    half_sums<P, R>(total, s + t);
  }
}

// o[0..16) += x, in units of `unit`.
template <class Codes>
KVPOOL_INLINE void add_sums(__m512 x, float unit, float* o) {
  const __m512 sum = _mm512_loadu_ps(o);
  _mm512_storeu_ps(o, Codes::kForm == Form::int16 ? _mm512_fmadd_ps(x, splat(unit), sum) : _mm512_add_ps(sum, x));
}

// The sums of all 64 elements of `pair`, or of half of them, to the outputs.
template <class Codes>
KVPOOL_INLINE void add_pair_sums(__m512 (&s)[4], float unit, float* o) {
  Codes::ordered(s[0], s[1]);
  Codes::ordered(s[2], s[3]);
  if constexpr (Codes::kInLanes) {
    const __m512 a = _mm512_shuffle_f32x4(s[0], s[1], 0x44), b = _mm512_shuffle_f32x4(s[0], s[1], 0xee);
    const __m512 c = _mm512_shuffle_f32x4(s[2], s[3], 0x44), d = _mm512_shuffle_f32x4(s[2], s[3], 0xee);
    s[0] = _mm512_shuffle_f32x4(a, c, 0x88);
    s[1] = _mm512_shuffle_f32x4(a, c, 0xdd);
    s[2] = _mm512_shuffle_f32x4(b, d, 0x88);
    s[3] = _mm512_shuffle_f32x4(b, d, 0xdd);
  }
  for (int i = 0; i < 4; ++i) add_sums<Codes>(s[i], unit, o + 16 * i);
}

template <class Codes, int half>
KVPOOL_INLINE void add_pair_sums(__m512 (&s)[2], float unit, float* o) {
  Codes::ordered(s[0], s[1]);
  if constexpr (!Codes::kInLanes) {
    for (int i = 0; i < 2; ++i) add_sums<Codes>(s[i], unit, o + 32 * half + 16 * i);
    return;
  }
  const __m512i first = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0),
                second = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
  const __m512d x = _mm512_castps_pd(s[0]), y = _mm512_castps_pd(s[1]);
  const auto add = [unit](__m256d eight, float* to) {
    const __m256 more = _mm256_castpd_ps(eight), sum = _mm256_loadu_ps(to);
    const bool whole = Codes::kForm == Form::int16;
    _mm256_storeu_ps(to, whole ? _mm256_fmadd_ps(more, _mm256_set1_ps(unit), sum) : _mm256_add_ps(sum, more));
  };
  o += 8 * half;
  for (const __m512i order : {first, second}) {
    const __m512d eights = _mm512_permutex2var_pd(x, order, y);
    add(_mm512_castpd512_pd256(eights), o);
    add(_mm512_extractf64x4_pd(eights, 1), o + 16);
    o += 32;
  }
}

// o[r] += sum over tokens of p[r][t] * v[t] for 64 * B columns from `d` on.
template <class Codes, int R, int B>
KVPOOL_INLINE void value_columns(const Codes& codes, const Probabilities& p, const CodeRows& v, int tokens, int d,
                                 int dim, float* o, int64_t pitch, int rows, Stream& ahead) {
  constexpr int N = R <= 4 ? 4 : 2;  // vectors of sums that fit beside the tables
  const auto some = [&](auto first) __attribute__((always_inline)) {
    typename Codes::Sum acc[B][R][N];
    for (auto& block : acc)
      for (auto& row : block)
        for (auto& sum : row) sum = Codes::none();
    const auto sum = [&](int left) {
      for (int t = 0; t < tokens; t += 2) {
        ahead.pass(2 * 64 * B * N / 4);
        for (int i = 0; i < B; ++i) {
          const int at = Codes::bytes(d + 64 * i);
          __m512i w[4];
          codes.pair(v.data[t] + at, v.data[t + 1] + at, left, w);
          for (int r = 0; r < R; ++r) {
            int32_t both;
            std::memcpy(&both, p.narrow + r * kTile + t, 4);
            const __m512i pr = _mm512_set1_epi32(both);
            for (int n = 0; n < N; ++n) acc[i][r][n] = Codes::add(acc[i][r][n], w[first + n], pr);
          }
        }
      }
    };
    if (B > 1 || dim - d >= 64) {
      sum(64);
    } else {
      sum(dim - d);
    }
    for (int i = 0; i < B; ++i)
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        if (r >= rows) break;
        __m512 total[N];
        for (int n = 0; n < N; ++n) total[n] = Codes::floats(acc[i][r][n]);
        float* to = o + r * pitch + d + 64 * i;
        if constexpr (N == 4) {
          add_pair_sums<Codes>(total, p.unit[r], to);
        } else {
          add_pair_sums<Codes, first / 2>(total, p.unit[r], to);
        }
      }
  };
  some(std::integral_constant<int, 0>{});
  if constexpr (N == 2) some(std::integral_constant<int, 2>{});
}

// The same for all columns, in multiples of 64.
template <class Codes, int R>
inline void values_of(const Codes& codes, const Probabilities& p, const CodeRows& v, int tokens, int dim, float* o,
                      int64_t pitch, int rows, Stream& ahead) {
  int d = 0;
  if constexpr (R <= 2)  // whole rows where the sums fit, so that memory is read in order
    for (; dim - d >= 128; d += 128) value_columns<Codes, R, 2>(codes, p, v, tokens, d, dim, o, pitch, rows, ahead);
  for (; d < dim; d += 64) value_columns<Codes, R, 1>(codes, p, v, tokens, d, dim, o, pitch, rows, ahead);
}

// Where the tokens of a tile lie.
inline void code_rows(const Store& s, const Tile& tile, int head, CodeRows& rows) {
  alignas(64) static constexpr uint8_t zeros[4 * kMaxDim] = {};
  if (tile.present != ~uint64_t{0})
    for (int t = 0; t < kTile; ++t) rows.data[t] = rows.block_scale[t] = zeros;
  for (int j = 0; j < tile.num_runs; ++j) {
    const Run& run = tile.runs[j];
    const uint8_t* data = s.data.at(run.block, head, run.offset);
    for (int i = 0; i < run.count; ++i) rows.data[run.at + i] = data + i * s.data.stride_n;
    if (s.block_scale.base != nullptr) {
      const uint8_t* scale = s.block_scale.at(run.block, head, run.offset);
      for (int i = 0; i < run.count; ++i) rows.block_scale[run.at + i] = scale + i * s.block_scale.stride_n;
    }
  }
}

// The factors of the tokens of a tile times `unit`; 0 where there is no token.
inline void token_factors(const Store& s, const Tile& tile, int head, float unit, float* factor) {
  const bool own = s.scale.base != nullptr;
  const __m512 same = splat(own ? 0.0f : s.codec == CodecId::bf16 ? unit : s.constant_scale * unit);
  if (!own || tile.present != ~uint64_t{0})
    for (int i = 0; i < kTile; i += 16)
      _mm512_store_ps(factor + i, _mm512_maskz_mov_ps(static_cast<__mmask16>(tile.present >> i), same));
  if (!own) return;
  for (int j = 0; j < tile.num_runs; ++j) {
    const Run& run = tile.runs[j];
    const uint8_t* from = s.scale.at(run.block, head, run.offset);
    float* to = factor + run.at;
    if (s.scale.stride_n == sizeof(float)) {
      for (int i = 0; i < run.count; i += 16) {
        const auto some = static_cast<__mmask16>(run.count - i >= 16 ? 0xffff : (1 << (run.count - i)) - 1);
        _mm512_mask_storeu_ps(to + i, some, _mm512_mul_ps(splat(unit), _mm512_maskz_loadu_ps(some, from + 4 * i)));
      }
    } else {
      for (int i = 0; i < run.count; ++i) to[i] = unit * *reinterpret_cast<const float*>(from + i * s.scale.stride_n);
    }
  }
}

}  // namespace
}  // namespace kvpool
