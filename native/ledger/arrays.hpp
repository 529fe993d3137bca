// The index tensors of a step, filled in place. Rows of block tables are rewritten only where they changed.
#pragma once

#include <cstdint>
#include <vector>

#include "ledger/sequence.hpp"

namespace kvpool::ledger {

struct GroupArrays {
  int64_t* slots = nullptr;        // [T]
  int32_t* block_table = nullptr;  // [S, M]
  int64_t table_width = 0;         // M
  int32_t* seq_lens = nullptr;     // [S]
  int32_t* read_slots = nullptr;   // [S], state groups
  int32_t* write_slots = nullptr;  // [S], state groups
  int32_t* draft_slots = nullptr;  // [S, M], state groups: M drafts
  int32_t tokens_per_block = 0;    // a power of two
};

// The caller keeps the memory alive; addresses never change.
struct StepArrays {
  int64_t* token_ids = nullptr;      // [T]
  int32_t* positions = nullptr;      // [T]
  int32_t* cu_seqlens = nullptr;     // [S + 1]
  int32_t* num_tokens = nullptr;     // [S]
  int32_t* last_rows = nullptr;      // [S]
  int32_t* sample_seqs = nullptr;    // [S]
  int32_t* draft_parents = nullptr;  // [T]
  int64_t max_tokens = 0, max_sequences = 0;
  std::vector<GroupArrays> groups;

  void fill(const Step& step, int64_t* num_samples);

 private:
  struct Row {
    int64_t sequence = -1;
    uint32_t generation = 0;
    int32_t front = 0, size = 0;
  };
  void fill_entry(const Step& step, int64_t r, int64_t first);
  void fill_states(const Step& step, size_t g, int64_t r);
  void clear_rest(int64_t rows, int64_t tokens);
  void fill_row(size_t g, int32_t r, const Sequence& s);
  void fill_drafts(const Entry& entry, int64_t first);
  void fill_slots(size_t g, const Entry& entry, int64_t first);

  bool drafts_seen_ = false;                   // from then on draft_parents is written for every row
  std::vector<Row> rows_;                      // [groups, S]
  int64_t used_rows_ = -1, used_tokens_ = -1;  // written by the last fill; -1: everything
};

}  // namespace kvpool::ledger
