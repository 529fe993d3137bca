// Planning a step: what each sequence computes, matches and needs. Nothing is evicted or written yet: it can be undone
// without a trace.
#include <algorithm>

#include "ledger/core.hpp"

namespace kvpool::ledger {

// Plan what is wanted, in order; returns how many leading ones fit. Anything but all of them must be undone.
size_t Core::plan(Step& step, int64_t max_rows, bool commit, bool count_room) {
  step.entries.clear();
  step.sizes.clear();
  step.states.clear();
  step.reads.clear();
  step.copies.clear();
  step.onboards.clear();
  step.commit = commit;
  ++num_plans_;
  needed_.assign(groups_.size(), 0);
  int64_t room = limits_.max_step_tokens;
  try {
    for (size_t i = 0; i < wanted_.size(); ++i) {
      Sequence& s = *wanted_[i].sequence;
      const int64_t most = wanted_[i].max_tokens;
      if (s.last_plan == num_plans_)
        throw std::invalid_argument("sequence " + std::to_string(s.id) + " is given twice");
      s.last_plan = num_plans_;
      const int64_t open = s.closing || s.paused ? 0 : std::min(most, s.size() - s.scheduled);
      if (open <= 0) continue;
      if (room == 0 || static_cast<int64_t>(step.entries.size()) == max_rows) {
        if (count_room) return i;
        continue;
      }
      Entry& entry = step.entries.emplace_back();
      entry.seq = &s;
      plan_entry(step, entry, most, room);
      room -= entry.num_tokens + entry.num_drafts;
      if (!fits_now()) return i;
    }
    add_pending(step);
  } catch (...) {
    undo_plan(step);
    throw;
  }
  return wanted_.size();
}

void Core::plan_entry(Step& step, Entry& entry, int64_t most, int64_t room) {
  Sequence& s = *entry.seq;
  if (!s.admitted) {
    add_pending(step);
    admit(entry);
  }
  entry.start = s.scheduled;
  entry.size = s.size();
  entry.num_nodes = static_cast<int32_t>(s.nodes.size());
  entry.num_tokens = static_cast<int32_t>(until_checkpoint(s, std::min({most, room, s.size() - entry.start})));
  if (s.has_drafts && entry.end() == s.size()) {  // leading ones, as many as there is room for
    const int64_t drafts = static_cast<int64_t>(s.drafts.tokens.size());
    entry.num_drafts = static_cast<int32_t>(std::min(drafts, room - entry.num_tokens));
  }
  s.scheduled += entry.num_tokens;
  ++s.open_steps;
  entry.plain = !entry.admitted && !entry.num_drafts;
  for (int g = 0; g < num_groups(); ++g) {
    const int64_t size = static_cast<int64_t>(s.held[g].table.size());
    step.sizes.push_back(static_cast<int32_t>(size));
    const int64_t more =
        blocks_.is(g, Life::state) ? 1 + entry.num_drafts : std::max<int64_t>(0, blocks_for(entry.last()) - size);
    needed_[g] += more;
    entry.plain = entry.plain && more == 0;
  }
  if (!s.own_tail && entry.start & (n_ - 1)) plan_write(step, entry);
  if (step.commit) find_pending(step, entry);
}

// A state can only be kept where a step ends: models that have some end it at checkpoints.
int64_t Core::until_checkpoint(const Sequence& s, int64_t most) const {
  if (!has_state_) return most;
  const int64_t interval = limits_.checkpoint_interval, border = (s.prompt_len - 1) / n_ * n_;
  int64_t next = (s.scheduled / interval + 1) * interval;
  if (border > s.scheduled) next = std::min(next, border);
  return std::min(most, next - s.scheduled);
}

bool Core::is_shared(const Sequence& s, int32_t n) const {
  const Node& node = tree_[n];
  if (node.first_child || node.holders || node.pending) return true;
  for (int g = 0; g < num_groups(); ++g) {
    const int32_t b = tree_.block(n, g);
    if (b < 0) continue;
    const bool own = !blocks_.is(g, Life::state) || s.held[g].state == b;
    if (groups_[g][b].ref > (own ? 1 : 0)) return true;
  }
  return false;
}

// The first token goes into a partly filled block: it must be this sequence's own by then.
void Core::plan_write(Step& step, Entry& entry) {
  const Sequence& s = *entry.seq;
  const int32_t index = static_cast<int32_t>(whole_blocks(entry.start));
  const int32_t filled = static_cast<int32_t>(entry.start & (n_ - 1));
  const int32_t self = static_cast<int32_t>(step.entries.size()) - 1;
  for (int g = 0; g < num_groups(); ++g) {
    if (blocks_.is(g, Life::state)) continue;
    const int32_t b = s.held[g].table[index];
    const Block& block = groups_[g][b];
    if (block.node) {
      if (entry.taken == block.node) continue;
      if (!is_shared(s, block.node)) {
        entry.taken = block.node;
        entry.plain = false;
        tree_[block.node].pending = kTaken;
        continue;
      }
    } else {
      // Earlier copies of this step gave the block up; the last holder writes in place if they needed no more of it.
      int32_t holders = block.ref;
      bool longer = false;
      for (const Copy& c : step.copies) {
        if (c.src != b || c.group != g) continue;
        --holders;
        longer = longer || c.num_tokens > filled;
      }
      if (holders <= 1 && !longer) continue;
    }
    entry.plain = false;
    step.copies.push_back({self, g, index, b, -1, filled});
    ++needed_[g];
  }
}

// Notes the blocks that this step fills: a pass of its own, so that the tree's table is there when they are put into
// it.
void Core::find_pending(const Step& step, const Entry& entry) {
  Sequence& s = *entry.seq;
  if (!entry.external && entry.num_nodes < whole_blocks(entry.start)) return;  // some before are not stored: at the end
  const int64_t full = whole_blocks(std::min(s.scheduled, s.num_known));
  if (entry.num_nodes >= full) return;
  ensure_finders(s, full);
  tree_.prefetch(s.finders[static_cast<size_t>(entry.num_nodes)]);
  filling_.push_back(static_cast<int32_t>(&entry - step.entries.data()));
}

// Puts them into the tree, so that later items of the step find them.
void Core::add_pending(Step& step) {
  for (const int32_t i : filling_) add_pending(step.entries[static_cast<size_t>(i)]);
  filling_.clear();
}

void Core::add_pending(Entry& entry) {
  Sequence& s = *entry.seq;
  const int32_t before = end_node(s), full = static_cast<int32_t>(whole_blocks(std::min(s.scheduled, s.num_known)));
  // Behind a node that is not there nothing is. One that is there was computed twice: adopted when the step ends.
  if (tree_.find(s.finders[entry.num_nodes], before, &s.tokens[int64_t{entry.num_nodes} * n_],
                 s.extras_of(entry.num_nodes))) {
    return;
  }
  for (int32_t i = entry.num_nodes; i < full; ++i) {
    if (i + kAhead < full) tree_.prefetch(s.finders[i + kAhead]);
    const int32_t n = tree_.insert(s.finders[i], end_node(s), &s.tokens[int64_t{i} * n_], n_, s.extras_of(i), i);
    if (n == 0) break;
    tree_[n].pending = kPending;
    if (has_other_) promise(s, i, n);
    s.nodes.push_back(n);
    ++entry.num_pending;
  }
  if (entry.num_pending) move_end(before, end_node(s));
}

// What comes from a tier below lacks what its window no longer sees; everything else that is filled will be there.
void Core::promise(const Sequence& s, int32_t index, int32_t n) {
  for (int g = 0; g < num_groups(); ++g) {
    const bool lacking = index >= sink_blocks(g) && index < s.held[g].front;
    if (!blocks_.is(g, Life::state) && !lacking) tree_.set_block(n, g, kPromised);
  }
}

bool Core::fits_now() const {
  for (int g = 0; g < num_groups(); ++g) {
    if (needed_[g] > groups_[g].num_available()) return false;
  }
  return true;
}

void Core::drop_pending(Entry& entry) {
  Sequence& s = *entry.seq;
  if (entry.num_pending == 0) return;
  const int32_t last = end_node(s);
  s.nodes.resize(static_cast<size_t>(entry.num_nodes));
  blocks_.hold_node(end_node(s));
  --tree_[last].holders;
  for (int32_t n = last; entry.num_pending > 0; --entry.num_pending) {
    for (int g = 0; g < num_groups(); ++g) blocks_.detach(g, n);
    const int32_t parent = tree_[n].parent;
    tree_.remove(n);
    n = parent;
  }
}

void Core::undo_plan(Step& step) {
  for (size_t i = step.entries.size(); i-- > 0;) {
    Entry& entry = step.entries[i];
    Sequence& s = *entry.seq;
    drop_pending(entry);
    if (entry.taken) tree_[entry.taken].pending = 0;
    s.scheduled = entry.start;
    --s.open_steps;
    if (!entry.admitted) continue;
    if (!s.resumed) s.hit_tokens = 0;
    to_waiting(s);
  }
  blocks_.undo(claims_);
  tree_.forget();
  filling_.clear();
  step.entries.clear();
}

// Forget what a sequence holds, without giving it back.
void Core::to_waiting(Sequence& s) {
  const int32_t end = end_node(s);
  s.nodes.clear();
  for (Held& held : s.held) {
    held.table.clear();
    held.front = 0;
    held.state = held.computed_state = -1;
  }
  ++s.generation;
  s.admitted = s.own_tail = false;
  s.scheduled = s.computed = 0;
  move_end(end, 0);
}

void Core::out_of_blocks(Step& step, size_t first) {
  std::string message = "the step does not fit from item " + std::to_string(first) + " on:";
  std::vector<int64_t> missing = missing_now();
  for (int g = 0; g < num_groups(); ++g) {
    const BlockGroup& group = groups_[g];
    message += " group " + std::to_string(g) + " needs " + std::to_string(needed_[g]) + " blocks, has " +
               std::to_string(group.num_free) + " free and " + std::to_string(group.num_cached) + " cached of " +
               std::to_string(group.spec.num_blocks) + " (" + std::to_string(group.num_used()) + " in use);";
  }
  message += " give fewer items or tokens, release or pause a sequence, or enlarge the budget";
  undo_plan(step);
  std::vector<int64_t> ids;
  for (size_t i = first; i < wanted_.size(); ++i) ids.push_back(wanted_[i].sequence->id);
  throw OutOfBlocks(message, std::move(ids), std::move(missing));
}

size_t Core::fits(const std::vector<Item>& items) {
  want(items);
  Step& step = spare_step();
  const size_t fitting = plan(step, limits_.max_sequences, true, true);
  undo_plan(step);
  return fitting;
}

std::vector<int64_t> Core::missing(const std::vector<Item>& items) {
  want(items);
  Step& step = spare_step();
  const size_t fitting = plan(step, limits_.max_sequences, true, true);
  std::vector<int64_t> out;
  if (fitting < items.size()) out = missing_now();
  undo_plan(step);
  return out;
}

std::vector<int64_t> Core::missing_now() const {
  std::vector<int64_t> out;
  for (int g = 0; g < static_cast<int>(groups_.size()); ++g) {
    out.push_back(needed_[g] - groups_[g].num_available());
  }
  return out;
}

}  // namespace kvpool::ledger
