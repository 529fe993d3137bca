// The shared kernels compiled for one instruction set.
#include "kernels/isa.hpp"
#include "kernels/kernels_impl.hpp"

namespace kvpool {

constinit const Kernels generic_kernels = {attend_item, merge_item, write_range, read_range, score_item};

}  // namespace kvpool
