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
  for (const Copy& c : step.copies) blocks_.unclaim(c.group, c.src);
  retire(step);
}

void Core::end_entry(Step& step, Entry& entry) {
  Sequence& s = *entry.seq;
  const size_t self = static_cast<size_t>(&entry - step.entries.data());
  s.computed = entry.end();
  --s.open_steps;
  for (int32_t i = 0; i < entry.num_pending; ++i) {
    const int32_t n = s.nodes[entry.num_nodes + i];
    tree_[n].pending = 0;
    blocks_.announce(n);
  }
  if (step.commit && static_cast<int64_t>(s.nodes.size()) < whole_blocks(s.computed)) commit_ready(s);
  if (entry.external) store_onboards(step, entry);
  if (entry.admitted) count_admission(entry);
  if (!has_other_) return;
  for (int g = 0; g < num_groups(); ++g) {
    if (blocks_.is(g, Life::state)) {
      s.held[g].computed_state = step.states[self * groups_.size() + g];
      const int32_t read = step.reads[self * groups_.size() + g];
      if (read >= 0) blocks_.unclaim(g, read);
      if (step.commit && is_checkpoint(s, s.computed)) store_state(s, g);
    }
    give_back_behind(s, g);
  }
}

// What came from below is in the tree again, where its node is there and lacks it.
void Core::store_onboards(const Step& step, const Entry& entry) {
  Sequence& s = *entry.seq;
  const int32_t count = static_cast<int32_t>(whole_blocks(entry.start));
  const int32_t known = std::min(count, static_cast<int32_t>(s.nodes.size()));
  for (int32_t i = entry.num_matched; i < known; ++i) adopt(s, i, s.nodes[i]);
  if (known < count) return;
  const size_t first = static_cast<size_t>(&entry - step.entries.data()) * groups_.size();
  const int32_t n = s.nodes[count - 1];
  for (int g = 0; g < num_groups(); ++g) {
    const int32_t b = step.reads[first + g];
    if (b < 0 || groups_[g][b].node || tree_.block(n, g) >= 0) continue;
    blocks_.attach(g, b, n, block_worth(s, count - 1));
    blocks_.announce(n, g);
  }
}

void Core::count_admission(const Entry& entry) {
  Sequence& s = *entry.seq;
  if (entry.external) totals_.onboarded_tokens += entry.start - int64_t{entry.num_matched} * n_;
  if (!s.retention.empty()) apply_retention(s, entry.num_nodes);
  if (s.resumed) {  // its own work found again is no hit
    s.resumed_tokens += entry.cached_tokens;
    totals_.resumed_tokens += entry.cached_tokens;
    return;
  }
  s.partial_tokens = entry.partial_tokens;
  s.missed_tokens = s.prompt_len - entry.cached_tokens;
  totals_.admitted += 1;
  totals_.hit_tokens += entry.cached_tokens;
  totals_.partial_tokens += entry.partial_tokens;
  totals_.missed_tokens += s.missed_tokens;
}

// --- retention -------------------------------------------------------------------------------------------------

std::optional<Worth> Core::worth_of(const Sequence& s, int64_t start, int64_t end) const {
  for (const auto& [range, worth] : s.retention) {
    if (range.start < end && start < range.end) return worth;
  }
  return std::nullopt;
}

Worth Core::block_worth(const Sequence& s, int32_t index) const {
  if (s.retention.empty()) return {};
  return worth_of(s, int64_t{index} * n_, int64_t{index + 1} * n_).value_or(Worth{});
}

// Who finds a block says anew what it is worth, where it says anything.
void Core::apply_retention(Sequence& s, int32_t num_blocks) {
  for (int32_t i = 0; i < num_blocks; ++i) {
    const std::optional<Worth> worth = worth_of(s, int64_t{i} * n_, int64_t{i + 1} * n_);
    if (!worth) continue;
    for (int g = 0; g < num_groups(); ++g) {
      if (!blocks_.is(g, Life::state) && s.held[g].table[i] >= 0) blocks_.set_worth(g, s.held[g].table[i], *worth);
    }
  }
}

// --- states and windows ----------------------------------------------------------------------------------------

