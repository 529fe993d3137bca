// Opening and growing sequences.
#include "ledger/core.hpp"

#include <algorithm>
#include <bit>

namespace kvpool::ledger {
namespace {

int32_t block_tokens(const std::vector<GroupSpec>& groups) {
  const int32_t n = groups.at(0).tokens_per_block;
  if (n < 2 || !std::has_single_bit(static_cast<uint32_t>(n))) {
    throw std::invalid_argument("tokens per block must be a power of two, at least 2, got " + std::to_string(n));
  }
  return n;
}

// Every node has a block of the full group, if there is one, or is being filled by an open step.
int32_t node_capacity(const std::vector<GroupSpec>& groups, const Limits& limits) {
  int64_t full = 0, all = 0;
  for (const GroupSpec& g : groups) {
    if (g.life == Life::full) full = std::max<int64_t>(full, g.num_reserved);
    all += g.num_reserved;
  }
  const int64_t open = 2 * (limits.max_step_tokens / block_tokens(groups) + limits.max_sequences);
  return static_cast<int32_t>(std::min<int64_t>((full ? full : 2 * all) + open, INT32_MAX - 1));
}

std::string name(const Sequence& s) { return "sequence " + std::to_string(s.id); }

void append_number(std::string& out, int64_t v) {
  for (int i = 0; i < 8; ++i) out.push_back(static_cast<char>(static_cast<uint64_t>(v) >> (8 * i)));
}

}  // namespace

Core::Core(const std::vector<GroupSpec>& groups, const Limits& limits, const Options& options)
    : limits_(limits),
      n_(block_tokens(groups)),
      shift_(std::countr_zero(static_cast<uint32_t>(n_))),
      blocks_(groups, node_capacity(groups, limits), n_, options),
      groups_(blocks_.groups),
      tree_(blocks_.tree) {
  limits_.checkpoint_interval = blocks_for(limits.checkpoint_interval) * n_;
  for (const GroupSpec& g : groups) {
    has_state_ = has_state_ || g.life == Life::state;
    has_full_ = has_full_ || g.life == Life::full;
    has_other_ = has_other_ || g.life != Life::full;
  }
}

Sequence& Core::sequence(int64_t id) {
  Sequence* s = sequences_.find(id);
  if (!s) throw std::invalid_argument("sequence " + std::to_string(id) + " is not open");
  return *s;
}

int64_t Core::open(const OpenRequest& request) {
  check_size(request.num_tokens, -1);
  std::unique_ptr<Sequence> s = make_sequence(request);
  const int64_t id = s->id = next_id_++;
  sequences_.add(std::move(s));
  return id;
}

std::unique_ptr<Sequence> Core::make_sequence(const OpenRequest& r) {
  if (spare_.empty()) spare_.push_back(std::make_unique<Sequence>());
  std::unique_ptr<Sequence> owned = std::move(spare_.back());
  spare_.pop_back();
  Sequence& s = *owned;
  clear_sequence(s);
  s.space = tree_.open_space(r.salt, r.lora);
  s.prompt_len = s.num_known = r.num_tokens;
  s.max_cached = r.max_cached;
  // Room for what may come, so that a decode step does not move arrays.
  const int64_t room = std::min(limits_.max_seq_len, r.num_tokens + r.num_tokens / 2 + 1024);
  const size_t blocks = static_cast<size_t>(room / n_ + 1);
  s.tokens.reserve(static_cast<size_t>(room));
  s.nodes.reserve(blocks);
  s.finders.reserve(blocks);
  for (Held& held : s.held) held.table.reserve(blocks);
  s.tokens.assign(r.tokens, r.tokens + r.num_tokens);
  for (const Retention& range : r.retention) {
    s.retention.push_back({range, {range.priority, blocks_.timer_of(range.duration)}});
  }
  if (!r.media.empty()) intern_media(s, r.media);
  return owned;
}

// A block's extras name every item it overlaps and where the item begins.
void Core::intern_media(Sequence& s, const std::vector<Media>& media) {
  int64_t last = 0;
  for (const Media& m : media) last = std::max(last, m.end);
  const int64_t num_blocks = std::min(blocks_for(last), blocks_for(s.size()));
  for (int64_t i = 0; i < num_blocks; ++i) {
    std::string bytes;
    for (const Media& m : media) {
      if (m.start >= (i + 1) * n_ || m.end <= i * n_) continue;
      bytes.push_back('M');
      append_number(bytes, i * n_ - m.start);
      append_number(bytes, m.end - m.start);
      append_number(bytes, static_cast<int64_t>(m.key.size()));
      bytes += m.key;
    }
    s.extras.push_back(tree_.intern(bytes));
  }
}

void Core::clear_sequence(Sequence& s) {
  s.admitted = s.paused = s.resumed = s.closing = s.own_tail = false;
  s.keep = true;
  s.open_steps = s.expected = 0;
  s.scheduled = s.computed = s.hit_tokens = s.partial_tokens = s.missed_tokens = s.resumed_tokens = 0;
  s.generation = 0;
  s.last_plan = 0;
  s.tokens.clear();
  s.nodes.clear();
  s.finders.clear();
  s.extras.clear();
  s.retention.clear();
  s.drafts = {};
  s.has_drafts = false;
  s.held.resize(groups_.size());
  for (Held& held : s.held) {
    held.table.clear();
    held.draft_states.clear();
    held.front = 0;
    held.state = held.computed_state = -1;
  }
}

// It holds no block any more.
void Core::drop_sequence(std::unique_ptr<Sequence> s) {
  for (const int32_t e : s->extras) tree_.drop(e);
  tree_.close_space(s->space);
  if (spare_.size() < 256) spare_.push_back(std::move(s));
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
    if (spec.life != Life::full || blocks_for(num_tokens) <= spec.num_blocks) continue;
    std::vector<int64_t> missing;
    for (const BlockGroup& group : groups_) missing.push_back(-group.num_available());
    missing[g] = blocks_for(num_tokens) - spec.num_blocks;
    throw OutOfBlocks("a sequence of " + std::to_string(num_tokens) + " tokens needs " +
                          std::to_string(blocks_for(num_tokens)) + " blocks of group " + std::to_string(g) +
                          ", which has " + std::to_string(spec.num_blocks) + " blocks of " + std::to_string(n_) +
                          " tokens (" + std::to_string(int64_t{spec.num_blocks} * n_) +
                          " tokens) in all; enlarge the budget or shorten the sequence",
                      std::move(ids), std::move(missing));
  }
}

