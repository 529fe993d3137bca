// The shared kernels compiled for one instruction set.
#include "kernels/isa.hpp"
#include "kernels/kernels_impl.hpp"

namespace kvpool {

Kernels avx512_kernels() { return shared_kernels(); }

}  // namespace kvpool
