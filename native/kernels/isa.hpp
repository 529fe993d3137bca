// The tables that kernels_<isa>.cpp fill.
#pragma once

#include "cpu/features.hpp"
#include "kernels/types.hpp"

namespace kvpool {

Kernels generic_kernels();
#if defined(__x86_64__)
Kernels avx2_kernels();
Kernels avx512_kernels();
#endif

// The kernels of an instruction set; those it has no own version of are the next lower set's.
const Kernels& kernels_of(Isa isa);

}  // namespace kvpool
