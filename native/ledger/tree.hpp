// The prefix tree: stored blocks by content. A node is up to `tokens_per_block` tokens behind a parent node, with one
// block id a group. Holders, lists and eviction order are the groups' business.
//
// Two hashes: the finder (64 bits, chained over content, seeded at random per process, private) finds a node, and every
// hit compares parent, extras and tokens, so a collision never matches. The identity (SHA-256 cut to 128 bits, chained
// over parent identity, extras and tokens) is computed once when a node is made; events and tiers carry it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

#include "ledger/pages.hpp"
#include "ledger/sha256.hpp"

namespace kvpool::ledger {

using Key = std::array<uint8_t, 16>;

constexpr int32_t kPromised = -2;  // block of a pending node: who fills it will have one; -1: it never will
constexpr uint16_t kPending = 1;   // filled by a step that has not ended
constexpr uint16_t kTaken = 2;     // becomes a sequence's own when the step being planned opens

struct alignas(64) Node {
  uint64_t finder;
  Key key;
  int32_t parent;       // a node, or -space for a first block; see Space
  int32_t extras;       // interned extras of this block; 0 for none
  int32_t first_child;  // newest first; 0 for none
  int32_t next, prev;   // siblings; 0 for none
  int32_t index;        // position in its sequences: tokens [index * N, index * N + len)
  int32_t first_token;
  int32_t block;     // block of group 0; -1 for none
  int32_t holders;   // sequences that end here, and children on their way
  uint16_t len;      // tokens held; tokens_per_block when full; 0 for a node not in use
  uint16_t pending;  // kPending, kTaken or 0
};
static_assert(sizeof(Node) == 64);

// What separates tenants and adapters: the root of a tree of its own.
struct Space {
  std::string salt, lora;  // encoded by the caller
  Key key;
  uint64_t seed;
  int32_t first_child;
  int32_t holders;  // sequences; a space with neither children nor holders is dropped
  bool retired;     // no longer found by its names
};

struct Candidate {
  int32_t node = 0;
  int32_t len = 0;  // common tokens
};

class Tree {
 public:
  Tree(int32_t num_nodes, int32_t tokens_per_block, int num_groups, uint64_t finder_mask, bool portable_sha);

  const int32_t tokens_per_block;

  Node& operator[](int32_t n) { return nodes_[n]; }
  const Node& operator[](int32_t n) const { return nodes_[n]; }
  const int32_t* tokens(int32_t n) const { return &tokens_[size_t(n) * tokens_per_block]; }
  int32_t block(int32_t n, int g) const { return g == 0 ? nodes_[n].block : more_blocks_[g - 1][n]; }
  void set_block(int32_t n, int g, int32_t b) { (g == 0 ? nodes_[n].block : more_blocks_[g - 1][n]) = b; }
  int32_t num_nodes() const { return num_nodes_; }
  int32_t capacity() const { return static_cast<int32_t>(nodes_.size()) - 1; }
  bool is_leaf(int32_t n) const { return nodes_[n].first_child == 0; }
  size_t bytes() const;

  uint64_t chain(uint64_t parent, const int32_t* tokens, int32_t extras) const;                // finder of a full block
  int32_t find(uint64_t finder, int32_t parent, const int32_t* tokens, int32_t extras) const;  // full nodes; 0: none
  void prefetch(uint64_t finder) const { __builtin_prefetch(&table_[slot(finder)]); }
  void prefetch_found(uint64_t finder) const {
    const int32_t n = table_[slot(finder)].node;
    __builtin_prefetch(&nodes_[n]);
    __builtin_prefetch(tokens(n));
  }
  void prefetch_node(int32_t n) const { __builtin_prefetch(&nodes_[n]); }
  void prefetch_around(int32_t n) const {  // what removing it touches
    const Node& node = nodes_[n];
    __builtin_prefetch(&table_[slot(node.finder)]);
    __builtin_prefetch(tokens(n), 1);  // the next node made gets this place
    if (node.parent > 0) __builtin_prefetch(&nodes_[node.parent]);
    if (node.next) __builtin_prefetch(&nodes_[node.next]);
  }
  template <class Usable>
  Candidate find_partial(int32_t parent, const int32_t* tokens, int32_t len, int32_t extras, Usable&& usable) const;
  int32_t first_child(int32_t parent) const {
    return parent > 0 ? nodes_[parent].first_child : spaces_[-parent].first_child;
  }

  // Returns 0 when no node is left. The node has no blocks yet, and no identity before seal().
  int32_t insert(uint64_t finder, int32_t parent, const int32_t* tokens, int32_t len, int32_t extras, int32_t index);
  void seal();                          // gives the nodes inserted since the last time their identities
  void forget() { unsealed_.clear(); }  // they are removed again
  void remove(int32_t n);               // a leaf
  const Key& key_of(int32_t parent) const { return parent > 0 ? nodes_[parent].key : spaces_[-parent].key; }
  Key make_key(const Key& parent, const int32_t* tokens, int32_t len, int32_t extras) const;