// Checkpoints: multiples of the interval and the last block border before the prompt's last token.
bool Core::is_checkpoint(const Sequence& s, int64_t position) const {
  if (position == 0 || position % n_) return false;
  return position % limits_.checkpoint_interval == 0 || position == (s.prompt_len - 1) / n_ * n_;
}

// The state at a block border goes into the tree, with the node that ends there.
void Core::store_state(Sequence& s, int g) {
  if (!blocks_.is(g, Life::state) || s.held[g].computed_state < 0 || s.nodes.empty()) return;
  if (s.computed != static_cast<int64_t>(s.nodes.size()) * n_) return;
  const int32_t n = s.nodes.back(), b = s.held[g].computed_state;
  if (tree_.block(n, g) >= 0 || groups_[g][b].node) return;
  blocks_.attach(g, b, n, block_worth(s, static_cast<int32_t>(s.nodes.size()) - 1));
  blocks_.announce(n, g);
}

bool Core::serves_checkpoint(const Sequence& s, int g, int32_t index) const {
  const int64_t begin = int64_t{index} * n_, interval = limits_.checkpoint_interval;
  const auto reads = [&](int64_t position) { return position > begin && first_needed(g, position) <= index; };
  return reads((s.prompt_len - 1) / n_ * n_) || reads((begin / interval + 1) * interval);
}

