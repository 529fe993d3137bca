// The logical ledger: whole-request and whole-step operations on sequences. Integers only.
//
// Invariants (check() verifies them):
//  - of every group, used + cached + free == committed; a block is free, cached (ref 0, in the tree, in one list) or
//  used;
//  - a block's node names the block back; a block in the tree is never written;
//  - in a full group a cached block's children stand before it: the front of the lowest list is a leaf;
//  - ref counts equal the holders: sequences' tables and states, copy sources of open steps, pins.
// A caller holds mutex() around every call; nothing here calls back.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ledger/arrays.hpp"
#include "ledger/blocks.hpp"
#include "ledger/sequence.hpp"
#include "ledger/sequence_map.hpp"

namespace kvpool::ledger {

struct Limits {
  int64_t max_sequences = 0, max_step_tokens = 0, max_seq_len = 0, num_draft = 0, checkpoint_interval = 0;
};

// Raised to Python as OutOfBlocks.
struct OutOfBlocks : std::runtime_error {
  OutOfBlocks(const std::string& what, std::vector<int64_t> ids, std::vector<int64_t> missing_blocks = {})
      : std::runtime_error(what), sequences(std::move(ids)), missing(std::move(missing_blocks)) {}
  std::vector<int64_t> sequences;
  std::vector<int64_t> missing;  // blocks, by group, < 0: to spare; empty when more would not help
};

// Raised to Python as UnsupportedError.
struct Unsupported : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Item {
  int64_t sequence;
  int64_t max_tokens;
};

struct Wanted {  // an item, looked up
  Sequence* sequence;
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

struct Move {  // a slot, or a block, that goes elsewhere
  int32_t group;
  int64_t src, dst;
};

struct Totals {
  int64_t hit_tokens = 0, partial_tokens = 0, missed_tokens = 0, resumed_tokens = 0, onboarded_tokens = 0, admitted = 0;
  int64_t copied = 0, taken = 0, adopted = 0;
};

struct Peek {
  int64_t num_tokens = 0;  // that would be found
  int64_t num_whole = 0;   // of them in whole blocks
};

class Core {
 public:
  Core(const std::vector<GroupSpec>& groups, const Limits& limits, const Options& options);

  // --- sequences (core.cpp, lifecycle.cpp)
  int64_t open(const OpenRequest& request);
  void extend(const int64_t* ids, const int32_t* tokens, size_t n);  // tokens null: one unknown token each
  void resolve(const int64_t* ids, const int32_t* tokens, size_t n);
  void append(int64_t id, const int32_t* tokens, size_t n);
  void rewind(int64_t id, int64_t num_tokens);
  int64_t fork(int64_t id);
  void release(int64_t id, bool keep);
  void pause(int64_t id);
  void resume(int64_t id);
  Peek peek(const OpenRequest& request);
  int64_t pin(const OpenRequest& request, int64_t* num_tokens);
  void unpin(int64_t pin);
  void clear(const std::string* salt);  // null: all
  void reset();

  // --- steps (step.cpp, finish.cpp, drafts.cpp)
  const Step& begin(const std::vector<Item>& items, StepArrays& arrays, bool commit, int64_t* num_samples);
  // Ends the step before, if there is one, appends a token to each sequence and begins the step that computes it.
  const Step& decode(int64_t previous, const int64_t* ids, const int32_t* tokens, size_t n, StepArrays& arrays,
                     int64_t* num_samples);
  size_t fits(const std::vector<Item>& items);                   // leading items that would fit; changes nothing
  std::vector<int64_t> missing(const std::vector<Item>& items);  // for the first that does not fit, as in OutOfBlocks
  void end(int64_t step);
  void abort(int64_t step);
  void set_drafts(int64_t id, Drafts drafts);  // for the next step that reaches the sequence's end
  void forget_drafts(int64_t id);              // unless a step took them
  std::vector<Move> accept(int64_t id, const std::vector<int32_t>& indices);

  // --- memory (resize.cpp)
  // Returns the blocks reached; `moves` must be carried out before the next step; `stopped_by` names a pinned block.
  int32_t resize(int g, int32_t num_blocks, std::vector<Move>* moves, int32_t* stopped_by);

  // --- tiers
  std::vector<Key> keys(int64_t id);            // identities of its full blocks with known tokens
  std::vector<std::string> extras(int64_t id);  // of the same blocks; see Tree::named_extras
  int32_t matched(int64_t id);                  // leading whole blocks the tree would give it now
  // By group, for each whole block a match of a waiting sequence may have: 1 where the tree has it, else 0.
  std::vector<std::string> in_tree(int64_t id);
  void expect(int64_t id, int32_t num_blocks);  // leading blocks it can have with what tiers below fill

  // --- looking
  Sequence& sequence(int64_t id);
  bool is_open(int64_t id) const { return sequences_.find(id) != nullptr; }
  std::vector<std::string> check();  // check.cpp
  Blocks& blocks() { return blocks_; }
  int num_groups() const { return blocks_.num_groups(); }
  const Totals& totals() const { return totals_; }
  size_t num_sequences() const { return sequences_.size(); }
  int32_t tokens_per_block() const { return n_; }
  std::mutex& mutex() { return mutex_; }

 private:
  struct Match {
    int32_t num_blocks = 0;  // of path_, which may go on
    Candidate partial;
  };

