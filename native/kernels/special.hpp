// Kernels that beat the shared ones for some work, each with the question whether it may take an item. A row of the
// table in table.cpp; nothing else knows them.
#pragma once

#include "cpu/scratch.hpp"
#include "kernels/types.hpp"

namespace kvpool {

constexpr int kFewRows = 8;  // most rows a KV head that the kernels of few rows take

#if defined(__x86_64__)
bool fits_few_rows_avx512(const AttendArgs& a, int rows);
void attend_few_rows_avx512(const AttendArgs& a, int item, int head_block, Scratch& scratch);
bool fits_panels_avx512(const AttendArgs& a, int rows);
void attend_panels_avx512(const AttendArgs& a, int item, int head_block, Scratch& scratch);
void attend_panels_amx(const AttendArgs& a, int item, int head_block, Scratch& scratch);
#endif

}  // namespace kvpool
