// How many KV heads and query rows one work item handles: known to the caller, who counts items, and to the kernels.
#pragma once

#include "kernels/types.hpp"

namespace kvpool {

constexpr int kMostHeadsTogether = 8;

// Query rows that an item has for each KV head.
KVPOOL_INLINE int rows_of_item(const AttendArgs& a, int item) {
  const WorkItem& i = a.step->items[item];
  return (i.row_end - i.row_begin) * (a.num_q_heads / a.k[0]->num_heads);
}

KVPOOL_INLINE int num_head_blocks(const AttendArgs& a) {
  return (a.k[0]->num_heads + a.heads_together - 1) / a.heads_together;
}

}  // namespace kvpool
