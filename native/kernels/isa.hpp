// The tables that kernels_<isa>.cpp fill.
#pragma once

#include "cpu/features.hpp"
#include "kernels/types.hpp"

namespace kvpool {

// Constant data: nothing of an instruction set runs before the CPU was asked.
extern const Kernels generic_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
#endif

// An attention kernel, and which work it may take: items of `rows` query rows a KV head.
struct AttendKernel {
  const char* name;
  Isa isa;  // the least it needs
  bool (*fits)(const AttendArgs&, int rows);
  void (*attend)(const AttendArgs&, int item, int head_block, Scratch&);
};

// The kernel that serves items of `rows` query rows a KV head.
const AttendKernel& attend_kernel(Isa isa, const AttendArgs& args, int rows);

// The kernels of an instruction set; those it has no own version of are the next lower set's.
const Kernels& kernels_of(Isa isa);

}  // namespace kvpool
