// The blocks of one group: holders, the free set, and the lists of cached blocks in the order they would be evicted.
// Knows nothing of tokens or of the tree beyond a node's number.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "ledger/pages.hpp"

namespace kvpool::ledger {

constexpr int kNumLevels = 101;  // priorities 0..100
constexpr uint8_t kDefaultPriority = 35;
constexpr int kAhead = 16;  // evictions that memory is fetched ahead: a power of two

enum class Life : uint8_t { full, window, chunk, state };

struct GroupSpec {
  Life life = Life::full;
  int32_t num_blocks = 0;        // committed
  int32_t num_reserved = 0;      // addresses
  int32_t tokens_per_block = 0;  // the same for all groups: a checkpoint of a state stands at the end of a block
  int64_t window = 0;            // tokens seen, itself included
  int64_t chunk = 0;
  int64_t sink_tokens = 0;
};

struct Block {
  int32_t ref;         // sequences, pins and open steps that hold it
  int32_t node;        // its node in the tree; 0 for none
  int32_t prev, next;  // neighbours in its list, while cached
  int32_t skip;        // a block pushed kAhead later: a hint for prefetching, may be stale
  uint32_t uses;       // times claimed since it was filled
  uint32_t last;       // value of the ledger's clock of releases when it was last released
  uint8_t level;       // effective priority: the list it stands in
  uint8_t own;         // priority it was given
  uint8_t queued;      // 1 while cached
  uint8_t timer;       // class of its duration; 0 = for ever
};
static_assert(sizeof(Block) == 32);

// Lowest number first, in O(levels).
class FreeSet {
 public:
  explicit FreeSet(int32_t capacity);
  void insert(int32_t id) {
    for (auto& level : words_) {
      uint64_t& word = level[id >> 6];
      const bool was_empty = word == 0;
      word |= uint64_t{1} << (id & 63);
      if (!was_empty) return;
      id >>= 6;
    }
  }
  void erase(int32_t id) {
    for (auto& level : words_) {
      uint64_t& word = level[id >> 6];
      word &= ~(uint64_t{1} << (id & 63));
      if (word) return;
      id >>= 6;
    }
  }
  bool contains(int32_t id) const { return words_[0][id >> 6] >> (id & 63) & 1; }
  int32_t lowest() const;  // -1 when empty

 private:
  std::vector<std::vector<uint64_t>> words_;
};

class BlockGroup {
 public:
  explicit BlockGroup(const GroupSpec& spec);

  GroupSpec spec;
  int32_t num_free = 0, num_cached = 0;

  Block& operator[](int32_t b) { return blocks_[b]; }
  const Block& operator[](int32_t b) const { return blocks_[b]; }
  int32_t num_used() const { return spec.num_blocks - num_free - num_cached; }
  int32_t num_available() const { return num_free + num_cached; }
  bool is_free(int32_t b) const { return free_.contains(b); }
  size_t bytes() const { return blocks_.bytes(); }

  int32_t take_free() {  // lowest id, ref 0; -1 when none
    if (num_free == 0) return -1;
    const int32_t b = free_.lowest();
    erase_free(b);
    return b;
  }
  int32_t lowest_free() const { return free_.lowest(); }
  void put_free(int32_t b) {
    blocks_[b] = Block{};
    free_.insert(b);
    ++num_free;
  }
  void erase_free(int32_t b) {  // a free block is no longer: it is taken
    free_.erase(b);
    --num_free;
  }
  void relocate(int32_t from, int32_t to);  // `to` stands where `from` stood, with all it says
  void push_back(int32_t b, uint8_t level) { insert_after(b, blocks_[head(level)].prev, level); }
  void push_front(int32_t b, uint8_t level) { insert_after(b, head(level), level); }
  void insert_after(int32_t b, int32_t prev, uint8_t level) {  // prev: a block of that list, or its head
    Block& block = blocks_[b];
    block.level = level;
    block.queued = 1;
    block.prev = prev;
    block.next = blocks_[prev].next;
    blocks_[prev].next = b;
    blocks_[block.next].prev = b;
    levels_[level >> 6] |= uint64_t{1} << (level & 63);
    ++num_cached;
    int32_t& oldest = recent_[num_pushed_++ & (kAhead - 1)];
    if (oldest >= 0) blocks_[oldest].skip = b;
    oldest = b;
  }
  void unlink(int32_t b) {
    Block& block = blocks_[b];
    blocks_[block.prev].next = block.next;
    blocks_[block.next].prev = block.prev;
    block.queued = 0;
    --num_cached;
    if (block.prev == block.next && is_head(block.prev)) {
      levels_[block.level >> 6] &= ~(uint64_t{1} << (block.level & 63));
    }
  }
  int32_t front() const {  // the first block of the lowest list that has one; -1 when nothing is cached
    if (levels_[0]) return front_of(std::countr_zero(levels_[0]));
    if (levels_[1]) return front_of(64 + std::countr_zero(levels_[1]));
    return -1;
  }
  int32_t front_of(int level) const { return blocks_[head(level)].next; }
  bool is_head(int32_t b) const { return b >= spec.num_reserved; }
  int32_t head(int level) const { return spec.num_reserved + level; }
  void resize(int32_t num_blocks);  // the blocks in question are free (shrink) or new (grow)
  void prefetch(int32_t b) const { __builtin_prefetch(&blocks_[b]); }
  void prefetch_around(int32_t b) const {  // what unlinking it touches
    if (b < 0) return;
    __builtin_prefetch(&blocks_[blocks_[b].prev]);
    __builtin_prefetch(&blocks_[blocks_[b].next]);
  }

 private:
  Array<Block> blocks_;  // [num_reserved + kNumLevels]: the last ones are list heads
  FreeSet free_;
  uint64_t levels_[2] = {0, 0};  // bit l: list l is not empty
  int32_t recent_[kAhead];       // the last blocks pushed, for `skip`
  uint32_t num_pushed_ = 0;
};

}  // namespace kvpool::ledger
