#include "kernels/schedule.hpp"

#include <algorithm>

namespace kvpool {

namespace {

constexpr int kSplitAlign = 64;  // a split starts at a multiple of the kernels' tile
constexpr int kMinSplit = 512;   // tokens below which a split costs more than it gains
constexpr int kPerWorker = 4;    // pieces a worker should have, so that dynamic pick-up evens them out
constexpr int kDecodeRows = 2;   // at most so many rows walk all KV heads together

struct Range {
  int begin, end;
};

// Positions that any of the rows [row_begin, row_end) sees, sink tokens apart.
Range visible(const StepView& step, int num_rows, int len, int row_begin, int row_end) {
  const int first = std::max(len - num_rows + row_begin, 0), last = len - num_rows + row_end - 1;
  int begin = 0;
  if (step.window > 0) begin = std::max(0, first - step.window + 1);
  if (step.chunk > 0) begin = first / step.chunk * step.chunk;
  return {begin, std::max(begin, last + 1)};
}

}  // namespace

void Schedule::plan(const StepView& step, const ScheduleOptions& options) {
  items_.clear();
  merges_.clear();
  split_rows_.clear();
  cumulative_splits_.assign(1, 0);
  num_partial_rows_ = 0;

  int64_t total = 0;
  const auto each = [&](auto&& body) {
    for (int s = 0; s < step.num_sequences; ++s) {
      const int rows = step.cu_seqlens[s + 1] - step.cu_seqlens[s];
      for (int r = 0; r < rows; r += options.rows_per_item) {
        const int end = std::min(r + options.rows_per_item, rows);
        body(s, r, end, visible(step, rows, step.seq_lens[s], r, end));
      }
    }
  };
  each([&](int, int r, int end, Range range) { total += int64_t{end - r} * (range.end - range.begin); });
  const int64_t pieces = int64_t{options.num_workers} * kPerWorker;
  const int64_t target = std::max<int64_t>(total * options.num_kv_heads / pieces, 1);

  int sequence = -1;
  each([&](int s, int r, int end, Range range) {
    for (; sequence < s; ++sequence)
      if (sequence >= 0) cumulative_splits_.push_back(static_cast<int32_t>(split_rows_.size()));
    const int length = range.end - range.begin;
    int64_t step_tokens = length;
    if (options.split_tokens > 0) {
      step_tokens = options.split_tokens;
    } else if (options.num_workers > 1) {
      const int together = end - r <= kDecodeRows ? options.num_kv_heads : 1;
      step_tokens = std::max<int64_t>(kMinSplit, target / (int64_t{end - r} * together));
    }
    step_tokens = (step_tokens + kSplitAlign - 1) / kSplitAlign * kSplitAlign;
    if (length <= step_tokens + step_tokens / 4) {
      items_.push_back({s, r, end, range.begin, range.end, 1, 1, -1});
      return;
    }
    const int first_split = static_cast<int>(split_rows_.size());
    for (int t = range.begin; t < range.end;) {
      const int64_t stop = std::min<int64_t>(range.end, (t + step_tokens) / kSplitAlign * kSplitAlign);
      items_.push_back({s, r, end, t, static_cast<int>(stop), t == range.begin, stop == range.end,
                        static_cast<int32_t>(split_rows_.size())});
      split_rows_.push_back(static_cast<int32_t>(num_partial_rows_));
      num_partial_rows_ += end - r;
      t = static_cast<int>(stop);
    }
    merges_.push_back({s, r, end, first_split, static_cast<int>(split_rows_.size()) - first_split});
  });
  for (; sequence < step.num_sequences; ++sequence)
    if (sequence >= 0) cumulative_splits_.push_back(static_cast<int32_t>(split_rows_.size()));

  // Longest first: what is picked up last is short.
  std::stable_sort(items_.begin(), items_.end(), [](const WorkItem& a, const WorkItem& b) {
    const auto cost = [](const WorkItem& i) {
      return int64_t{i.row_end - i.row_begin} * (i.token_end - i.token_begin);
    };
    return cost(a) > cost(b);
  });
}

void Schedule::attach(StepView& step) const {
  step.items = items_.data();
  step.num_items = static_cast<int>(items_.size());
  step.merges = merges_.data();
  step.num_merges = static_cast<int>(merges_.size());
  step.split_rows = split_rows_.data();
  step.num_splits = static_cast<int>(split_rows_.size());
  step.num_partial_rows = num_partial_rows_;
}

}  // namespace kvpool
