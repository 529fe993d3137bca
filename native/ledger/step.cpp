// Opening a step: plan everything, check that it fits (plan.cpp), then carry it out.
#include "ledger/core.hpp"

namespace kvpool::ledger {

const Step& Core::begin(const std::vector<Item>& items, StepArrays& arrays, bool commit, int64_t* num_samples) {
  want(items);
  return begin_wanted(arrays, commit, num_samples);
}

const Step& Core::decode(int64_t previous, const int64_t* ids, const int32_t* tokens, size_t n, StepArrays& arrays,
                         int64_t* num_samples) {
  if (previous >= 0) end(previous);
  extend(ids, tokens, n);  // leaves them in wanted_
  return begin_wanted(arrays, true, num_samples);
}

void Core::want(const std::vector<Item>& items) {
  wanted_.clear();
  for (const Item& item : items) wanted_.push_back({&sequence(item.sequence), item.max_tokens});
}

const Step& Core::begin_wanted(StepArrays& arrays, bool commit, int64_t* num_samples) {
  if (steps_.size() >= 2) throw std::invalid_argument("two steps are open already; end or abort the older one first");
  blocks_.expire();
  Step& step = spare_step();
  const size_t fitting = plan(step, arrays.max_sequences, commit, false);
  if (fitting < wanted_.size()) out_of_blocks(step, fitting);
  tree_.seal();
  step.states.assign(step.entries.size() * groups_.size(), -1);
  step.reads.assign(step.entries.size() * groups_.size(), -1);
  size_t copy = 0;
  for (Entry& entry : step.entries) {
    if (!entry.plain || entry.num_pending) carry_out(step, entry, copy);
    entry.seq->own_tail = true;
  }
  claims_.clear();
  step.id = next_step_++;
  steps_.push_back(std::move(spare_steps_.back()));
  spare_steps_.pop_back();
  arrays.fill(step, num_samples);
  return step;
}

Step& Core::spare_step() {
  if (spare_steps_.empty()) spare_steps_.push_back(std::make_unique<Step>());
  return *spare_steps_.back();
}

// `copy`: the first of the step's copies that is not an earlier entry's.
void Core::carry_out(Step& step, Entry& entry, size_t& copy) {
  Sequence& s = *entry.seq;
  const int32_t self = static_cast<int32_t>(&entry - step.entries.data());
  if (entry.num_drafts) {
    s.drafts.tokens.resize(static_cast<size_t>(entry.num_drafts));
    s.drafts.parents.resize(static_cast<size_t>(entry.num_drafts));
    s.has_drafts = false;
  }
  if (entry.taken) {
    blocks_.take_over(entry.taken);
    ++totals_.taken;
  }
  for (int g = 0; entry.admitted && g < num_groups(); ++g) {
    if (!blocks_.is(g, Life::state)) claim_pending(g, s, entry);
  }
  if (entry.external) take_onboards(step, entry);
  for (int g = 0; g < num_groups(); ++g) {
    Held& held = s.held[g];
    if (blocks_.is(g, Life::state)) {
      step.reads[self * groups_.size() + g] = held.state;
      step.states[self * groups_.size() + g] = held.state = blocks_.take(g);
      drop_draft_states(s, g);
      for (int32_t i = 0; i < entry.num_drafts; ++i) held.draft_states.push_back(blocks_.take(g));
      continue;
    }
    const size_t size = static_cast<size_t>(blocks_for(entry.last()));
    while (held.table.size() < size) held.table.push_back(blocks_.take(g));
  }
  for (; copy < step.copies.size() && step.copies[copy].entry == self; ++copy) {
    Copy& c = step.copies[copy];
    c.dst = blocks_.take(c.group);
    s.held[c.group].table[c.index] = c.dst;
    ++s.generation;
    ++totals_.copied;
  }
  store_pending(entry);
}

void Core::store_pending(const Entry& entry) {
  Sequence& s = *entry.seq;
  for (int32_t i = entry.num_nodes; i < entry.num_nodes + entry.num_pending; ++i) {
    const Worth worth = block_worth(s, i);
    for (int g = 0; g < num_groups(); ++g) {
      if (blocks_.is(g, Life::state) || s.held[g].table[i] < 0) continue;
      blocks_.attach(g, s.held[g].table[i], s.nodes[i], worth);
    }
  }
}

// Blocks for what an admitted sequence expects from below: all that the tree has not. Of a state it is the one at the
// end, which the step reads.
void Core::take_onboards(Step& step, const Entry& entry) {
  Sequence& s = *entry.seq;
  const int32_t self = static_cast<int32_t>(&entry - step.entries.data());
  const int32_t count = static_cast<int32_t>(whole_blocks(entry.start));
  const std::vector<Key> known = keys(s.id);
  const auto onboard = [&](int g, int32_t i) {
    step.onboards.push_back({self, g, blocks_.take(g), i, known[static_cast<size_t>(i)]});
    return step.onboards.back().block;
  };
  for (int g = 0; g < num_groups(); ++g) {
    Held& held = s.held[g];
    if (blocks_.is(g, Life::state)) {
      held.state = held.computed_state = onboard(g, count - 1);
      continue;
    }
    const int32_t sink = sink_blocks(g);
    for (int32_t i = 0; i < count; ++i) {
      if (i == sink) i = held.front;
      if (i >= count) break;
      if (held.table[i] < 0) held.table[i] = onboard(g, i);
    }
  }
}

// Blocks matched before an earlier sequence of this step had them: they are there now.
void Core::claim_pending(int g, Sequence& s, const Entry& entry) {
  Held& held = s.held[g];
  const int32_t k = entry.num_nodes, sink = sink_blocks(g);
  for (int32_t i = 0; i < k; ++i) {
    if (i == sink) i = held.front;
    if (i >= k) break;
    if (held.table[i] >= 0 || tree_.block(s.nodes[i], g) < 0) continue;  // what is not there comes from below
    held.table[i] = tree_.block(s.nodes[i], g);
    blocks_.claim(g, held.table[i], nullptr);
  }
}

Step& Core::step_of(int64_t id) {
  for (auto& step : steps_) {
    if (step->id == id) return *step;
  }
  throw std::invalid_argument("step " + std::to_string(id) + " is not open");
}

}  // namespace kvpool::ledger
