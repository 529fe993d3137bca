// A sequence and the steps it takes part in, as the ledger sees them.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ledger/blocks.hpp"

namespace kvpool::ledger {

struct Retention {
  int64_t start, end;  // tokens [start, end)
  uint8_t priority;    // 0..100
  double duration;     // seconds after release; < 0: for ever
};

struct Media {
  int64_t start, end;  // tokens [start, end)
  std::string key;     // opaque, compared in full
};

struct Held {                         // what a sequence holds of one group
  std::vector<int32_t> table;         // block ids in order; -1 = not held
  int32_t front = 0;                  // entries [sink, front) are -1: behind the window or chunk
  int32_t state = -1;                 // state groups: the state at `scheduled`; -1 = none yet
  int32_t computed_state = -1;        // the state at `computed`, held as `state` or by an open step that reads it
  std::vector<int32_t> draft_states;  // state groups: states after each draft token
};

struct Drafts {  // tokens computed after the last known one; none is the sequence's until accepted
  std::vector<int32_t> tokens;
  std::vector<int32_t> parents;  // index of the draft each follows; -1 = the last known token
};

struct alignas(64) Sequence {  // what a decode step reads stands first
  int64_t id = 0;
  bool admitted = false, paused = false, resumed = false, closing = false, keep = true;
  bool has_drafts = false;  // for the next step; false once a step computed them
  bool own_tail = false;    // the partly filled block its next token goes into is known to be its own, in every group
  int32_t space = 0;
  int32_t open_steps = 0;
  uint32_t generation = 0;              // raised when a table entry changes that existed before
  int64_t num_known = 0;                // leading tokens whose ids are known
  int64_t scheduled = 0, computed = 0;  // tokens covered by open and by ended steps
  uint64_t last_plan = 0;               // the last step it was planned for
  std::vector<int32_t> tokens;          // -1 = unknown
  std::vector<Held> held;               // one a group
  std::vector<int32_t> nodes;           // its full blocks in the tree, leading ones
  std::vector<uint64_t> finders;        // of its leading full blocks with known tokens
  std::vector<int32_t> extras;          // interned extras of its blocks; missing = none
  int64_t prompt_len = 0, max_cached = 0;
  int64_t hit_tokens = 0, partial_tokens = 0, missed_tokens = 0, resumed_tokens = 0;
  int32_t expected = 0;  // leading blocks a tier below has, from admission on
  std::vector<std::pair<Retention, Worth>> retention;
  Drafts drafts;

  int64_t size() const { return static_cast<int64_t>(tokens.size()); }
  int32_t extras_of(int32_t block) const { return block < static_cast<int32_t>(extras.size()) ? extras[block] : 0; }
};

struct Copy {
  int32_t entry, group, index;  // whose table entry
  int32_t src, dst, num_tokens;
};

struct Onboard {  // a block to be filled from a tier below before the step reads it
  int32_t entry, group, block, index;
  Key key;
};

struct Entry {
  Sequence* seq = nullptr;
  int64_t start = 0;
  int32_t num_tokens = 0;   // known tokens computed
  int32_t num_drafts = 0;   // rows after them
  int64_t size = 0;         // the sequence's tokens when the step began
  bool admitted = false;    // in this step
  bool external = false;    // of the first start / N blocks, what the tree lacks comes from a tier below
  bool plain = false;       // takes no block and changes none: the rule while decoding
  int32_t taken = 0;        // node that becomes this sequence's own
  int32_t num_pending = 0;  // nodes this step fills, the last ones of seq->nodes
  int32_t num_nodes = 0;    // seq->nodes before them
  int32_t num_matched = 0;  // blocks the tree alone would have given it
  int32_t partial_tokens = 0;
  int64_t cached_tokens = 0;

  int64_t end() const { return start + num_tokens; }
  int64_t last() const { return end() + num_drafts; }
};

struct Step {
  int64_t id = 0;
  bool commit = true;
  std::vector<Entry> entries;
  std::vector<int32_t> sizes;   // [entries, groups]: table length before the step
  std::vector<int32_t> states;  // [entries, groups]: state written by this step
  std::vector<int32_t> reads;   // [entries, groups]: state it starts from, held until the step ends; -1 = none
  std::vector<Copy> copies;     // their sources are held until the step ends
  std::vector<Onboard> onboards;
};

}  // namespace kvpool::ledger
