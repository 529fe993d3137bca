// What happens to a sequence between its steps: rewind, fork, pause; and what concerns the tree alone: peek, pin,
// clear.
#include <algorithm>

#include "ledger/core.hpp"

namespace kvpool::ledger {

void Core::require_idle(const Sequence& s, const char* what) const {
  if (s.closing) throw std::invalid_argument("sequence " + std::to_string(s.id) + " is released");
  if (s.open_steps == 0) return;
  throw std::invalid_argument(std::string("cannot ") + what + " sequence " + std::to_string(s.id) +
                              " while a step with it is open; end the step first");
}

// --- rewind ----------------------------------------------------------------------------------------------------

// Windows need what the next token reads, a state needs to have been kept. Changes nothing.
void Core::check_rewindable(const Sequence& s, int64_t position) const {
  const auto refuse = [&](int g, const char* why) {
    throw Unsupported("sequence " + std::to_string(s.id) + " cannot be rewound to " + std::to_string(position) +
                      " tokens: group " + std::to_string(g) + " " + why + "; rewind to a checkpoint or open it anew");
  };
  const int32_t whole = static_cast<int32_t>(position / n_), held = static_cast<int32_t>(blocks_for(position));
  for (int g = 0; g < num_groups(); ++g) {
    if (blocks_.is(g, Life::full) || position == 0) continue;
    if (blocks_.is(g, Life::state)) {
      const bool at_border = position % n_ == 0 && whole <= static_cast<int32_t>(s.nodes.size());
      if (!at_border || tree_.block(s.nodes[whole - 1], g) < 0) refuse(g, "kept no state there");
      continue;
    }
    const int32_t sink = std::min(sink_blocks(g), held);
    for (int32_t i = held - 1; i >= 0; --i) {
      if (i < first_needed(g, position)) i = std::min(i, sink - 1);
      if (i < 0) break;
      const bool stored = i < static_cast<int32_t>(s.nodes.size()) && tree_.block(s.nodes[i], g) >= 0;
      if (s.held[g].table[i] < 0 && !stored) refuse(g, "no longer has the blocks its window reads there");
    }
  }
}

void Core::rewind(int64_t id, int64_t num_tokens) {
  Sequence& s = sequence(id);
  require_idle(s, "rewind");
  if (num_tokens < 0 || num_tokens > s.size()) {
    throw std::invalid_argument("rewind takes 0.." + std::to_string(s.size()) + " tokens of sequence " +
                                std::to_string(id) + ", got " + std::to_string(num_tokens));
  }
  const int64_t size = s.size() - num_tokens, position = std::min(s.computed, size);
  if (position < s.computed) check_rewindable(s, position);
  s.tokens.resize(static_cast<size_t>(size));
  s.num_known = std::min(s.num_known, size);
  s.prompt_len = std::min(s.prompt_len, size);
  if (static_cast<int64_t>(s.finders.size()) > size / n_) s.finders.resize(static_cast<size_t>(size / n_));
  if (position == s.computed) return;
  s.drafts = {};
  drop_draft_states(s);
  for (int g = 0; g < num_groups(); ++g) rewind_group(s, g, position);
  const int32_t before = end_node(s);
  if (static_cast<int64_t>(s.nodes.size()) > position / n_) {
    s.nodes.resize(static_cast<size_t>(position / n_));
    move_end(before, end_node(s));
  }
  s.computed = s.scheduled = position;
  s.own_tail = false;
  ++s.generation;
}

void Core::rewind_group(Sequence& s, int g, int64_t position) {
  Held& held = s.held[g];
  if (blocks_.is(g, Life::state)) {
    const int32_t before = held.state;
    held.state = held.computed_state = position ? tree_.block(s.nodes[position / n_ - 1], g) : -1;
    if (held.state >= 0) blocks_.claim(g, held.state, nullptr);
    if (before >= 0) blocks_.unclaim(g, before);
    return;
  }
  const int32_t size = static_cast<int32_t>(blocks_for(position));
  if (size < static_cast<int32_t>(held.table.size())) {
    blocks_.unclaim_run(g, held.table.data() + size, static_cast<int32_t>(held.table.size()) - size);
    held.table.resize(static_cast<size_t>(size));
  }
  const int32_t sink = sink_blocks(g);
  held.front = std::max(sink, first_needed(g, position));
  for (int32_t i = 0; i < size; ++i) {
    if (i == sink) i = std::max(i, held.front);
    if (i >= size) break;
    if (held.table[i] >= 0) continue;
    held.table[i] = tree_.block(s.nodes[i], g);
    blocks_.claim(g, held.table[i], nullptr);
  }
}

// --- fork, pause -----------------------------------------------------------------------------------------------

int64_t Core::fork(int64_t id) {
  Sequence& s = sequence(id);
  require_idle(s, "fork");
  s.own_tail = false;
  if (is_checkpoint(s, s.computed) || s.computed % n_ == 0) {
    for (int g = 0; g < num_groups(); ++g) store_state(s, g);
  }
  if (spare_.empty()) spare_.push_back(std::make_unique<Sequence>());
  std::unique_ptr<Sequence> owned = std::move(spare_.back());
  spare_.pop_back();
  *owned = s;
  Sequence& child = *owned;
  child.id = next_id_++;
  child.last_plan = 0;
  child.drafts = {};
  child.hit_tokens = child.partial_tokens = child.missed_tokens = child.resumed_tokens = 0;
  ++tree_.space(child.space).holders;
  for (const int32_t e : child.extras) tree_.keep(e);
  blocks_.hold_node(end_node(child));
  for (int g = 0; g < num_groups(); ++g) {
    Held& held = child.held[g];
    held.draft_states.clear();
    for (const int32_t b : held.table) {
      if (b >= 0) blocks_.claim(g, b, nullptr);
    }
    if (held.state >= 0) blocks_.claim(g, held.state, nullptr);
  }
  const int64_t new_id = child.id;
  sequences_.add(std::move(owned));
  return new_id;
}

// Leave what is computed matchable and hold nothing; the tokens stay. Resuming admits it again.
void Core::pause(int64_t id) {
  Sequence& s = sequence(id);
  require_idle(s, "pause");
  if (s.admitted) {
    store_all(s);
    give_back_all(s);
    to_waiting(s);
    s.resumed = true;
  }
  s.paused = true;
}

void Core::resume(int64_t id) { sequence(id).paused = false; }

// --- the tree alone --------------------------------------------------------------------------------------------

Peek Core::peek(const OpenRequest& request) {
  std::unique_ptr<Sequence> s = make_sequence(request);
  const Match m = match(*s, std::min(s->num_known - 1, s->max_cached));
  drop_sequence(std::move(s));
  return {int64_t{m.num_blocks} * n_ + m.partial.len, int64_t{m.num_blocks} * n_};
}

int64_t Core::pin(const OpenRequest& request, int64_t* num_tokens) {
  std::unique_ptr<Sequence> s = make_sequence(request);
  Match m = match(*s, std::min(s->num_known, s->max_cached));
  m.partial = {};
  path_.resize(m.num_blocks);
  while (m.num_blocks > 0 && tree_[path_[m.num_blocks - 1]].pending) path_.resize(--m.num_blocks);
  hold_match(*s, m);
  claims_.clear();
  *num_tokens = int64_t{m.num_blocks} * n_;
  s->id = next_id_++;
  const int64_t id = s->id;
  pins_.add(std::move(s));
  return id;
}

void Core::unpin(int64_t id) {
  if (!pins_.find(id)) throw std::invalid_argument("pin " + std::to_string(id) + " is not held");
  std::unique_ptr<Sequence> pin = pins_.take(id);
  give_back_all(*pin);
  to_waiting(*pin);
  drop_sequence(std::move(pin));
}

void Core::clear(const std::string* salt) {
  for (int32_t i = 0; i < tree_.num_spaces(); ++i) {
    if (!tree_.is_open(i) || (salt && tree_.space(i).salt != *salt)) continue;
    tree_.retire_space(i);
    blocks_.drop_unused(i);
  }
  Event e;
  e.kind = EventKind::cleared;
  blocks_.events.add(e, nullptr);
}

void Core::reset() {
  if (!steps_.empty()) throw std::invalid_argument("cannot reset while a step is open; end or abort it first");
  std::vector<int64_t> ids;
  sequences_.for_each([&](const Sequence& s) { ids.push_back(s.id); });
  for (const int64_t id : ids) release(id, false);
  ids.clear();
  pins_.for_each([&](const Sequence& s) { ids.push_back(s.id); });
  for (const int64_t id : ids) unpin(id);
  clear(nullptr);
}

}  // namespace kvpool::ledger