void Core::check_extendable(const Sequence& s) const {
  if (s.closing) throw std::invalid_argument(name(s) + " is released");
  if (s.num_known < s.size()) throw std::invalid_argument(name(s) + " has unknown tokens; resolve them first");
}

void Core::extend(const int64_t* ids, const int32_t* tokens, size_t n) {
  wanted_.clear();
  for (size_t i = 0; i < n; ++i) {
    Sequence& s = sequence(ids[i]);
    if (tokens || s.closing) check_extendable(s);
    if (s.size() >= limits_.max_seq_len) check_size(s.size() + 1, s.id);
    wanted_.push_back({&s, 1});
  }
  for (size_t i = 0; i < n; ++i) {
    Sequence& s = *wanted_[i].sequence;
    s.tokens.push_back(tokens ? tokens[i] : -1);
    s.num_known += tokens != nullptr;
  }
}

void Core::resolve(const int64_t* ids, const int32_t* tokens, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const Sequence& s = sequence(ids[i]);
    if (s.num_known == s.size()) throw std::invalid_argument(name(s) + " has no unknown token to resolve");
  }
  for (size_t i = 0; i < n; ++i) {
    Sequence& s = sequence(ids[i]);
    s.tokens[s.num_known++] = tokens[i];
    if (s.admitted) commit_ready(s);
  }
}

void Core::append(int64_t id, const int32_t* tokens, size_t n) {
  Sequence& s = sequence(id);
  check_extendable(s);
  check_size(s.size() + static_cast<int64_t>(n), id);
  s.tokens.insert(s.tokens.end(), tokens, tokens + n);
  s.num_known = s.size();
}

std::vector<Key> Core::keys(int64_t id) {
  const Sequence& s = sequence(id);
  std::vector<Key> out;
  Key parent = tree_.space(s.space).key;
  for (int64_t i = 0; i < s.num_known / n_; ++i) {
    parent = tree_.make_key(parent, &s.tokens[i * n_], n_, s.extras_of(static_cast<int32_t>(i)));
    out.push_back(parent);
  }
  return out;
}

std::vector<std::string> Core::extras(int64_t id) {
  const Sequence& s = sequence(id);
  std::vector<std::string> out;
  for (int64_t i = 0; i < s.num_known / n_; ++i) {
    out.push_back(tree_.named_extras(s.space, s.extras_of(static_cast<int32_t>(i))));
  }
  return out;
}

int32_t Core::matched(int64_t id) {
  Sequence& s = sequence(id);
  return match(s, std::min(s.num_known - 1, s.max_cached)).num_blocks;
}

std::vector<std::string> Core::in_tree(int64_t id) {
  Sequence& s = sequence(id);
  const int64_t limit = std::min(s.num_known - 1, s.max_cached);
  match(s, limit);
  const size_t size = static_cast<size_t>(std::max<int64_t>(0, limit) / n_);
  std::vector<std::string> out(groups_.size(), std::string(size, '\0'));
  for (int g = 0; g < num_groups(); ++g) {
    for (size_t i = 0; i < path_.size(); ++i) out[static_cast<size_t>(g)][i] = will_have(g, path_[i]);
  }
  return out;
}

void Core::expect(int64_t id, int32_t num_blocks) {
  Sequence& s = sequence(id);
  if (s.admitted)
    throw std::invalid_argument(name(s) + " is admitted already; tell what a tier has before its first step");
  s.expected = num_blocks;
}

// The sequence's last node in the tree stays while the sequence lives, whatever happens to its blocks.
void Core::move_end(int32_t from, int32_t to) {
  blocks_.hold_node(to);
  blocks_.drop_node(from);
}

}  // namespace kvpool::ledger
