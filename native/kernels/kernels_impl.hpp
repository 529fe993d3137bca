// The table of the shared kernels for the including file's instruction set.
#pragma once

#include "cpu/scratch.hpp"
#include "kernels/attend.hpp"
#include "kernels/score.hpp"

namespace kvpool {
namespace {

inline void write_range(const WriteArgs& a, int64_t begin, int64_t end, Scratch&) {
  codec_functions(*a.store).write(a, begin, end);
}

inline void read_range(const ReadArgs& a, int64_t begin, int64_t end, Scratch&) {
  codec_functions(*a.store).read(a, begin, end);
}

}  // namespace
}  // namespace kvpool
