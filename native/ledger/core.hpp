// The logical ledger: whole-request and whole-step operations over groups, tree and sequences. Integers only.
//
// Invariants (check() verifies them):
//  - of every group, used + cached + free == committed; a block is free, cached (ref 0, in the tree, in one list) or
//  used;
//  - a block's node names the block back; a block in the tree is never written;
//  - in a full group a cached block's children stand before it: the front of the lowest list is a leaf;
//  - ref counts equal the holders: sequences' tables, states, copy sources of open steps, pins.
// Every public call takes the mutex; none calls back into the caller while holding it.
#pragma once

#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ledger/arrays.hpp"
#include "ledger/block.hpp"
#include "ledger/sequence.hpp"
#include "ledger/tree.hpp"

namespace kvpool::ledger {

struct Limits {
  int64_t max_sequences = 0, max_step_tokens = 0, max_seq_len = 0, num_draft = 0, checkpoint_interval = 0;
};

struct Options {
  uint64_t finder_mask = ~uint64_t{0};
  bool portable_sha = false;
};

// Raised to Python as OutOfBlocks.
struct OutOfBlocks : std::runtime_error {
  OutOfBlocks(const std::string& what, std::vector<int64_t> ids)
      : std::runtime_error(what), sequences(std::move(ids)) {}
  std::vector<int64_t> sequences;
};

// Raised to Python as UnsupportedError.
struct Unsupported : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Item {
  int64_t sequence;
  int64_t max_tokens;
};

struct OpenRequest {
  const int32_t* tokens = nullptr;
  int64_t num_tokens = 0;
  std::string salt, lora;
  std::vector<Media> media;
  std::vector<Retention> retention;
  int64_t max_cached = INT64_MAX;
};

struct Totals {
  int64_t hit_tokens = 0, partial_tokens = 0, missed_tokens = 0, admitted = 0;
  int64_t allocated = 0, evicted = 0, copied = 0, taken = 0, adopted = 0, stored = 0;
};

class Core {
 public:
  Core(const std::vector<GroupSpec>& groups, const Limits& limits, const Options& options);

  // --- sequences
  int64_t open(const OpenRequest& request);
  void extend(const int64_t* ids, const int32_t* tokens, size_t n);  // tokens null: one unknown token each
  void append(int64_t id, const std::vector<int32_t>& tokens);
  void release(int64_t id, bool keep);

  // --- steps
  const Step& begin(const std::vector<Item>& items, StepArrays& arrays, bool commit, int64_t* num_samples);
  size_t fits(const std::vector<Item>& items);  // leading items that would fit; changes nothing
  void end(int64_t step);
  void abort(int64_t step);

  // --- looking
  Sequence& sequence(int64_t id);
  std::vector<std::string> check();
  const BlockGroup& group(int g) const { return groups_[g]; }
  int num_groups() const { return static_cast<int>(groups_.size()); }
  const Tree& tree() const { return tree_; }
  const Totals& totals() const { return totals_; }
  size_t num_sequences() const { return sequences_.size(); }
  std::mutex& mutex() { return mutex_; }

 private:
  struct Claim {
    int32_t group, block, prev;  // prev < 0: it had other holders
    uint8_t level;
  };
  struct Match {
    int32_t num_blocks = 0;
    Candidate partial;
  };

  // match.cpp
  void ensure_finders(Sequence& s, int64_t num_blocks);
  Match match(Sequence& s, int64_t limit);
  int32_t longest_valid(int g, int32_t n) const;
  bool usable_partial(int32_t n, int32_t common) const;
  void admit(Entry& entry);
  int32_t first_needed(int g, int64_t position) const;  // first block a token at `position` still reads
  int32_t sink_blocks(int g) const;

  // step.cpp
  size_t plan(Step& step, const std::vector<Item>& items, int64_t max_rows, bool commit, bool count_room);
  void plan_entry(Step& step, Entry& entry, int64_t max_tokens, int64_t room);
  void plan_write(Step& step, Entry& entry);
  void add_pending(Entry& entry);
  void drop_pending(Entry& entry);
  void to_waiting(Sequence& s);
  void claim_pending(int g, Sequence& s, const Entry& entry);
  bool fits_now() const;
  void undo_plan(Step& step);
  bool is_shared(const Sequence& s, int32_t n) const;
  void take_over(int32_t n);
  [[noreturn]] void out_of_blocks(Step& step, size_t first, const std::vector<Item>& items);
  void carry_out(Step& step, Entry& entry);
  Step& step_of(int64_t id);

  void check_size(int64_t num_tokens, int64_t id) const;
  void reset_sequence(Sequence& s);
  void check_lists(int g, std::vector<std::string>& lines) const;
  void check_tree(const std::unordered_map<int32_t, int32_t>& ends, std::vector<std::string>& lines) const;

  // finish.cpp
  void end_entry(Step& step, Entry& entry);
  void swap_state(Sequence& s, int g, int32_t written);
  void give_back_behind(Sequence& s, int g);
  bool serves_checkpoint(const Sequence& s, int g, int32_t index) const;
  void retire(Step& step);
  void abort_step(Step& step);
  void commit_ready(Sequence& s);
  void adopt(Sequence& s, int32_t index, int32_t node);
  void close(Sequence& s);
  void store_tail(Sequence& s);
  void give_back_all(Sequence& s);
  void abort_entry(Step& step, Entry& entry);

  // evict.cpp
  int32_t take(int g);  // a block with ref 1: free, or evicted
  int32_t evict(int g);
  void claim(int g, int32_t b, std::vector<Claim>* undo);
  void unclaim(int g, int32_t b);
  void remove_node(int32_t n);
  void prune(int32_t n);
  uint8_t level_of(int g, int32_t b) const;
  void sink(int g, int32_t n);
  uint8_t priority_of(const Sequence& s, int64_t start, int64_t end) const;
  void attach(int g, int32_t b, int32_t n, uint8_t priority);
  void move_end(int32_t from, int32_t to);

  static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
  int32_t end_node(const Sequence& s) const { return s.nodes.empty() ? -s.space : s.nodes.back(); }

  std::mutex mutex_;
  std::vector<BlockGroup> groups_;
  Limits limits_;
  int32_t n_;  // tokens per block
  bool has_state_ = false;
  Tree tree_;
  std::unordered_map<int64_t, std::unique_ptr<Sequence>> sequences_;
  std::vector<std::unique_ptr<Sequence>> spare_;
  int64_t next_id_ = 0, next_step_ = 0;
  uint64_t num_plans_ = 0;
  std::vector<std::unique_ptr<Step>> steps_;  // open ones, oldest first
  std::vector<std::unique_ptr<Step>> spare_steps_;
  std::vector<int64_t> needed_;  // [groups], while planning
  std::vector<Claim> claims_;
  std::vector<int32_t> path_;
  uint32_t clock_ = 0;  // releases so far
  Totals totals_;
};

}  // namespace kvpool::ledger
