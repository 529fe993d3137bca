// Which functions serve a few rows of each format.
//
// Included by *_avx512.cpp only.
#pragma once

#include "kernels/nvfp4_codes_avx512.hpp"

namespace kvpool {
namespace {

// One format's functions for R rows; queries and probabilities beyond the rows there are must be zero.
struct FewRows {
  void (*scores)(const Store&, const uint16_t* q, const CodeRows&, int tokens, int dim, float* s, Stream&, int lines);
  void (*values)(const Store&, const Probabilities&, const CodeRows&, int tokens, int dim, float* o, int64_t pitch,
                 int rows, Stream&, int lines);
  int rows;
  int dims;  // elements of a piece
  int (*element)(int);
  bool wide;  // values take probabilities in fp32
  int calls;  // of `Stream::fetch` while the values of 64 elements are summed
};

inline PlainCodes codes_of(const Store&, PlainCodes*) { return {}; }
inline ByteCodes<true> codes_of(const Store&, ByteCodes<true>*) { return ByteCodes<true>(kByteTable<Int8>); }
inline ByteCodes<false> codes_of(const Store& s, ByteCodes<false>*) {
  return ByteCodes<false>(s.codec == CodecId::fp8e5m2_tensor ? kByteTable<E5m2> : kByteTable<E4m3>);
}

template <class Codes, int R>
struct FewRowsOf {
  static void scores(const Store& s, const uint16_t* q, const CodeRows& k, int tokens, int dim, float* out,
                     Stream& ahead, int lines) {
    scores_of<Codes, R>(codes_of(s, static_cast<Codes*>(nullptr)), q, k, tokens, dim, out, ahead, lines);
  }

  static void values(const Store& s, const Probabilities& p, const CodeRows& v, int tokens, int dim, float* o,
                     int64_t pitch, int rows, Stream& ahead, int lines) {
    values_of<Codes, R>(codes_of(s, static_cast<Codes*>(nullptr)), p.narrow, v, tokens, dim, o, pitch, rows, ahead,
                        lines);
  }

  static constexpr FewRows functions() {
    return {scores, values, R, Codes::kDims, Codes::element, false, R <= 4 ? 4 : 8};
  }
};

template <int R>
struct FewRowsOf<Nvfp4Codes, R> {
  static void scores(const Store&, const uint16_t* q, const CodeRows& k, int tokens, int dim, float* out, Stream& ahead,
                     int lines) {
    nvfp4_scores<R>(q, k, tokens, dim, out, ahead, lines);
  }

  static void values(const Store&, const Probabilities& p, const CodeRows& v, int tokens, int dim, float* o,
                     int64_t pitch, int rows, Stream& ahead, int lines) {
    // Four rows at a time: their sums fill the registers.
    for (int r = 0; r < rows; r += 4)
      nvfp4_values<R <= 4 ? R : 4>(p.wide + r * kTile, v, tokens, dim, o + r * pitch, pitch, rows - r, ahead, lines);
  }

  static constexpr FewRows functions() {
    return {scores, values, R, Nvfp4Codes::kDims, Nvfp4Codes::element, true, R <= 4 ? 4 : 8};
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
      return few_rows<ByteCodes<true>>(rows);
    case CodecId::nvfp4:
    case CodecId::nvfp4_token:
      return few_rows<Nvfp4Codes>(rows);
    default:
      return few_rows<ByteCodes<false>>(rows);
  }
}

}  // namespace
}  // namespace kvpool