  // core.cpp
  void check_size(int64_t num_tokens, int64_t id) const;
  void check_extendable(const Sequence& s) const;
  std::unique_ptr<Sequence> make_sequence(const OpenRequest& request);
  void clear_sequence(Sequence& s);
  void drop_sequence(std::unique_ptr<Sequence> s);
  void intern_media(Sequence& s, const std::vector<Media>& media);

  // match.cpp
  void ensure_finders(Sequence& s, int64_t num_blocks);
  Match match(Sequence& s, int64_t limit);
  int32_t longest_valid(int g, int32_t n) const;
  bool usable_partial(int32_t n, int32_t common) const;
  void admit(Entry& entry);
  void hold_match(Sequence& s, const Match& m);
  void hold_expected(Sequence& s, int32_t num_blocks);
  bool will_have(int g, int32_t n) const;
  int32_t first_needed(int g, int64_t position) const;  // first block a token at `position` still reads
  int32_t sink_blocks(int g) const;

  // step.cpp
  void want(const std::vector<Item>& items);
  Step& spare_step();
  size_t plan(Step& step, int64_t max_rows, bool commit, bool count_room);
  void plan_entry(Step& step, Entry& entry, int64_t most, int64_t room);
  int64_t until_checkpoint(const Sequence& s, int64_t most) const;
  void plan_write(Step& step, Entry& entry);
  void find_pending(const Step& step, const Entry& entry);
  void add_pending(Step& step);
  void add_pending(Entry& entry);
  void promise(const Sequence& s, int32_t index, int32_t n);
  void drop_pending(Entry& entry);
  void to_waiting(Sequence& s);
  void claim_pending(int g, Sequence& s, const Entry& entry);
  bool fits_now() const;
  void undo_plan(Step& step);
  bool is_shared(const Sequence& s, int32_t n) const;
  std::vector<int64_t> missing_now() const;  // while planning
  [[noreturn]] void out_of_blocks(Step& step, size_t first);
  const Step& begin_wanted(StepArrays& arrays, bool commit, int64_t* num_samples);
  void carry_out(Step& step, Entry& entry, size_t& copy);
  void take_onboards(Step& step, const Entry& entry);
  void store_pending(const Entry& entry);
  Step& step_of(int64_t id);

  // finish.cpp
  void end_entry(Step& step, Entry& entry);
  void store_onboards(const Step& step, const Entry& entry);
  void count_admission(const Entry& entry);
  void apply_retention(Sequence& s, int32_t num_blocks);
  void store_state(Sequence& s, int g);
  void give_back_behind(Sequence& s, int g);
  bool serves_checkpoint(const Sequence& s, int g, int32_t index) const;
  bool is_checkpoint(const Sequence& s, int64_t position) const;
  void retire(Step& step);
  void abort_step(Step& step);
  void abort_entry(Step& step, Entry& entry);
  void commit_ready(Sequence& s);
  void adopt(Sequence& s, int32_t index, int32_t node);
  void close(Sequence& s);
  void store_all(Sequence& s);
  void store_tail(Sequence& s);
  void give_back_all(Sequence& s);
  void drop_draft_states(Sequence& s);
  void drop_draft_states(Sequence& s, int g);
  std::optional<Worth> worth_of(const Sequence& s, int64_t start, int64_t end) const;
  Worth block_worth(const Sequence& s, int32_t index) const;

  // lifecycle.cpp
  void check_rewindable(const Sequence& s, int64_t position) const;
  void rewind_group(Sequence& s, int g, int64_t position);
  void require_idle(const Sequence& s, const char* what) const;

  // check.cpp
  void check_tail(const Sequence& s, std::vector<std::string>& lines) const;
  void check_heap(int g, std::vector<std::string>& lines) const;
  void check_lists(int g, std::vector<std::string>& lines) const;
  void check_tree(const std::unordered_map<int32_t, int32_t>& ends, std::vector<std::string>& lines) const;

  void move_end(int32_t from, int32_t to);
  int64_t whole_blocks(int64_t tokens) const { return tokens >> shift_; }
  int64_t blocks_for(int64_t tokens) const { return (tokens + n_ - 1) >> shift_; }
  int32_t end_node(const Sequence& s) const { return s.nodes.empty() ? -s.space : s.nodes.back(); }

  std::mutex mutex_;
  Limits limits_;
  int32_t n_;                                                      // tokens per block, a power of two
  int32_t shift_;                                                  // its logarithm
  bool has_state_ = false, has_full_ = false, has_other_ = false;  // other: not full
  Blocks blocks_;
  std::vector<BlockGroup>& groups_;  // blocks_.groups
  Tree& tree_;                       // blocks_.tree
  SequenceMap sequences_, pins_;
  std::vector<std::unique_ptr<Sequence>> spare_;
  int64_t next_id_ = 0, next_step_ = 0;
  uint64_t num_plans_ = 0;
  std::vector<std::unique_ptr<Step>> steps_;  // open ones, oldest first
  std::vector<std::unique_ptr<Step>> spare_steps_;
  std::vector<int64_t> needed_;  // [groups], while planning
  std::vector<Wanted> wanted_;   // items of the step that is planned
  std::vector<Claim> claims_;
  std::vector<int32_t> filling_;  // entries whose filled blocks are not in the tree yet, while planning
  std::vector<int32_t> path_;
  Totals totals_;
};

}  // namespace kvpool::ledger
