// Blocks and prefix tree together: who holds what, what is stored, which block goes when there is no free one.
// Knows no sequence and no step.
//
// Eviction order. Every group has 101 lists, one a priority, least recently released first; the front of the lowest
// list goes. In a full group only leaves may go, and the front is one: a release walks a sequence tail to head, and a
// block's level is at least its cached children's. A keyed policy orders the leaves of full groups by a key instead;
// the lists go on beside it, so that a block without a key of its own has one: the time of its release.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ledger/block.hpp"
#include "ledger/events.hpp"
#include "ledger/heap.hpp"
#include "ledger/timers.hpp"
#include "ledger/tree.hpp"

namespace kvpool::ledger {

struct Options {
  uint64_t finder_mask = ~uint64_t{0};
  bool portable_sha = false;
  bool keyed = false;
  bool offer = false;  // report evicted blocks, for tiers below
  int64_t num_events = 0;
};

// How much a block is worth keeping.
struct Worth {
  uint8_t priority = kDefaultPriority;
  uint8_t timer = 0;
};

struct Claim {
  int32_t group, block, prev;  // prev < 0: it had other holders
  uint8_t level;
};

// A block that left the device's tree, before its memory is used again.
struct Evicted {
  int32_t group, block;
  Key key, parent;
  int32_t index, priority, uses;
  std::vector<int32_t> tokens;
  std::string extras;  // what the key depends on besides tokens and parent; see Tree::named_extras
};

class Blocks {
 public:
  Blocks(const std::vector<GroupSpec>& specs, int32_t num_nodes, int32_t tokens_per_block, const Options& options);

  std::vector<BlockGroup> groups;
  Tree tree;
  EventLog events;
  double now = 0;      // the caller's clock, in seconds
  uint32_t clock = 0;  // releases so far
  int64_t num_allocated = 0, num_evicted = 0, num_stored = 0;
  int64_t evicted_by_priority[kNumLevels] = {};
  std::vector<Evicted> offered;        // since it was last cleared
  std::vector<int32_t> unkeyed;        // blocks of full groups cached since it was last cleared; keyed policies only
  std::vector<int32_t> unkeyed_group;  // beside it
  std::vector<double> unkeyed_key;     // beside it: the key each had the last time

  int num_groups() const { return static_cast<int>(groups.size()); }
  bool is(int g, Life life) const { return groups[g].spec.life == life; }
  size_t bytes() const;
  std::vector<Evicted> stored() const;  // every whole, computed block of the tree, parents before children

  // --- holding
  void claim(int g, int32_t b, std::vector<Claim>* undo);
  void undo(std::vector<Claim>& claims);  // in reverse: every list is as before
  void unclaim(int g, int32_t b);         // the last holder leaves it at the back of its list, or free
  void unclaim_first(int g, int32_t b);   // at the front: it goes next
  void unclaim_run(int g, const int32_t* run, int32_t size);  // a rewind: ascending blocks of one chain, to the front
  int32_t take(int g);                                        // a block with ref 1: free, or evicted

  // --- storing
  void attach(int g, int32_t b, int32_t n, Worth worth);  // says nothing; see announce
  void announce(int32_t n);                               // stored, for every group that has a block
  void announce(int32_t n, int g);
  void detach(int g, int32_t n);  // the node's block leaves the tree: free when nobody holds it
  void take_over(int32_t n);      // a leaf becomes its holder's own
  void hold_node(int32_t n);
  void drop_node(int32_t n);
  void set_worth(int g, int32_t b, Worth worth);
  uint8_t timer_of(double duration);  // its class; negative: for ever
  void expire();                      // at most 64 blocks a call
  bool make_node_room();              // for trees without a full group, whose nodes may outnumber their blocks
  void drop_unused(int32_t space);    // everything nobody holds
  void set_key(int g, int32_t b, double key) { heaps_[g]->set_key(b, key); }
  const KeyHeap* heap(int g) const { return heaps_.empty() ? nullptr : heaps_[g].get(); }
  void move(int g, int32_t from, int32_t to);  // to a free block; holders rewrite their tables

  int32_t evict(int g);  // the block, in no list and not free
  uint8_t level_of(int g, int32_t b) const;

 private:
  void cache(int g, int32_t b, bool first);
  void uncache(int g, int32_t b);
  void remove_node(int32_t n);
  void prune(int32_t n);
  void leaf_again(int32_t n);
  void sink(int g, int32_t n);
  void rise(int g, int32_t b);
  void look_ahead(int g, int32_t b);
  double duration_of(int timer) const;
  Evicted describe(int g, int32_t b, int32_t n) const;
  void tell(EventKind kind, int g, int32_t b, int32_t n, int32_t to);

  std::vector<std::unique_ptr<KeyHeap>> heaps_;  // [groups]; null but for full groups of a keyed policy
  std::vector<Timers> timers_;                   // [groups]
  std::vector<double> durations_{-1.0};          // of exact classes
  struct Ahead {
    int32_t blocks[kAhead] = {};
    uint32_t at = 0;
  };
  std::vector<Ahead> ahead_;  // [groups]
  bool has_full_ = false;
  bool offer_, leveled_ = false;  // leveled: some block has a priority of its own
};

}  // namespace kvpool::ledger