  int32_t open_space(const std::string& salt, const std::string& lora);  // holds it
  void close_space(int32_t space);
  Space& space(int32_t s) { return spaces_[s]; }
  const Space& space(int32_t s) const { return spaces_[s]; }
  bool is_open(int32_t s) const { return spaces_[s].holders || spaces_[s].first_child; }
  void retire_space(int32_t s);  // sequences opened from now on get another; see clear
  int32_t num_spaces() const { return static_cast<int32_t>(spaces_.size()); }
  int32_t space_of(int32_t n) const;

  int32_t intern(const std::string& extras);  // holds it; 0 for ""
  void keep(int32_t extras) {
    if (extras) ++extras_[extras].holders;
  }
  void drop(int32_t extras);
  const std::string& extras(int32_t id) const { return extras_[id].bytes; }
  // Salt, adapter and extras of a block in one text: each with its length before it; "" when all are empty.
  std::string named_extras(int32_t space, int32_t extras) const;

  static constexpr int kScan = 32;  // children looked at for a partial match, newest first

 private:
  struct Entry {
    uint32_t tag;
    int32_t node;
  };
  struct Extras {
    std::string bytes;
    int32_t holders;
  };
  size_t slot(uint64_t finder) const { return (finder >> 32) & mask_; }
  size_t find_slot(int32_t n) const;
  void link(int32_t n);
  void unlink(int32_t n);
  void drop_space_if_unused(int32_t s);

  Array<Node> nodes_;  // 0 is not used
  Array<int32_t> tokens_;
  std::vector<Array<int32_t>> more_blocks_;
  Array<Entry> table_;
  size_t mask_;
  std::array<uint64_t, 3> seeds_;
  uint64_t finder_mask_;
  int32_t free_node_ = 0, num_touched_ = 0, num_nodes_ = 0;
  const Sha& sha_;
  std::vector<int32_t> unsealed_;  // parents before children
  std::vector<Space> spaces_;
  std::vector<int32_t> free_spaces_;
  int32_t plain_ = -1;  // the space without salt and adapter, while it is open
  std::unordered_map<std::string, int32_t> space_ids_;
  std::vector<Extras> extras_;
  std::vector<int32_t> free_extras_;
  std::unordered_map<std::string, int32_t> extras_ids_;
};

// The two halves of a 128-bit product folded together (the mixer of wyhash, public domain).
inline uint64_t fold(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// The content is hashed without the parent, so that the blocks of a prompt do not wait for one another.
inline uint64_t Tree::chain(uint64_t parent, const int32_t* tokens, int32_t extras) const {
  const auto pair = [tokens](int32_t i) {
    uint64_t v;
    std::memcpy(&v, tokens + i, 8);
    return v;
  };
  uint64_t h = seeds_[0] ^ static_cast<uint32_t>(extras);
  if (tokens_per_block == 2) h = fold(pair(0) ^ seeds_[1], h);
  for (int32_t i = 0; i + 4 <= tokens_per_block; i += 4) h = fold(pair(i) ^ seeds_[1], pair(i + 2) ^ h);
  return fold(parent ^ seeds_[2], h ^ seeds_[1]) & finder_mask_;
}

inline bool same_tokens(const int32_t* a, const int32_t* b, int32_t n) {  // n: even
  uint64_t different = 0;
  for (int32_t i = 0; i < n; i += 2) {
    uint64_t x, y;
    std::memcpy(&x, a + i, 8);
    std::memcpy(&y, b + i, 8);
    different |= x ^ y;
  }
  return different == 0;
}

inline int32_t Tree::find(uint64_t finder, int32_t parent, const int32_t* tokens, int32_t extras) const {
  const uint32_t tag = static_cast<uint32_t>(finder >> 32);
  for (size_t i = slot(finder);; i = (i + 1) & mask_) {
    const Entry& entry = table_[i];
    if (entry.node == 0) return 0;
    if (entry.tag != tag) continue;
    const Node& node = nodes_[entry.node];
    if (node.finder == finder && node.parent == parent && node.extras == extras &&
        same_tokens(this->tokens(entry.node), tokens, tokens_per_block)) {
      return entry.node;
    }
  }
}

inline int32_t common_prefix(const int32_t* a, const int32_t* b, int32_t len) {
  int32_t i = 0;
  while (i < len && a[i] == b[i]) ++i;
  return i;
}

// The child of `parent` that shares most tokens with `tokens[0..len)` among the `kScan` newest for which
// `usable(node, common)` holds.
template <class Usable>
Candidate Tree::find_partial(int32_t parent, const int32_t* tokens, int32_t len, int32_t extras,
                             Usable&& usable) const {
  Candidate best;
  int seen = 0;
  for (int32_t n = first_child(parent); n && seen < kScan; n = nodes_[n].next, ++seen) {
    const Node& node = nodes_[n];
    if (node.first_token != tokens[0] || node.extras != extras || node.pending == kPending) continue;
    const int32_t most =
        node.pending == kTaken ? tokens_per_block - 1 : tokens_per_block;  // a taken block is not whole
    const int32_t common = common_prefix(this->tokens(n), tokens, std::min({int32_t{node.len}, len, most}));
    if (common > best.len && usable(n, common)) best = {n, common};
  }
  return best;
}

}  // namespace kvpool::ledger
