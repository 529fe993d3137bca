// Scores with a token a lane: 16 tokens are transposed while they are codes, and then nothing is summed across lanes.
// It pays where many rows share the transposed codes.
//
// Included by *_avx512.cpp only.
#pragma once

#include "kernels/codes_avx512.hpp"

namespace kvpool {
namespace {

// 16 bytes at `at` of four tokens, side by side; those from `bytes` on are zero.
KVPOOL_INLINE __m512i load_four(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d, int at,
                                int bytes) {
  const auto load = [=](const uint8_t* p) __attribute__((always_inline)) {
    return bytes >= 16 ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + at))
                       : _mm_maskz_loadu_epi8(static_cast<__mmask16>((1 << bytes) - 1), p + at);
  };
  const __m512i x = _mm512_inserti32x4(_mm512_castsi128_si512(load(a)), load(b), 1);
  return _mm512_inserti32x4(_mm512_inserti32x4(x, load(c), 2), load(d), 3);
}

// Four dwords of each of 16 tokens, a token a lane.
KVPOOL_INLINE void token_dwords(const uint8_t* const* p, int at, int bytes, __m512i (&words)[4]) {
  __m512i v[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) v[j] = load_four(p[j], p[4 + j], p[8 + j], p[12 + j], at, bytes);
  const __m512i first = _mm512_unpacklo_epi32(v[0], v[1]), second = _mm512_unpacklo_epi32(v[2], v[3]);
  const __m512i third = _mm512_unpackhi_epi32(v[0], v[1]), fourth = _mm512_unpackhi_epi32(v[2], v[3]);
  words[0] = _mm512_unpacklo_epi64(first, second);
  words[1] = _mm512_unpackhi_epi64(first, second);
  words[2] = _mm512_unpacklo_epi64(third, fourth);
  words[3] = _mm512_unpackhi_epi64(third, fourth);
}

using Dword __attribute__((may_alias)) = int32_t;

// Sums of products with the dword at `p`, for all lanes. Compilers would broadcast it by an instruction of its own:
// nvfp4 took 24 cycles a token instead of 22.5.
inline __m512 add_dword(__m512 sum, __m512i x, const void* p) {
  asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(x), "m"(*static_cast<const Dword*>(p)));
  return sum;
}
inline __m512i add_dword(__m512i sum, __m512i x, const void* p) {
  asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(x), "m"(*static_cast<const Dword*>(p)));
  return sum;
}

// Which of 16 elements stands at place i of a query's piece: of four codes in a dword the even ones, then the odd ones.
constexpr int dword_element(int i) { return i / 4 * 4 + i % 2 * 2 + i % 4 / 2; }

// s[r][t] = q[r] . k[t] for tokens [0, tokens) and codes of 8 bits. Queries: [16 elements][R][16].
template <class Codes, int R>
inline void scores_by_tokens(const Codes& codes, const uint16_t* q, const CodeRows& k, int tokens, int dim, float* s,
                             Stream& ahead) {
  // Sums of a row: two, where products would wait for each other or numbers grow too large.
  constexpr int n = R <= 4 || Codes::kForm == Form::int16 ? 2 : 1;
  __m512i words[4];  // of the next elements, loaded during the products of these
  token_dwords(k.data, 0, dim, words);
  for (int t = 0; t < tokens; t += 16) {
    const uint16_t* piece = q;
    typename Codes::Sum acc[n][R];
    for (auto& some : acc)
      for (auto& sum : some) sum = Codes::none();
    for (int d = 0; d < dim; d += 16, piece += 16 * R) {
      ahead.pass(16 * 16);
      const __m512i now[4] = {words[0], words[1], words[2], words[3]};
      if (d + 16 < dim) {
        token_dwords(k.data + t, d + 16, dim - d - 16, words);
      } else if (t + 16 < tokens) {
        token_dwords(k.data + t + 16, 0, dim, words);
      }
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        __m512i w[2];
        codes.dwords(now[j], w);
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i)
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) acc[i % n][r] = add_dword(acc[i % n][r], w[i], piece + 16 * r + 4 * j + 2 * i);
      }
    }
    for (int r = 0; r < R; ++r) {
      __m512 sum = Codes::floats(acc[0][r]);
      if constexpr (n == 2) sum = _mm512_add_ps(sum, Codes::floats(acc[1][r]));
      _mm512_storeu_ps(s + r * kTile + t, sum);
    }
  }
}

}  // namespace
}  // namespace kvpool
