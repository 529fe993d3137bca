#include "ledger/arrays.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

namespace kvpool::ledger {

void StepArrays::fill_row(size_t g, int32_t r, const Sequence& s) {
  const Held& held = s.held[g];
  const int32_t size = static_cast<int32_t>(held.table.size());
  int32_t* row = groups[g].block_table + r * groups[g].table_width;
  Row& seen = rows_[g * max_sequences + r];
  if (seen.sequence == s.id && seen.generation == s.generation) {
    if (seen.size == size && seen.front == held.front) return;
    for (int32_t i = seen.front; i < std::min(held.front, seen.size); ++i) row[i] = held.table[i];
    std::copy(held.table.begin() + std::min(seen.size, size), held.table.end(), row + std::min(seen.size, size));
  } else {
    std::copy(held.table.begin(), held.table.end(), row);
  }
  for (int32_t i = size; i < seen.size; ++i) row[i] = -1;
  seen = {s.id, s.generation, held.front, size};
}

void StepArrays::fill_slots(size_t g, const Entry& entry, int64_t first) {
  const int64_t n = groups[g].tokens_per_block, end = entry.last();
  const int shift = std::countr_zero(static_cast<uint64_t>(n));
  const int32_t* table = entry.seq->held[g].table.data();
  int64_t* out = groups[g].slots + first;
  if (end - entry.start == 1) {
    out[0] = table[entry.start >> shift] * n + (entry.start & (n - 1));
    return;
  }
  for (int64_t p = entry.start; p < end;) {
    const int64_t count = std::min(end - p, n - (p & (n - 1)));
    const int64_t base = table[p >> shift] * n + (p & (n - 1));
    for (int64_t i = 0; i < count; ++i) out[i] = base + i;
    out += count;
    p += count;
  }
}

// Draft rows: positions by depth, and the row each one follows.
void StepArrays::fill_drafts(const Entry& entry, int64_t first) {
  const Drafts& drafts = entry.seq->drafts;
  const int64_t base = first + entry.num_tokens;
  for (int64_t i = first; i < base; ++i) draft_parents[i] = -1;
  for (int32_t i = 0; i < entry.num_drafts; ++i) {
    const int64_t parent = base + drafts.parents[i];
    token_ids[base + i] = drafts.tokens[i];
    positions[base + i] = positions[parent] + 1;
    draft_parents[base + i] = static_cast<int32_t>(parent);
  }
}

// The tokens of one row, its table row and its slots; one loop a tensor, so that each is vectorised.
void StepArrays::fill_entry(const Step& step, int64_t r, int64_t first) {
  const Entry& entry = step.entries[r];
  const Sequence& s = *entry.seq;
  const int64_t n = entry.num_tokens, start = entry.start;
  const int32_t* from = s.tokens.data() + start;
  int64_t* ids = token_ids + first;
  int32_t* at = positions + first;
  if (n == 1) {  // the rule while decoding
    ids[0] = from[0];
    at[0] = static_cast<int32_t>(start);
  } else {
    for (int64_t i = 0; i < n; ++i) ids[i] = from[i];
    for (int64_t i = 0; i < n; ++i) at[i] = static_cast<int32_t>(start + i);
  }
  if (entry.num_drafts || drafts_seen_) fill_drafts(entry, first);
  for (size_t g = 0; g < groups.size(); ++g) {
    groups[g].seq_lens[r] = static_cast<int32_t>(entry.last());
    if (groups[g].read_slots) {
      fill_states(step, g, r);
      continue;
    }
    fill_row(g, static_cast<int32_t>(r), s);
    fill_slots(g, entry, first);
  }
}

void StepArrays::fill_states(const Step& step, size_t g, int64_t r) {
  const GroupArrays& group = groups[g];
  const std::vector<int32_t>& states = step.entries[r].seq->held[g].draft_states;
  group.read_slots[r] = step.reads[r * groups.size() + g];
  group.write_slots[r] = step.states[r * groups.size() + g];
  for (int64_t i = 0; i < group.table_width; ++i) {
    group.draft_slots[r * group.table_width + i] = i < static_cast<int64_t>(states.size()) ? states[i] : -1;
  }
}

// What the last fill wrote beyond this one's rows and tokens says nothing again.
void StepArrays::clear_rest(int64_t rows, int64_t tokens) {
  const int64_t last_rows_used = used_rows_ < 0 ? max_sequences : used_rows_;
  const int64_t last_tokens_used = used_tokens_ < 0 ? max_tokens : used_tokens_;
  for (int64_t r = rows; r < last_rows_used; ++r) {
    num_tokens[r] = 0;
    for (size_t g = 0; g < groups.size(); ++g) {
      groups[g].seq_lens[r] = 0;
      if (groups[g].read_slots) {
        groups[g].read_slots[r] = groups[g].write_slots[r] = -1;
        continue;
      }
      Row& seen = rows_[g * max_sequences + r];
      std::fill_n(groups[g].block_table + r * groups[g].table_width, seen.size, -1);
      seen = Row{};
    }
  }
  if (tokens < last_tokens_used) {
    std::fill(token_ids + tokens, token_ids + last_tokens_used, 0);
    std::fill(positions + tokens, positions + last_tokens_used, 0);
    std::fill(draft_parents + tokens, draft_parents + last_tokens_used, -1);
    for (GroupArrays& group : groups) {
      if (group.slots) std::fill(group.slots + tokens, group.slots + last_tokens_used, -1);
    }
  }
  used_rows_ = rows;
  used_tokens_ = tokens;
}

void StepArrays::fill(const Step& step, int64_t* num_samples) {
  if (rows_.empty()) rows_.resize(groups.size() * max_sequences);
  const int64_t rows = static_cast<int64_t>(step.entries.size());
  int64_t first = 0, samples = 0;
  for (const Entry& entry : step.entries) drafts_seen_ = drafts_seen_ || entry.num_drafts;
  cu_seqlens[0] = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const Entry& entry = step.entries[r];
    fill_entry(step, r, first);
    const int64_t last_known = first + entry.num_tokens - 1;
    num_tokens[r] = entry.num_tokens + entry.num_drafts;
    first += num_tokens[r];
    cu_seqlens[r + 1] = static_cast<int32_t>(first);
    if (entry.end() == entry.seq->size()) {
      last_rows[samples] = static_cast<int32_t>(last_known);
      sample_seqs[samples++] = static_cast<int32_t>(r);
    }
  }
  std::fill(cu_seqlens + rows + 1, cu_seqlens + max_sequences + 1, static_cast<int32_t>(first));
  std::fill(last_rows + samples, last_rows + max_sequences, 0);
  std::fill(sample_seqs + samples, sample_seqs + max_sequences, 0);
  clear_rest(rows, first);
  *num_samples = samples;
}

}  // namespace kvpool::ledger
