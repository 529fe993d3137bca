// Matching a waiting sequence against the tree, and admitting it.
#include <algorithm>

#include "ledger/core.hpp"

namespace kvpool::ledger {

int32_t Core::first_needed(int g, int64_t position) const {
  const GroupSpec& spec = groups_[g].spec;
  if (spec.life == Life::window) return static_cast<int32_t>(std::max<int64_t>(0, position - spec.window + 1) / n_);
  if (spec.life == Life::chunk) return static_cast<int32_t>(position / spec.chunk * spec.chunk / n_);
  return 0;
}

int32_t Core::sink_blocks(int g) const { return static_cast<int32_t>(blocks_for(groups_[g].spec.sink_tokens)); }

void Core::ensure_finders(Sequence& s, int64_t num_blocks) {
  const int64_t have = static_cast<int64_t>(s.finders.size());
  if (have >= num_blocks) return;
  uint64_t finder = have ? s.finders.back() : tree_.space(s.space).seed;
  for (int64_t i = have; i < num_blocks; ++i) {
    finder = tree_.chain(finder, &s.tokens[i * n_], s.extras_of(static_cast<int32_t>(i)));
    s.finders.push_back(finder);
  }
}

// The longest length of at most `n` blocks of `path_` at which the group has what the next token reads.
int32_t Core::longest_valid(int g, int32_t n) const {
  if (blocks_.is(g, Life::full)) return n;  // a node of the tree has its block of every full group
  if (blocks_.is(g, Life::state)) {
    while (n > 0 && tree_.block(path_[n - 1], g) < 0) --n;
    return n;
  }
  const auto held = [&](int32_t i) { return tree_.block(path_[i], g) != -1; };  // or will be
  const int32_t sink = sink_blocks(g);
  for (int32_t i = n - 1; n > 0 && i >= 0; --i) {
    if (i < first_needed(g, int64_t{n} * n_)) i = std::min(i, sink - 1);
    if (i >= 0 && !held(i)) n = i;  // every longer length below the old one reads block i too
  }
  return n;
}

// Whether `common` tokens of node `n` may follow: everything the next token reads is there.
bool Core::usable_partial(int32_t n, int32_t common) const {
  const Node& node = tree_[n];
  const int64_t position = int64_t{node.index} * n_ + common;
  for (int g = 0; g < num_groups(); ++g) {
    if (tree_.block(n, g) < 0) return false;
    const Life life = groups_[g].spec.life;
    if (life == Life::state && common != node.len) return false;
    if (life == Life::full || life == Life::state) continue;
    const int32_t sink = std::min(sink_blocks(g), node.index);
    for (int32_t i = node.index - 1; i >= 0; --i) {
      if (i < first_needed(g, position)) i = std::min(i, sink - 1);
      if (i >= 0 && tree_.block(path_[i], g) < 0) return false;
    }
  }
  return true;
}

Core::Match Core::match(Sequence& s, int64_t limit) {
  Match best;
  path_.clear();
  if (limit <= 0) return best;
  const int32_t full = static_cast<int32_t>(limit / n_);
  ensure_finders(s, full);
  for (int32_t i = 0; i < std::min(full, kAhead); ++i) tree_.prefetch(s.finders[i]);
  int32_t parent = -s.space;
  for (int32_t i = 0; i < full; ++i) {
    if (i + kAhead < full) tree_.prefetch(s.finders[i + kAhead]);
    if (i + kAhead / 2 < full) tree_.prefetch_found(s.finders[i + kAhead / 2]);
    const int32_t n = tree_.find(s.finders[i], parent, &s.tokens[int64_t{i} * n_], s.extras_of(i));
    if (n == 0 || tree_[n].pending == kTaken || (tree_[n].pending && has_state_)) break;
    path_.push_back(n);
    parent = n;
  }
  const int32_t reached = static_cast<int32_t>(path_.size());
  best.num_blocks = reached;
  for (int32_t before = -1; before != best.num_blocks;) {
    before = best.num_blocks;
    for (int g = 0; g < num_groups(); ++g) best.num_blocks = longest_valid(g, best.num_blocks);
  }
  // The longest common part of one more block; behind a longer path it may be valid where the whole blocks are not.
  for (int32_t k = reached; k >= best.num_blocks; --k) {
    const int64_t at = int64_t{k} * n_;
    const int32_t rest = static_cast<int32_t>(std::min<int64_t>(n_, limit - at));
    if (rest <= 0) continue;
    const Candidate c = tree_.find_partial(k ? path_[k - 1] : -s.space, &s.tokens[at], rest, s.extras_of(k),
                                           [&](int32_t n, int32_t common) { return usable_partial(n, common); });
    if (c.node) {
      best.num_blocks = k;
      best.partial = c;
      break;
    }
  }
  return best;
}

void Core::admit(Entry& entry) {
  Sequence& s = *entry.seq;
  const int64_t limit = std::min(s.num_known - 1, s.max_cached);
  Match m = match(s, limit);
  const int32_t expected = static_cast<int32_t>(std::min<int64_t>(s.expected, limit / n_));
  entry.external = expected > m.num_blocks;
  entry.num_matched = m.num_blocks;
  int64_t position = int64_t{m.num_blocks} * n_ + m.partial.len;
  if (entry.external) {
    m.partial = {};
    position = int64_t{expected} * n_;
    hold_expected(s, expected);
  } else {
    hold_match(s, m);
  }
  entry.admitted = true;
  entry.cached_tokens = position;
  entry.partial_tokens = m.partial.len;
  s.admitted = true;
  s.scheduled = s.computed = position;
  if (!s.resumed) s.hit_tokens = position;  // known inside the step already
}

// Whether a node has its block of a group, or will have it when the step that fills it is carried out.
bool Core::will_have(int g, int32_t n) const {
  const int32_t b = tree_.block(n, g);
  return b >= 0 || b == kPromised || (tree_[n].pending && blocks_.is(g, Life::full));
}

// Hold what `path_` has of the first blocks, and count what must come from below: see take_onboards.
void Core::hold_expected(Sequence& s, int32_t num_blocks) {
  path_.resize(std::min(path_.size(), static_cast<size_t>(num_blocks)));
  const int32_t k = static_cast<int32_t>(path_.size());
  for (int g = 0; g < num_groups(); ++g) {
    if (blocks_.is(g, Life::state)) {
      ++needed_[g];
      continue;
    }
    Held& held = s.held[g];
    const int32_t sink = sink_blocks(g);
    held.front = std::max(sink, first_needed(g, int64_t{num_blocks} * n_));
    held.table.assign(static_cast<size_t>(num_blocks), -1);
    for (int32_t i = 0; i < num_blocks; ++i) {
      if (i == sink) i = held.front;  // what a window does not see need not come
      if (i >= num_blocks) break;
      needed_[g] += i >= k || !will_have(g, path_[i]);
      if (i < k) held.table[i] = std::max(-1, tree_.block(path_[i], g));  // promised ones later
      if (held.table[i] >= 0) blocks_.claim(g, held.table[i], &claims_);
    }
  }
  s.nodes = path_;
  move_end(0, end_node(s));
}

// Hold what a match found, which `path_` is cut to: everything of a full group, of a window what the next token reads.
void Core::hold_match(Sequence& s, const Match& m) {
  const int32_t k = m.num_blocks, x = m.partial.node;
  const int64_t position = int64_t{k} * n_ + m.partial.len;
  path_.resize(static_cast<size_t>(k));
  for (int g = 0; g < num_groups(); ++g) {
    Held& held = s.held[g];
    if (blocks_.is(g, Life::state)) {
      const int32_t from = x ? x : (k ? path_[k - 1] : 0);
      held.state = held.computed_state = from ? tree_.block(from, g) : -1;
      if (held.state >= 0) blocks_.claim(g, held.state, &claims_);
      continue;
    }
    const int32_t sink = sink_blocks(g);
    held.front = std::max(sink, first_needed(g, position));
    held.table.assign(k, -1);
    for (int32_t i = 0; i < k; ++i) {
      if (i == sink) i = held.front;
      if (i >= k) break;
      if (i + kAhead < k) groups_[g].prefetch(tree_.block(path_[i + kAhead], g));
      if (i + kAhead / 2 < k) groups_[g].prefetch_around(tree_.block(path_[i + kAhead / 2], g));
      held.table[i] = std::max(-1, tree_.block(path_[i], g));  // promised ones later: see claim_pending
      if (held.table[i] >= 0) blocks_.claim(g, held.table[i], &claims_);
    }
    if (x == 0) continue;
    held.table.push_back(tree_.block(x, g));
    blocks_.claim(g, held.table.back(), &claims_);
  }
  s.nodes = path_;
  move_end(0, end_node(s));
}

}  // namespace kvpool::ledger
