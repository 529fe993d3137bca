// Changing how many blocks of a group have memory behind them: at the end only, so that no address changes.
#include <algorithm>

#include "ledger/core.hpp"

namespace kvpool::ledger {

int32_t Core::resize(int g, int32_t num_blocks, std::vector<Move>* moves, int32_t* stopped_by) {
  if (!steps_.empty()) throw std::invalid_argument("cannot resize while a step is open; end it first");
  BlockGroup& group = groups_[g];
  if (num_blocks < 1 || num_blocks > group.spec.num_reserved) {
    throw std::invalid_argument("group " + std::to_string(g) + " can have 1.." +
                                std::to_string(group.spec.num_reserved) + " blocks (what was reserved), got " +
                                std::to_string(num_blocks));
  }
  *stopped_by = -1;
  if (num_blocks >= group.spec.num_blocks) {
    group.resize(num_blocks);
    return num_blocks;
  }
  // What a pin holds stays where it is.
  pins_.for_each([&](const Sequence& pin) {
    for (const int32_t b : pin.held[g].table) {
      if (b >= num_blocks) *stopped_by = std::max(*stopped_by, b);
    }
    if (pin.held[g].state >= num_blocks) *stopped_by = std::max(*stopped_by, pin.held[g].state);
  });
  int32_t target = std::max(num_blocks, *stopped_by + 1);
  while (group.num_free < group.spec.num_blocks - target && group.num_cached > 0) group.put_free(blocks_.evict(g));
  target = std::max(target, group.spec.num_blocks - group.num_free);
  std::vector<int32_t> moved(static_cast<size_t>(group.spec.num_blocks - target), -1);
  for (int32_t b = target; b < group.spec.num_blocks; ++b) {
    if (group.is_free(b)) continue;
    const int32_t to = group.lowest_free();
    blocks_.move(g, b, to);
    moved[static_cast<size_t>(b - target)] = to;
    moves->push_back({g, b, to});
  }
  sequences_.for_each([&](Sequence& s) {
    bool changed = false;
    const auto follow = [&](int32_t& b) {
      if (b < target || moved[static_cast<size_t>(b - target)] < 0) return;
      b = moved[static_cast<size_t>(b - target)];
      changed = true;
    };
    for (int32_t& b : s.held[g].table) follow(b);
    for (int32_t& b : s.held[g].draft_states) follow(b);
    follow(s.held[g].state);
    follow(s.held[g].computed_state);
    s.generation += changed;
  });
  group.resize(target);
  return target;
}

}  // namespace kvpool::ledger