// Return what the next token no longer reads. It goes first, unless a checkpoint needs it.
void Core::give_back_behind(Sequence& s, int g) {
  if (blocks_.is(g, Life::full) || blocks_.is(g, Life::state)) return;
  Held& held = s.held[g];
  const int32_t last = std::min(first_needed(g, s.computed), static_cast<int32_t>(held.table.size()));
  for (; held.front < last; ++held.front) {
    const int32_t b = held.table[held.front];
    held.table[held.front] = -1;
    if (b < 0) continue;
    serves_checkpoint(s, g, held.front) ? blocks_.unclaim(g, b) : blocks_.unclaim_first(g, b);
  }
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

// --- storing ---------------------------------------------------------------------------------------------------

// Put the full blocks that are computed and known into the tree, or adopt what is there.
void Core::commit_ready(Sequence& s) {
  const int32_t full = static_cast<int32_t>(whole_blocks(std::min(s.computed, s.num_known)));
  if (static_cast<int32_t>(s.nodes.size()) >= full) return;
  ensure_finders(s, full);
  int32_t end = end_node(s);
  for (int32_t i = static_cast<int32_t>(s.nodes.size()); i < full; ++i) {
    const int32_t* tokens = &s.tokens[int64_t{i} * n_];
    const int32_t extras = s.extras_of(i);
    int32_t n = tree_.find(s.finders[i], end, tokens, extras);
    if (n && tree_[n].pending) break;  // another open step fills it; next time
    if (n == 0) n = tree_.insert(s.finders[i], end, tokens, n_, extras, i);
    if (n == 0 && !has_full_ && blocks_.make_node_room()) n = tree_.insert(s.finders[i], end, tokens, n_, extras, i);
    if (n == 0) break;
    tree_.seal();
    adopt(s, i, n);
    s.nodes.push_back(n);
    move_end(end, n);
    end = n;
  }
}

// Make block `index` of a sequence and node `n` one: the tree's block where it has one, else the sequence's.
void Core::adopt(Sequence& s, int32_t index, int32_t n) {
  for (int g = 0; g < num_groups(); ++g) {
    if (blocks_.is(g, Life::state)) continue;
    int32_t& held = s.held[g].table[index];
    const int32_t stored = tree_.block(n, g);
    if (held < 0 || held == stored) continue;
    if (stored < 0) {
      if (groups_[g][held].node) continue;
      blocks_.attach(g, held, n, block_worth(s, index));
      blocks_.announce(n, g);
      continue;
    }
    blocks_.claim(g, stored, nullptr);
    blocks_.unclaim(g, held);
    held = stored;
    ++s.generation;
    ++totals_.adopted;
  }
}

void Core::release(int64_t id, bool keep) {
  Sequence* found = sequences_.find(id);
  if (!found) return;
  Sequence& s = *found;
  s.keep = s.closing ? s.keep : keep;
  s.closing = true;
  if (s.open_steps == 0) close(s);
}

void Core::close(Sequence& s) {
  const int32_t space = s.space;
  const bool retired = tree_.space(space).retired;
  if (s.admitted) {
    if (s.keep && !retired) store_all(s);
    give_back_all(s);
    to_waiting(s);
  }
  if (retired) blocks_.drop_unused(space);
  drop_sequence(sequences_.take(s.id));
}

void Core::store_all(Sequence& s) {
  drop_draft_states(s);
  commit_ready(s);
  for (int g = 0; g < num_groups(); ++g) store_state(s, g);
  store_tail(s);
}

// The partly filled last block becomes a leaf, unless a child there already says as much.
void Core::store_tail(Sequence& s) {
  const int32_t full = static_cast<int32_t>(s.nodes.size());
  const int32_t tail = static_cast<int32_t>(s.computed - int64_t{full} * n_);
  if (tail <= 0 || tail >= n_ || s.num_known < s.computed) return;
  for (int g = 0; g < num_groups(); ++g) {
    const Held& held = s.held[g];
    if (blocks_.is(g, Life::state)) continue;
    if (held.table[full] < 0 || groups_[g][held.table[full]].node) return;
    if (groups_[g][held.table[full]].ref > 1) return;  // a fork's too: the last one to leave it stores it
  }
  const int32_t* tokens = &s.tokens[int64_t{full} * n_];
  const int32_t extras = s.extras_of(full);
  const Candidate same = tree_.find_partial(end_node(s), tokens, tail, extras, [&](int32_t n, int32_t common) {
    if (common < tail || tree_[n].pending) return false;
    for (int g = 0; g < num_groups(); ++g) {
      if (tree_.block(n, g) < 0 || (blocks_.is(g, Life::state) && tree_[n].len != tail)) return false;
    }
    return true;
  });
  if (same.node) return;
  const int32_t n = tree_.insert(0, end_node(s), tokens, tail, extras, full);
  if (n == 0) return;
  tree_.seal();
  const Worth worth = worth_of(s, int64_t{full} * n_, s.computed).value_or(Worth{});
  for (int g = 0; g < num_groups(); ++g) {
    const int32_t b = blocks_.is(g, Life::state) ? s.held[g].state : s.held[g].table[full];
    if (b >= 0 && groups_[g][b].node == 0) blocks_.attach(g, b, n, worth);
  }
  blocks_.announce(n);
}

// Tail to head, so that children are queued before their parents.
void Core::give_back_all(Sequence& s) {
  ++blocks_.clock;
  for (int g = 0; g < num_groups(); ++g) {
    Held& held = s.held[g];
    for (size_t i = held.table.size(); i-- > 0;) {
      if (held.table[i] >= 0) blocks_.unclaim(g, held.table[i]);
    }
    if (held.state >= 0) blocks_.unclaim(g, held.state);
    drop_draft_states(s, g);
  }
}

// --- aborting --------------------------------------------------------------------------------------------------

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
  s.own_tail = false;
  drop_pending(entry);
  for (Copy& c : step.copies) {
    if (c.entry != self) continue;
    blocks_.unclaim(c.group, c.dst);
    s.held[c.group].table[c.index] = c.src;  // the step's hold goes back to the sequence
  }
  for (int g = 0; g < num_groups(); ++g) {
    Held& held = s.held[g];
    const size_t before = static_cast<size_t>(step.sizes[self * groups_.size() + g]);
    while (held.table.size() > before) {
      if (held.table.back() >= 0) blocks_.unclaim(g, held.table.back());
      held.table.pop_back();
    }
    if (blocks_.is(g, Life::state)) {
      blocks_.unclaim(g, held.state);
      held.state = step.reads[self * groups_.size() + g];
    }
    drop_draft_states(s, g);
  }
  ++s.generation;
  while (s.size() > std::max(s.num_known, entry.size)) s.tokens.pop_back();  // unknown ones this step would have given
  if (!entry.admitted) return;
  give_back_all(s);
  if (!s.resumed) s.hit_tokens = 0;
  to_waiting(s);
}

}  // namespace kvpool::ledger
