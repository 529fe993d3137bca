// How many KV heads and query rows one work item handles: known to the caller, who counts items, and to the kernels.
#pragma once

#include "kernels/types.hpp"

namespace kvpool {

// Where a token's heads lie side by side (the head stride is the smaller one) an item walks tokens outside and
// heads inside, so that it reads whole lines in order; elsewhere a head's tokens are the contiguous run.
KVPOOL_INLINE int heads_per_item(const AttendArgs& a) {
  const Store& k = *a.k[0];
  if (a.indices == nullptr && k.data.stride_h < k.data.stride_n) return k.num_heads < 8 ? k.num_heads : 8;
  return 1;
}

KVPOOL_INLINE int num_head_blocks(const AttendArgs& a) {
  const int each = heads_per_item(a);
  return (a.k[0]->num_heads + each - 1) / each;
}

// Query rows that an item has for each KV head.
KVPOOL_INLINE int rows_of_item(const AttendArgs& a, int item) {
  const WorkItem& i = a.step->items[item];
  return (i.row_end - i.row_begin) * (a.num_q_heads / a.k[0]->num_heads);
}

}  // namespace kvpool
