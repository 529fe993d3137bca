#include "ledger/block.hpp"

namespace kvpool::ledger {

FreeSet::FreeSet(int32_t capacity) {
  size_t size = static_cast<size_t>(capacity);
  do {
    size = (size + 63) / 64;
    words_.emplace_back(size, 0);
  } while (size > 1);
}

void FreeSet::insert(int32_t id) {
  for (auto& level : words_) {
    uint64_t& word = level[id >> 6];
    const bool was_empty = word == 0;
    word |= uint64_t{1} << (id & 63);
    if (!was_empty) return;
    id >>= 6;
  }
}

void FreeSet::erase(int32_t id) {
  for (auto& level : words_) {
    uint64_t& word = level[id >> 6];
    word &= ~(uint64_t{1} << (id & 63));
    if (word) return;
    id >>= 6;
  }
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

int32_t BlockGroup::take_free() {
  const int32_t b = free_.lowest();
  if (b >= 0) {
    erase_free(b);
  }
  return b;
}

void BlockGroup::put_free(int32_t b) {
  blocks_[b] = Block{};
  free_.insert(b);
  ++num_free;
}

void BlockGroup::erase_free(int32_t b) {
  free_.erase(b);
  --num_free;
}

void BlockGroup::relocate(int32_t from, int32_t to) {
  blocks_[to] = blocks_[from];
  if (!blocks_[to].queued) return;
  blocks_[blocks_[to].prev].next = to;
  blocks_[blocks_[to].next].prev = to;
  blocks_[from].queued = 0;
}

void BlockGroup::insert_after(int32_t b, int32_t prev, uint8_t level) {
  Block& block = blocks_[b];
  block.level = level;
  block.queued = 1;
  block.prev = prev;
  block.next = blocks_[prev].next;
  blocks_[prev].next = b;
  blocks_[block.next].prev = b;
  levels_[level >> 6] |= uint64_t{1} << (level & 63);
  ++num_cached;
  int32_t& oldest = recent_[num_pushed_++ & 7];
  if (oldest >= 0) blocks_[oldest].skip = b;
  oldest = b;
}

void BlockGroup::unlink(int32_t b) {
  Block& block = blocks_[b];
  blocks_[block.prev].next = block.next;
  blocks_[block.next].prev = block.prev;
  block.queued = 0;
  --num_cached;
  if (block.prev == block.next && is_head(block.prev)) {
    levels_[block.level >> 6] &= ~(uint64_t{1} << (block.level & 63));
  }
}

int32_t BlockGroup::front() const {
  if (levels_[0]) return front_of(std::countr_zero(levels_[0]));
  if (levels_[1]) return front_of(64 + std::countr_zero(levels_[1]));
  return -1;
}

void BlockGroup::resize(int32_t num_blocks) {
  for (int32_t b = spec.num_blocks; b < num_blocks; ++b) put_free(b);
  for (int32_t b = num_blocks; b < spec.num_blocks; ++b) {
    erase_free(b);
  }
  spec.num_blocks = num_blocks;
}

}  // namespace kvpool::ledger
