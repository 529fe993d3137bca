// Holding and giving back blocks; which one goes when there is no free one.
#include <algorithm>

#include "ledger/core.hpp"

namespace kvpool::ledger {
namespace {

constexpr int kChildren = 16;  // children looked at for a level; beyond them the old level stays as an upper bound

}  // namespace

void Core::claim(int g, int32_t b, std::vector<Claim>* undo) {
  BlockGroup& group = groups_[g];
  Block& block = group[b];
  if (block.ref++) {
    if (undo) undo->push_back({g, b, -1, 0});
    return;
  }
  if (undo) undo->push_back({g, b, block.prev, block.level});
  ++block.uses;
  group.unlink(b);
}

void Core::unclaim(int g, int32_t b) {
  BlockGroup& group = groups_[g];
  Block& block = group[b];
  if (--block.ref) return;
  block.last = clock_;
  if (block.node == 0) {
    group.put_free(b);
  } else {
    group.push_back(b, level_of(g, b));
  }
}

// A block of a full group stands at least as high as its cached children, so that they go first.
uint8_t Core::level_of(int g, int32_t b) const {
  const BlockGroup& group = groups_[g];
  uint8_t level = group[b].own;
  if (group.spec.life != Life::full) return level;
  int seen = 0;
  for (int32_t c = tree_[group[b].node].first_child; c && seen < kChildren; c = tree_[c].next, ++seen) {
    const int32_t child = tree_.block(c, g);
    if (child >= 0) level = std::max(level, group[child].level);
  }
  return level;
}

// After a child of node `n` went: let what only it held up fall to its own level.
void Core::sink(int g, int32_t n) {
  BlockGroup& group = groups_[g];
  for (; n > 0; n = tree_[n].parent) {
    const int32_t b = tree_.block(n, g);
    if (b < 0 || !group[b].queued || group[b].level == group[b].own) return;
    const uint8_t level = level_of(g, b);
    if (level >= group[b].level) return;
    group.unlink(b);
    group.push_front(b, level);
  }
}

int32_t Core::take(int g) {
  int32_t b = groups_[g].take_free();
  if (b < 0) b = evict(g);
  ++totals_.allocated;
  groups_[g][b].ref = 1;
  return b;
}

// Drop the first cached block of the lowest list from the tree and return it, in no list and not free.
int32_t Core::evict(int g) {
  BlockGroup& group = groups_[g];
  const int32_t b = group.front();
  const int32_t ahead = group[b].skip;
  group.prefetch(ahead);
  const int32_t n = group[b].node;
  group.unlink(b);
  group[b] = Block{};
  ++totals_.evicted;
  tree_.set_block(n, g, -1);
  if (group.spec.life == Life::full) {
    const int32_t parent = tree_[n].parent;
    remove_node(n);
    sink(g, parent);
  } else {
    prune(n);
  }
  return b;
}

// Take a leaf out of the tree. Its other blocks can no longer match: the unused ones are free at once.
void Core::remove_node(int32_t n) {
  for (int g = 0; g < num_groups(); ++g) {
    const int32_t b = tree_.block(n, g);
    if (b < 0) continue;
    groups_[g][b].node = 0;
    if (groups_[g][b].ref) continue;
    groups_[g].unlink(b);
    groups_[g].put_free(b);
  }
  const int32_t parent = tree_[n].parent;
  tree_.remove(n);
  prune(parent);
}

// Remove nodes that hold nothing and lead nowhere, upwards from `n`.
void Core::prune(int32_t n) {
  while (n > 0 && tree_.is_leaf(n) && tree_[n].holders == 0 && tree_[n].pending == 0) {
    for (int g = 0; g < num_groups(); ++g) {
      if (tree_.block(n, g) >= 0) return;
    }
    const int32_t parent = tree_[n].parent;
    tree_.remove(n);
    n = parent;
  }
}

uint8_t Core::priority_of(const Sequence& s, int64_t start, int64_t end) const {
  for (const Retention& r : s.retention) {
    if (r.start < end && start < r.end) return r.priority;
  }
  return kDefaultPriority;
}

void Core::attach(int g, int32_t b, int32_t n, uint8_t priority) {
  tree_.set_block(n, g, b);
  groups_[g][b].node = n;
  groups_[g][b].own = priority;
  ++totals_.stored;
}

// The sequence's last node in the tree stays while the sequence lives, whatever happens to its blocks.
void Core::move_end(int32_t from, int32_t to) {
  if (to > 0) ++tree_[to].holders;
  if (from > 0) {
    --tree_[from].holders;
    prune(from);
  }
}

}  // namespace kvpool::ledger
