#include "ledger/blocks.hpp"

#include <algorithm>

namespace kvpool::ledger {

Blocks::Blocks(const std::vector<GroupSpec>& specs, int32_t num_nodes, int32_t n, const Options& options)
    : tree(num_nodes, n, static_cast<int>(specs.size()), options.finder_mask, options.portable_sha),
      events(static_cast<size_t>(options.num_events), n),
      offer_(options.offer) {
  for (const GroupSpec& spec : specs) {
    groups.emplace_back(spec);
    timers_.emplace_back(spec.num_reserved);
    ahead_.emplace_back();
    has_full_ = has_full_ || spec.life == Life::full;
    if (options.keyed) {
      heaps_.push_back(spec.life == Life::full ? std::make_unique<KeyHeap>(spec.num_reserved) : nullptr);
    }
  }
}

size_t Blocks::bytes() const {
  size_t sum = tree.bytes();
  for (const BlockGroup& g : groups) sum += g.bytes();
  for (const Timers& t : timers_) sum += t.bytes();
  for (const auto& heap : heaps_) sum += heap ? heap->bytes() : 0;
  return sum;
}

// --- holding ---------------------------------------------------------------------------------------------------

void Blocks::claim(int g, int32_t b, std::vector<Claim>* undo) {
  Block& block = groups[g][b];
  if (block.ref++) {
    if (undo) undo->push_back({g, b, -1, 0});
    return;
  }
  if (undo) undo->push_back({g, b, block.prev, block.level});
  ++block.uses;
  uncache(g, b);
}

void Blocks::undo(std::vector<Claim>& claims) {
  for (size_t i = claims.size(); i-- > 0;) {
    const Claim& c = claims[i];
    Block& block = groups[c.group][c.block];
    --block.ref;
    if (c.prev < 0) continue;
    --block.uses;
    groups[c.group].insert_after(c.block, c.prev, c.level);
    if (block.timer) timers_[c.group].rearm(c.block);
    if (const auto& heap = heaps_.empty() ? nullptr : heaps_[c.group].get(); heap && tree.is_leaf(block.node)) {
      heap->insert(c.block);
    }
  }
  claims.clear();
}

void Blocks::unclaim(int g, int32_t b) {
  Block& block = groups[g][b];
  if (--block.ref) return;
  if (block.node == 0) return groups[g].put_free(b);
  cache(g, b, false);
}

void Blocks::unclaim_first(int g, int32_t b) {
  Block& block = groups[g][b];
  if (--block.ref) return;
  if (block.node == 0) return groups[g].put_free(b);
  cache(g, b, true);
}

// Deepest first, each behind its child; from the first that has other children on, to the back: these may be cached
// too.
void Blocks::unclaim_run(int g, const int32_t* run, int32_t size) {
  int32_t child = -1;
  bool front = true;
  for (int32_t i = size; i-- > 0;) {
    const int32_t b = run[i];
    if (b < 0) continue;
    const int32_t n = groups[g][b].node;
    const int32_t first = n ? tree[n].first_child : 0;
    front = front && (first == 0 || (child >= 0 && first == groups[g][child].node && tree[first].next == 0));
    const bool last_holder = groups[g][b].ref == 1 && n;
    const bool behind_child = front && child >= 0 && groups[g][child].queued;
    if (!last_holder || !front) {
      unclaim(g, b);
    } else {
      unclaim_first(g, b);
      if (behind_child && groups[g][child].level == groups[g][b].level) {
        groups[g].unlink(b);
        groups[g].insert_after(b, child, groups[g][child].level);
      }
    }
    child = n ? b : -1;
  }
}

void Blocks::cache(int g, int32_t b, bool first) {
  BlockGroup& group = groups[g];
  Block& block = group[b];
  block.last = clock;
  const uint8_t level = level_of(g, b);
  first ? group.push_front(b, level) : group.push_back(b, level);
  if (block.timer) timers_[g].arm(b, block.timer, now + duration_of(block.timer));
  if (group.spec.life != Life::full) return;
  if (leveled_) {
    const int32_t parent = tree[block.node].parent;
    const int32_t above = parent > 0 ? tree.block(parent, g) : -1;
    if (above >= 0) group[above].level = std::max(group[above].level, level);  // in use: an upper bound
  }
  if (heaps_.empty()) return;
  unkeyed.push_back(b);
  unkeyed_group.push_back(g);
  unkeyed_key.push_back(heaps_[g]->key(b));
  heaps_[g]->set_key(b, clock);
  if (tree.is_leaf(block.node)) heaps_[g]->insert(b);
}

void Blocks::uncache(int g, int32_t b) {
  groups[g].unlink(b);
  if (groups[g][b].timer) timers_[g].disarm(b);
  if (!heaps_.empty() && heaps_[g] && heaps_[g]->contains(b)) heaps_[g]->erase(b);
}

int32_t Blocks::take(int g) {
  int32_t b = groups[g].take_free();
  if (b < 0) b = evict(g);
  ++num_allocated;
  groups[g][b].ref = 1;
  return b;
}

int32_t Blocks::evict(int g) {
  BlockGroup& group = groups[g];
  const bool keyed = !heaps_.empty() && heaps_[g];
  const int32_t b = keyed ? heaps_[g]->front() : group.front();
  look_ahead(g, group[b].skip);
  const int32_t n = group[b].node;
  ++num_evicted;
  ++evicted_by_priority[group[b].own];
  if (offer_) {
    offered.push_back(describe(g, b, n));
    for (int other = 0; group.spec.life == Life::full && other < num_groups(); ++other) {  // these go with it
      const int32_t o = tree.block(n, other);
      if (other != g && o >= 0 && groups[other][o].ref == 0) offered.push_back(describe(other, o, n));
    }
  }
  tell(EventKind::removed, g, b, n, -1);
  tree.set_block(n, g, -1);
  uncache(g, b);
  group[b] = Block{};
  if (group.spec.life == Life::full) {
    const int32_t parent = tree[n].parent;
    remove_node(n);
    if (leveled_) sink(g, parent);
  } else {
    prune(n);
  }
  return b;
}

// A walk along a list is one miss after another: of a block that goes kAhead evictions later its record is fetched now,
// its node 5 evictions later, and what the node's removal touches another 5 later. Hints: they may name anything.
void Blocks::look_ahead(int g, int32_t b) {
  const BlockGroup& group = groups[g];
  Ahead& ahead = ahead_[static_cast<size_t>(g)];
  group.prefetch(b);
  tree.prefetch_node(group[ahead.blocks[(ahead.at + kAhead - 5) & (kAhead - 1)]].node);
  tree.prefetch_around(group[ahead.blocks[(ahead.at + kAhead - 10) & (kAhead - 1)]].node);
  ahead.blocks[ahead.at++ & (kAhead - 1)] = b;
}

// --- storing ---------------------------------------------------------------------------------------------------

void Blocks::attach(int g, int32_t b, int32_t n, Worth worth) {
  tree.set_block(n, g, b);
  Block& block = groups[g][b];
  block.node = n;
  block.own = block.level = worth.priority;
  block.timer = worth.timer;
  leveled_ = leveled_ || worth.priority != kDefaultPriority;
  ++num_stored;
}

void Blocks::announce(int32_t n) {
  if (!events.on()) return;
  for (int g = 0; g < num_groups(); ++g) announce(n, g);
}

void Blocks::announce(int32_t n, int g) {
  if (events.on() && tree.block(n, g) >= 0) tell(EventKind::stored, g, tree.block(n, g), n, -1);
}

void Blocks::tell(EventKind kind, int g, int32_t b, int32_t n, int32_t to) {
  if (!events.on()) return;
  const Node& node = tree[n];
  Event e;
  e.kind = kind;
  e.group = g;
  e.block = b;
  e.to = to;
  e.key = node.key;
  e.has_parent = node.parent > 0;
  e.parent = tree.key_of(node.parent);
  e.start = int64_t{node.index} * tree.tokens_per_block;
  e.num_tokens = node.len;
  e.priority = groups[g][b].own;
  const Space& space = tree.space(tree.space_of(n));
  e.salt = space.salt;
  e.lora = space.lora;
  e.extras = tree.extras(node.extras);
  events.add(std::move(e), tree.tokens(n));
}

void Blocks::detach(int g, int32_t n) {
  const int32_t b = tree.block(n, g);
  if (b < 0) return;
  if (tree[n].pending != kPending) tell(EventKind::removed, g, b, n, -1);
  tree.set_block(n, g, -1);
  if (groups[g][b].ref == 0) uncache(g, b);
  groups[g][b].node = 0;
  groups[g][b].timer = 0;
  if (groups[g][b].ref == 0) groups[g].put_free(b);
}

// Take a leaf out of the tree. What its other blocks held can no longer match.
void Blocks::remove_node(int32_t n) {
  for (int g = 0; g < num_groups(); ++g) detach(g, n);
  const int32_t parent = tree[n].parent;
  tree.remove(n);
  leaf_again(parent);
  prune(parent);
}

void Blocks::take_over(int32_t n) {
  tree[n].pending = 0;
  remove_node(n);
}

// Remove nodes that hold nothing and lead nowhere, upwards from `n`.
void Blocks::prune(int32_t n) {
  if (has_full_) return;  // a node that is not being filled has its block of the full group
  while (n > 0 && tree.is_leaf(n) && tree[n].holders == 0 && tree[n].pending == 0) {
    for (int g = 0; g < num_groups(); ++g) {
      if (tree.block(n, g) >= 0) return;
    }
    const int32_t parent = tree[n].parent;
    tree.remove(n);
    n = parent;
  }
}

void Blocks::leaf_again(int32_t n) {
  if (heaps_.empty() || n <= 0 || !tree.is_leaf(n)) return;
  for (int g = 0; g < num_groups(); ++g) {
    const int32_t b = heaps_[g] ? tree.block(n, g) : -1;
    if (b >= 0 && groups[g][b].queued) heaps_[g]->insert(b);
  }
}

void Blocks::hold_node(int32_t n) {
  if (n > 0) ++tree[n].holders;
}

void Blocks::drop_node(int32_t n) {
  if (n <= 0) return;
  --tree[n].holders;
  prune(n);
}

bool Blocks::make_node_room() {
  const int32_t before = tree.num_nodes();
  for (int g = 0; g < num_groups(); ++g) {
    while (tree.num_nodes() == before && groups[g].num_cached > 0) groups[g].put_free(evict(g));
  }
  return tree.num_nodes() < before;
}

void Blocks::drop_unused(int32_t space) {
  std::vector<int32_t> order;
  for (int32_t n = tree.space(space).first_child; n; n = tree[n].next) order.push_back(n);
  for (size_t i = 0; i < order.size(); ++i) {
    for (int32_t c = tree[order[i]].first_child; c; c = tree[c].next) order.push_back(c);
  }
  for (size_t i = order.size(); i-- > 0;) {  // children before parents
    const int32_t n = order[i];
    bool unused = tree.is_leaf(n) && tree[n].holders == 0 && tree[n].pending == 0;
    for (int g = 0; g < num_groups(); ++g) {
      unused = unused && (tree.block(n, g) < 0 || groups[g][tree.block(n, g)].ref == 0);
    }
    if (!unused) continue;
    for (int g = 0; g < num_groups(); ++g) detach(g, n);
    const int32_t parent = tree[n].parent;
    tree.remove(n);
    leaf_again(parent);
  }
}

Evicted Blocks::describe(int g, int32_t b, int32_t n) const {
  const Node& node = tree[n];
  const Block& block = groups[g][b];
  return {g,
          b,
          node.key,
          tree.key_of(node.parent),
          node.index,
          block.own,
          static_cast<int32_t>(block.uses),
          std::vector<int32_t>(tree.tokens(n), tree.tokens(n) + node.len),
          tree.named_extras(tree.space_of(n), node.extras)};
}

std::vector<Evicted> Blocks::stored() const {
  std::vector<Evicted> out;
  for (int g = 0; g < num_groups(); ++g) {
    for (int32_t b = 0; b < groups[g].spec.num_blocks; ++b) {
      const int32_t n = groups[g][b].node;
      if (n && tree[n].len == tree.tokens_per_block && !tree[n].pending) out.push_back(describe(g, b, n));
    }
  }
  std::stable_sort(out.begin(), out.end(), [](const Evicted& a, const Evicted& b) { return a.index < b.index; });
  return out;
}

void Blocks::move(int g, int32_t from, int32_t to) {
  BlockGroup& group = groups[g];
  const int32_t n = group[from].node;
  group.erase_free(to);
  group.relocate(from, to);
  if (n) {
    tell(EventKind::moved, g, from, n, to);
    tree.set_block(n, g, to);
  }
  if (group[to].queued && group[to].timer) timers_[g].move(from, to);
  if (!heaps_.empty() && heaps_[g] && heaps_[g]->contains(from)) {
    heaps_[g]->set_key(to, heaps_[g]->key(from));
    heaps_[g]->erase(from);
    heaps_[g]->insert(to);
  }
  group.put_free(from);
}

}  // namespace kvpool::ledger
