// The partition of a step's attention work, made once a step and used by every layer of a group.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/types.hpp"

namespace kvpool {

struct ScheduleOptions {
  int num_workers = 1;
  int num_kv_heads = 1;    // parallel work each item has besides: the fewest of the group's layers
  int rows_per_item = 32;  // query rows of one item
  int split_tokens = 0;    // > 0: split at exactly so many tokens, whatever the number of workers
};

// The lists a schedule consists of. Deterministic: a function of the step's lengths and the options alone.
class Schedule {
 public:
  void plan(const StepView& step, const ScheduleOptions& options);

  // Points the step at the lists.
  void attach(StepView& step) const;

  const std::vector<WorkItem>& items() const { return items_; }
  const std::vector<int32_t>& cumulative_splits() const { return cumulative_splits_; }  // [S+1]

 private:
  std::vector<WorkItem> items_;
  std::vector<Merge> merges_;
  std::vector<int32_t> split_rows_;
  std::vector<int32_t> cumulative_splits_;
  int64_t num_partial_rows_ = 0;
};

}  // namespace kvpool
