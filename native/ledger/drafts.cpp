// Speculation: tokens computed behind the last known one, and which of them are kept.
#include <algorithm>

#include "ledger/core.hpp"

namespace kvpool::ledger {

void Core::set_drafts(int64_t id, Drafts drafts) {
  Sequence& s = sequence(id);
  const int64_t k = static_cast<int64_t>(drafts.tokens.size());
  if (k > limits_.num_draft) {
    throw std::invalid_argument("sequence " + std::to_string(id) + " has " + std::to_string(k) +
                                " draft tokens; the plan allows num_draft = " + std::to_string(limits_.num_draft));
  }
  if (drafts.parents.empty()) {  // a chain
    for (int64_t i = 0; i < k; ++i) drafts.parents.push_back(static_cast<int32_t>(i) - 1);
  }
  if (static_cast<int64_t>(drafts.parents.size()) != k) throw std::invalid_argument("drafts need one parent a token");
  for (int64_t i = 0; i < k; ++i) {
    if (drafts.parents[i] < -1 || drafts.parents[i] >= i) {
      throw std::invalid_argument("draft " + std::to_string(i) + " follows draft " + std::to_string(drafts.parents[i]) +
                                  "; a parent is an earlier draft, or -1 for the last known token");
    }
  }
  s.has_drafts = k > 0;
  s.drafts = std::move(drafts);
}

void Core::forget_drafts(int64_t id) {
  Sequence* s = sequences_.find(id);
  if (!s || !s->has_drafts) return;
  s->drafts = {};
  s->has_drafts = false;
}

void Core::drop_draft_states(Sequence& s) {
  for (int g = 0; g < num_groups(); ++g) drop_draft_states(s, g);
}

void Core::drop_draft_states(Sequence& s, int g) {
  for (const int32_t b : s.held[g].draft_states) blocks_.unclaim(g, b);
  s.held[g].draft_states.clear();
}

std::vector<Move> Core::accept(int64_t id, const std::vector<int32_t>& indices) {
  Sequence& s = sequence(id);
  require_idle(s, "accept drafts of");
  const int64_t base = s.size();
  if (s.computed != base)
    throw std::invalid_argument("the last step did not compute drafts of sequence " + std::to_string(id));
  int32_t parent = -1;
  for (const int32_t i : indices) {
    if (i < 0 || i >= static_cast<int32_t>(s.drafts.tokens.size()) || s.drafts.parents[i] != parent) {
      throw std::invalid_argument("accepted drafts must follow one another; draft " + std::to_string(i) +
                                  " does not follow " + std::to_string(parent));
    }
    parent = i;
  }
  check_size(base + static_cast<int64_t>(indices.size()), id);
  std::vector<Move> moves;
  const int64_t end = base + static_cast<int64_t>(indices.size());
  for (int g = 0; g < num_groups(); ++g) {
    Held& held = s.held[g];
    if (blocks_.is(g, Life::state)) {
      if (parent < 0 || held.draft_states.empty()) continue;
      std::swap(held.state, held.draft_states[parent]);
      held.computed_state = held.state;
      continue;
    }
    for (size_t j = 0; j < indices.size(); ++j) {
      const int64_t from = base + indices[j], to = base + static_cast<int64_t>(j);
      if (from == to) continue;
      moves.push_back(
          {g, int64_t{held.table[from / n_]} * n_ + from % n_, int64_t{held.table[to / n_]} * n_ + to % n_});
    }
    const size_t size = static_cast<size_t>(blocks_for(end));
    while (held.table.size() > size) {
      blocks_.unclaim(g, held.table.back());
      held.table.pop_back();
    }
  }
  drop_draft_states(s);
  for (const int32_t i : indices) s.tokens.push_back(s.drafts.tokens[i]);
  s.num_known = s.computed = s.scheduled = end;
  s.drafts = {};
  ++s.generation;
  commit_ready(s);
  for (int g = 0; g < num_groups(); ++g) give_back_behind(s, g);
  return moves;
}

}  // namespace kvpool::ledger
