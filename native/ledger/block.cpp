#include "ledger/block.hpp"

namespace kvpool::ledger {

FreeSet::FreeSet(int32_t capacity) {
  size_t size = static_cast<size_t>(capacity);
  do {
    size = (size + 63) / 64;
    words_.emplace_back(size, 0);
  } while (size > 1);
}

int32_t FreeSet::lowest() const {
  if (words_.back()[0] == 0) return -1;
  int32_t id = 0;
  for (size_t i = words_.size(); i-- > 0;) id = id << 6 | std::countr_zero(words_[i][id]);
  return id;
}

BlockGroup::BlockGroup(const GroupSpec& s) : spec(s), blocks_(s.num_reserved + kNumLevels), free_(s.num_reserved) {
  for (int l = 0; l < kNumLevels; ++l) blocks_[head(l)].prev = blocks_[head(l)].next = head(l);
  for (int32_t& b : recent_) b = -1;
  const int32_t committed = spec.num_blocks;
  spec.num_blocks = 0;
  resize(committed);
}

void BlockGroup::relocate(int32_t from, int32_t to) {
  blocks_[to] = blocks_[from];
  if (!blocks_[to].queued) return;
  blocks_[blocks_[to].prev].next = to;
  blocks_[blocks_[to].next].prev = to;
  blocks_[from].queued = 0;
}

void BlockGroup::resize(int32_t num_blocks) {
  for (int32_t b = spec.num_blocks; b < num_blocks; ++b) put_free(b);
  for (int32_t b = num_blocks; b < spec.num_blocks; ++b) {
    erase_free(b);
  }
  spec.num_blocks = num_blocks;
}

}  // namespace kvpool::ledger
