// Which kernel serves a call: the explicit table of instruction sets.
#include "kernels/isa.hpp"

namespace kvpool {

const Kernels& kernels_of(Isa isa) {
#if defined(__x86_64__)
  static const Kernels tables[] = {generic_kernels(), avx2_kernels(), avx512_kernels(), avx512_kernels()};
  return tables[static_cast<int>(isa)];
#else
  static const Kernels table = generic_kernels();
  return isa == Isa::generic ? table : table;
#endif
}

}  // namespace kvpool
