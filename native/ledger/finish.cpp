// Ending a step: blocks become matchable, or everything is as before; and the one path on which a sequence leaves.
#include <algorithm>

#include "ledger/core.hpp"

namespace kvpool::ledger {

void Core::end(int64_t id) {
  Step& step = step_of(id);
  if (&step != steps_.front().get()) {
    throw std::invalid_argument("step " + std::to_string(id) + " cannot end before step " +
                                std::to_string(steps_.front()->id) + ", which is older");
  }
  for (Entry& entry : step.entries) end_entry(step, entry);
  for (const Copy& c : step.copies) unclaim(c.group, c.src);
  retire(step);
}

void Core::end_entry(Step& step, Entry& entry) {
  Sequence& s = *entry.seq;
  s.computed = entry.start + entry.num_tokens;
  --s.open_steps;
  for (int32_t i = 0; i < entry.num_pending; ++i) tree_[s.nodes[entry.num_nodes + i]].pending = 0;
  if (entry.admitted) {
    const int64_t missed = s.prompt_len - entry.cached_tokens;
    s.hit_tokens += entry.cached_tokens;
    totals_.admitted += 1;
    totals_.hit_tokens += entry.cached_tokens;
    totals_.partial_tokens += entry.partial_tokens;
    totals_.missed_tokens += missed;
  }
  if (step.commit) commit_ready(s);
  const size_t self = &entry - step.entries.data();
  for (int g = 0; g < num_groups(); ++g) {
    if (groups_[g].spec.life == Life::state) swap_state(s, g, step.states[self * groups_.size() + g]);
    if (groups_[g].spec.life == Life::window || groups_[g].spec.life == Life::chunk) give_back_behind(s, g);
  }
}

void Core::swap_state(Sequence& s, int g, int32_t written) {
  Held& held = s.held[g];
  if (held.state >= 0) unclaim(g, held.state);
  held.state = written;
}

// Return what the next token no longer reads. It goes first, unless a checkpoint needs it.
void Core::give_back_behind(Sequence& s, int g) {
  Held& held = s.held[g];
  const int32_t last = std::min<int32_t>(first_needed(g, s.computed), static_cast<int32_t>(held.table.size()));
  for (; held.front < last; ++held.front) {
    const int32_t b = held.table[held.front];
    held.table[held.front] = -1;
    if (b < 0) continue;
    Block& block = groups_[g][b];
    if (block.ref == 1 && block.node && !serves_checkpoint(s, g, held.front)) {
      block.ref = 0;
      block.last = clock_;
      groups_[g].push_front(b, block.own);
    } else {
      unclaim(g, b);
    }
  }
}

// Checkpoints: multiples of the interval and the last block border before the prompt's last token.
bool Core::serves_checkpoint(const Sequence& s, int g, int32_t index) const {
  const int64_t begin = int64_t{index} * n_, interval = limits_.checkpoint_interval;
  const int64_t border = (s.prompt_len - 1) / n_ * n_;
  const auto reads = [&](int64_t position) { return position > begin && first_needed(g, position) <= index; };
  return reads(border) || reads((begin / interval + 1) * interval);
}

void Core::retire(Step& step) {
  for (size_t i = 0; i < steps_.size(); ++i) {
    if (steps_[i].get() != &step) continue;
    spare_steps_.push_back(std::move(steps_[i]));
    steps_.erase(steps_.begin() + static_cast<std::ptrdiff_t>(i));
    break;
  }
  for (const Entry& entry : step.entries) {
    if (entry.seq->closing && entry.seq->open_steps == 0) close(*entry.seq);
  }
}

// Put the full blocks that are computed and known into the tree, or adopt what is there.
void Core::commit_ready(Sequence& s) {
  const int32_t full = static_cast<int32_t>(std::min(s.computed, s.num_known) / n_);
  if (static_cast<int32_t>(s.nodes.size()) >= full) return;
  ensure_finders(s, full);
  const int32_t before = end_node(s);
  for (int32_t i = static_cast<int32_t>(s.nodes.size()); i < full; ++i) {
    const int32_t* tokens = &s.tokens[int64_t{i} * n_];
    const int32_t parent = end_node(s), extras = s.extras_of(i);
    int32_t n = tree_.find(s.finders[i], parent, tokens, extras);
    if (n && tree_[n].pending) break;  // another open step fills it; next time
    if (n == 0) n = tree_.insert(s.finders[i], parent, tokens, n_, extras, i);
    if (n == 0) break;
    adopt(s, i, n);
    s.nodes.push_back(n);
  }
  if (before != end_node(s)) move_end(before, end_node(s));
}

// Make block `index` of a sequence and node `n` one: the tree's block where it has one, else the sequence's.
void Core::adopt(Sequence& s, int32_t index, int32_t n) {
  for (int g = 0; g < num_groups(); ++g) {
    if (groups_[g].spec.life == Life::state) continue;
    int32_t& held = s.held[g].table[index];
    const int32_t stored = tree_.block(n, g);
    if (held < 0 || held == stored) continue;
    if (stored < 0) {
      if (groups_[g][held].node == 0) attach(g, held, n, priority_of(s, int64_t{index} * n_, int64_t{index + 1} * n_));
      continue;
    }
    claim(g, stored, nullptr);
    unclaim(g, held);
    held = stored;
    ++s.generation;
    ++totals_.adopted;
  }
}

void Core::release(int64_t id, bool keep) {
  const auto it = sequences_.find(id);
  if (it == sequences_.end()) return;
  Sequence& s = *it->second;
  s.keep = s.closing ? s.keep : keep;
  s.closing = true;
  if (s.open_steps == 0) close(s);
}

void Core::close(Sequence& s) {
  if (s.admitted) {
    if (s.keep) {
      commit_ready(s);
      store_tail(s);
    }
    give_back_all(s);
  }
  to_waiting(s);
  tree_.close_space(s.space);
  for (const int32_t e : s.extras) tree_.drop(e);
  const auto it = sequences_.find(s.id);
  if (spare_.size() < 256) spare_.push_back(std::move(it->second));
  sequences_.erase(it);
}

// The partly filled last block becomes a leaf, unless a child there already says as much.
void Core::store_tail(Sequence& s) {
  const int32_t full = static_cast<int32_t>(s.nodes.size());
  const int64_t known = std::min(s.computed, s.num_known);
  const int32_t tail = static_cast<int32_t>(known - int64_t{full} * n_);
  if (tail <= 0 || tail >= n_ || known < s.computed) return;
  for (int g = 0; g < num_groups(); ++g) {
    const Held& held = s.held[g];
    if (groups_[g].spec.life == Life::state) continue;
    if (held.table[full] < 0 || groups_[g][held.table[full]].node) return;
  }
  const int32_t* tokens = &s.tokens[int64_t{full} * n_];
  const int32_t extras = s.extras_of(full);
  const Candidate same = tree_.find_partial(end_node(s), tokens, tail, extras, [&](int32_t n, int32_t common) {
    if (common < tail || tree_[n].pending) return false;
    for (int g = 0; g < num_groups(); ++g) {
      if (tree_.block(n, g) < 0 || (groups_[g].spec.life == Life::state && tree_[n].len != tail)) return false;
    }
    return true;
  });
  if (same.node) return;
  const int32_t n = tree_.insert(0, end_node(s), tokens, tail, extras, full);
  if (n == 0) return;
  const uint8_t priority = priority_of(s, int64_t{full} * n_, s.computed);
  for (int g = 0; g < num_groups(); ++g) {
    const int32_t b = groups_[g].spec.life == Life::state ? s.held[g].state : s.held[g].table[full];
    if (b >= 0 && groups_[g][b].node == 0) attach(g, b, n, priority);
  }
}

// Tail to head, so that children are queued before their parents.
void Core::give_back_all(Sequence& s) {
  ++clock_;
  for (int g = 0; g < num_groups(); ++g) {
    Held& held = s.held[g];
    for (size_t i = held.table.size(); i-- > 0;) {
      if (held.table[i] >= 0) unclaim(g, held.table[i]);
    }
    if (held.state >= 0) unclaim(g, held.state);
  }
}

void Core::abort(int64_t id) {
  Step& step = step_of(id);
  while (steps_.back().get() != &step) abort_step(*steps_.back());
  abort_step(step);
}

void Core::abort_step(Step& step) {
  for (size_t i = step.entries.size(); i-- > 0;) abort_entry(step, step.entries[i]);
  retire(step);
}

void Core::abort_entry(Step& step, Entry& entry) {
  Sequence& s = *entry.seq;
  const int32_t self = static_cast<int32_t>(&entry - step.entries.data());
  --s.open_steps;
  s.scheduled = entry.start;
  if (entry.num_pending) {
    for (int32_t i = 0; i < entry.num_pending; ++i) {
      const int32_t n = s.nodes[entry.num_nodes + i];
      for (int g = 0; g < num_groups(); ++g) {
        if (tree_.block(n, g) >= 0) groups_[g][tree_.block(n, g)].node = 0;
      }
    }
    drop_pending(entry);
  }
  for (Copy& c : step.copies) {
    if (c.entry != self) continue;
    unclaim(c.group, c.dst);
    s.held[c.group].table[c.index] = c.src;  // the step's hold goes back to the sequence
  }
  for (int g = 0; g < num_groups(); ++g) {
    Held& held = s.held[g];
    const size_t before = static_cast<size_t>(step.sizes[self * groups_.size() + g]);
    while (held.table.size() > before) {
      unclaim(g, held.table.back());
      held.table.pop_back();
    }
    if (groups_[g].spec.life == Life::state) unclaim(g, step.states[self * groups_.size() + g]);
  }
  ++s.generation;
  while (s.size() > s.prompt_len && s.tokens.back() < 0 && s.size() > s.num_known) s.tokens.pop_back();
  if (!entry.admitted) return;
  give_back_all(s);
  to_waiting(s);
}

}  // namespace kvpool::ledger
