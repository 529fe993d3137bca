// Which functions serve a few rows of each format.
//
// Included by *_avx512.cpp only.
#pragma once

#include "kernels/nvfp4_codes_avx512.hpp"

namespace kvpool {
namespace {

// What of the next tile is fetched while scores and softmax are computed; the rest is for the values. Found by trying:
// nothing during the softmax leaves memory idle, and in bf16 a quarter more during the values makes them a quarter
// slower.
struct Shares {
  double scores = 36.0 / 64, softmax = 6.0 / 64;
};

// One format's functions for R rows; queries and probabilities beyond the rows there are must be zero.
struct FewRows {
  void (*scores)(const Store&, const uint16_t* q, const CodeRows&, int tokens, int dim, float* s, Stream&);
  void (*values)(const Store&, const Probabilities&, const CodeRows&, int tokens, int dim, float* o, int64_t pitch,
                 int rows, Stream&);
  int rows;
  int dims;                     // elements of a piece
  int copies;                   // of a query's 16 elements, side by side
  int (*element)(int);          // none where queries are bytes
  Form queries, probabilities;  // what scores and values take
  Shares fetched = {};
};

inline PlainCodes codes_of(const Store&, PlainCodes*) { return {}; }
inline Int8Codes codes_of(const Store&, Int8Codes*) { return {}; }
inline Fp8Codes codes_of(const Store& s, Fp8Codes*) {
  return Fp8Codes(s.codec == CodecId::fp8e5m2_tensor ? kByteTable<E5m2> : kByteTable<E4m3>);
}

template <class Codes, int R>
struct FewRowsOf {
  static constexpr bool in_order = R <= Codes::kRowsInOrder, by_pairs = !in_order && std::is_same_v<Codes, PlainCodes>,
                        by_tokens = R >= Codes::kRowsByTokens;

  static void scores(const Store& s, const uint16_t* q, const CodeRows& k, int tokens, int dim, float* out,
                     Stream& ahead) {
    if constexpr (in_order) {
      scores_in_order<Codes, R>(codes_of(s, static_cast<Codes*>(nullptr)), q, k, tokens, dim, out, ahead);
    } else if constexpr (by_pairs) {
      scores_by_pairs<R>(q, k, tokens, dim, out, ahead);
    } else if constexpr (by_tokens) {
      scores_by_tokens<Codes, R>(codes_of(s, static_cast<Codes*>(nullptr)), q, k, tokens, dim, out, ahead);
    } else {
      scores_by_halves<Codes, R>(codes_of(s, static_cast<Codes*>(nullptr)), q, k, tokens, dim, out, ahead);
    }
  }

  static void values(const Store& s, const Probabilities& p, const CodeRows& v, int tokens, int dim, float* o,
                     int64_t pitch, int rows, Stream& ahead) {
    values_of<Codes, R>(codes_of(s, static_cast<Codes*>(nullptr)), p, v, tokens, dim, o, pitch, rows, ahead);
  }

  static constexpr FewRows functions() {
    if constexpr (in_order) {
      return {scores, values, R, 32 * Codes::kWords, 1, Codes::word_element, Codes::kForm, Codes::kForm};
    } else if constexpr (by_pairs) {
      return {scores,
              values,
              (R + 1) / 2 * 2,
              8,
              1,
              Codes::word_element,
              Codes::kForm,
              Codes::kForm,
              R <= 2  ? Shares{30.0 / 64, 4.0 / 64}
              : R > 4 ? Shares{32.0 / 64, 6.0 / 64}
                      : Shares{}};
    } else if constexpr (by_tokens) {
      return {scores, values, R, 16, 1, dword_element, Codes::kForm, Codes::kForm};
    } else {
      return {scores, values, R, Codes::kDims, 2, Codes::half_element, Codes::kForm, Codes::kForm};
    }
  }
};

template <int R>
struct FewRowsOf<Nvfp4Codes, R> {
  static void scores(const Store&, const uint16_t* q, const CodeRows& k, int tokens, int dim, float* out,
                     Stream& ahead) {
    nvfp4_scores<R>(q, k, tokens, dim, out, ahead);
  }

  static void values(const Store&, const Probabilities& p, const CodeRows& v, int tokens, int dim, float* o,
                     int64_t pitch, int rows, Stream& ahead) {
    // Four rows at a time: their sums fill the registers.
    for (int r = 0; r < rows; r += 4)
      nvfp4_values<R <= 4 ? R : 4>(p, r, v, tokens, dim, o + r * pitch, pitch, rows - r, ahead,
                                   R <= 4 ? 16 * 32 : 8 * 32);
  }

  static constexpr FewRows functions() {
    return {scores, values, R, 16, kNvfp4QueryBytes / 32, nullptr, Form::bytes, Form::fp32};
  }
};

template <class Codes>
inline FewRows few_rows(int rows) {
  static constexpr FewRows table[] = {FewRowsOf<Codes, 1>::functions(), FewRowsOf<Codes, 2>::functions(),
                                      FewRowsOf<Codes, 3>::functions(), FewRowsOf<Codes, 4>::functions(),
                                      FewRowsOf<Codes, 6>::functions(), FewRowsOf<Codes, 8>::functions()};
  return table[rows <= 4 ? rows - 1 : (rows + 1) / 2 + 1];
}

inline FewRows few_rows(const Store& s, int rows) {
  switch (s.codec) {
    case CodecId::bf16:
      return few_rows<PlainCodes>(rows);
    case CodecId::int8:
    case CodecId::int8_tensor:
      return few_rows<Int8Codes>(rows);
    case CodecId::nvfp4:
    case CodecId::nvfp4_token:
      return few_rows<Nvfp4Codes>(rows);
    default:
      return few_rows<Fp8Codes>(rows);
  }
}

}  // namespace
}  // namespace kvpool
