#include "ledger/core.hpp"

#include <algorithm>

namespace kvpool::ledger {
namespace {

int32_t block_tokens(const std::vector<GroupSpec>& groups) {
  for (const GroupSpec& g : groups) {
    if (g.life != Life::state) return g.tokens_per_block;
  }
  return 32;  // only states: nodes still need a length
}

// Every node has a block of the full group, if there is one, or is being filled by an open step.
int32_t node_capacity(const std::vector<GroupSpec>& groups, const Limits& limits, int32_t n) {
  int64_t full = 0, all = 0;
  for (const GroupSpec& g : groups) {
    if (g.life == Life::full) full = std::max<int64_t>(full, g.num_reserved);
    all += g.num_reserved;
  }
  const int64_t open = 2 * (limits.max_step_tokens / n + limits.max_sequences);
  return static_cast<int32_t>(std::min<int64_t>((full ? full : 2 * all) + open, INT32_MAX - 1));
}

}  // namespace

Core::Core(const std::vector<GroupSpec>& groups, const Limits& limits, const Options& options)
    : limits_(limits),
      n_(block_tokens(groups)),
      tree_(node_capacity(groups, limits, n_), n_, static_cast<int>(groups.size()), options.finder_mask,
            options.portable_sha) {
  for (const GroupSpec& g : groups) {
    groups_.emplace_back(g);
    has_state_ = has_state_ || g.life == Life::state;
  }
}

Sequence& Core::sequence(int64_t id) {
  const auto it = sequences_.find(id);
  if (it == sequences_.end()) throw std::invalid_argument("sequence " + std::to_string(id) + " is not open");
  return *it->second;
}

int64_t Core::open(const OpenRequest& r) {
  check_size(r.num_tokens, -1);
  if (spare_.empty()) spare_.push_back(std::make_unique<Sequence>());
  std::unique_ptr<Sequence> owned = std::move(spare_.back());
  spare_.pop_back();
  Sequence& s = *owned;
  reset_sequence(s);
  s.id = next_id_++;
  s.space = tree_.open_space(r.salt, r.lora);
  s.prompt_len = s.num_known = r.num_tokens;
  s.max_cached = r.max_cached;
  const size_t room =
      static_cast<size_t>(std::min<int64_t>(limits_.max_seq_len, r.num_tokens + r.num_tokens / 2 + 1024));
  if (s.tokens.capacity() < room) s.tokens.reserve(room);
  s.tokens.assign(r.tokens, r.tokens + r.num_tokens);
  s.retention = r.retention;
  s.media = r.media;
  const size_t blocks = room / static_cast<size_t>(n_) + 1;
  s.nodes.reserve(blocks);
  s.finders.reserve(blocks);
  for (Held& held : s.held) held.table.reserve(blocks);
  sequences_.emplace(s.id, std::move(owned));
  return s.id;
}

void Core::reset_sequence(Sequence& s) {
  s.admitted = s.paused = s.closing = false;
  s.keep = true;
  s.open_steps = 0;
  s.scheduled = s.computed = s.hit_tokens = s.partial_tokens = s.missed_tokens = 0;
  s.generation = 0;
  s.last_plan = 0;
  s.nodes.clear();
  s.finders.clear();
  s.extras.clear();
  s.held.resize(groups_.size());
  for (Held& held : s.held) {
    held.table.clear();
    held.front = 0;
    held.state = -1;
  }
}

// A sequence that can never be computed is refused at once.
void Core::check_size(int64_t num_tokens, int64_t id) const {
  std::vector<int64_t> ids;
  if (id >= 0) ids.push_back(id);
  if (num_tokens > limits_.max_seq_len) {
    throw OutOfBlocks("a sequence of " + std::to_string(num_tokens) + " tokens is longer than max_seq_len = " +
                          std::to_string(limits_.max_seq_len) + " of the plan; make the plan for longer sequences",
                      std::move(ids));
  }
  for (int g = 0; g < num_groups(); ++g) {
    const GroupSpec& spec = groups_[g].spec;
    if (spec.life != Life::full || ceil_div(num_tokens, n_) <= spec.num_blocks) continue;
    throw OutOfBlocks("a sequence of " + std::to_string(num_tokens) + " tokens needs " +
                          std::to_string(ceil_div(num_tokens, n_)) + " blocks of group " + std::to_string(g) +
                          ", which has " + std::to_string(spec.num_blocks) + " blocks of " + std::to_string(n_) +
                          " tokens (" + std::to_string(int64_t{spec.num_blocks} * n_) +
                          " tokens) in all; enlarge the budget or shorten the sequence",
                      std::move(ids));
  }
}

void Core::extend(const int64_t* ids, const int32_t* tokens, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const Sequence& s = sequence(ids[i]);
    if (s.closing) throw std::invalid_argument("sequence " + std::to_string(ids[i]) + " is released");
    if (s.size() >= limits_.max_seq_len) check_size(s.size() + 1, s.id);
    if (tokens && s.num_known < s.size()) {
      throw std::invalid_argument("sequence " + std::to_string(ids[i]) + " has unknown tokens; resolve them first");
    }
  }
  for (size_t i = 0; i < n; ++i) {
    Sequence& s = sequence(ids[i]);
    s.tokens.push_back(tokens ? tokens[i] : -1);
    if (tokens) ++s.num_known;
  }
}

void Core::append(int64_t id, const std::vector<int32_t>& tokens) {
  Sequence& s = sequence(id);
  if (s.closing) throw std::invalid_argument("sequence " + std::to_string(id) + " is released");
  if (s.num_known < s.size()) {
    throw std::invalid_argument("sequence " + std::to_string(id) + " has unknown tokens; resolve them first");
  }
  check_size(s.size() + static_cast<int64_t>(tokens.size()), id);
  s.tokens.insert(s.tokens.end(), tokens.begin(), tokens.end());
  s.num_known = s.size();
}

}  // namespace kvpool::ledger
