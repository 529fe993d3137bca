// A sequence and the steps it takes part in, as the ledger sees them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ledger/tree.hpp"

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

struct Held {                  // what a sequence holds of one group
  std::vector<int32_t> table;  // block ids in order; -1 = not held
  int32_t front = 0;           // entries [sink, front) are -1: behind the window or chunk
  int32_t state = -1;          // state groups: the state at `computed`; -1 = none yet
};

struct Sequence {
  int64_t id = 0;
  bool admitted = false, paused = false, closing = false, keep = true;
  int32_t space = 0;
  int32_t open_steps = 0;
  int64_t prompt_len = 0, max_cached = 0;
  int64_t num_known = 0;                // leading tokens whose ids are known
  int64_t scheduled = 0, computed = 0;  // tokens covered by open and by ended steps
  int64_t hit_tokens = 0, partial_tokens = 0, missed_tokens = 0;
  uint64_t last_plan = 0;         // the last step it was planned for
  uint32_t generation = 0;        // raised when a table entry changes that existed before
  std::vector<int32_t> tokens;    // -1 = unknown
  std::vector<int32_t> nodes;     // its full blocks in the tree, leading ones
  std::vector<uint64_t> finders;  // of its leading full blocks with known tokens
  std::vector<int32_t> extras;    // interned extras of its blocks; missing = none
  std::vector<Retention> retention;
  std::vector<Media> media;
  std::vector<Held> held;  // one a group

  int64_t size() const { return static_cast<int64_t>(tokens.size()); }
  int32_t extras_of(int32_t block) const { return block < static_cast<int32_t>(extras.size()) ? extras[block] : 0; }
};

struct Copy {
  int32_t entry, group, index;  // whose table entry
  int32_t src, dst, num_tokens;
};

struct Entry {
  Sequence* seq;
  int64_t start = 0;
  int32_t num_tokens = 0;
  bool admitted = false;    // in this step
  int32_t taken = 0;        // node that becomes this sequence's own
  int32_t num_pending = 0;  // nodes this step fills, the last ones of seq->nodes
  int32_t num_nodes = 0;    // seq->nodes before them
  int32_t partial_tokens = 0;
  int64_t cached_tokens = 0;
};

struct Step {
  int64_t id = 0;
  bool open = false, commit = true;
  std::vector<Entry> entries;
  std::vector<int32_t> sizes;   // [entries, groups]: table length before the step
  std::vector<int32_t> states;  // [entries, groups]: state written by this step
  std::vector<Copy> copies;     // their sources are held until the step ends
};

}  // namespace kvpool::ledger
