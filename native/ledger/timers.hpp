// Cached blocks whose priority expires: one queue a distinct duration, so that queue order is expiry order.
#pragma once

#include <cstdint>
#include <vector>

#include "ledger/pages.hpp"

namespace kvpool::ledger {

class Timers {
 public:
  static constexpr int kClasses = 256;  // 0 stands for "for ever"

  explicit Timers(int32_t capacity) : capacity_(capacity), entries_(capacity + kClasses, true) {
    for (int c = 0; c < kClasses; ++c) entries_[capacity + c].prev = entries_[capacity + c].next = capacity + c;
  }

  size_t bytes() const { return entries_.bytes(); }
  void arm(int32_t b, int cls, double expiry) {
    entries_[b].expiry = expiry;
    insert_after(b, entries_[capacity_ + cls].prev);
  }
  void insert_after(int32_t b, int32_t prev) {  // prev: an armed block of the same class, or its head
    Entry& e = entries_[b];
    e.prev = prev;
    e.next = entries_[prev].next;
    entries_[prev].next = b;
    entries_[e.next].prev = b;
  }
  void disarm(int32_t b) {  // keeps prev and expiry, for undoing in reverse order
    entries_[entries_[b].prev].next = entries_[b].next;
    entries_[entries_[b].next].prev = entries_[b].prev;
  }
  void rearm(int32_t b) { insert_after(b, entries_[b].prev); }
  // The block of a class that expires first, if it has by now; else -1.
  int32_t due(int cls, double now) const {
    const int32_t b = entries_[capacity_ + cls].next;
    return b < capacity_ && entries_[b].expiry <= now ? b : -1;
  }
  void move(int32_t from, int32_t to) {
    entries_[to] = entries_[from];
    entries_[entries_[to].prev].next = to;
    entries_[entries_[to].next].prev = to;
  }

 private:
  struct Entry {
    double expiry;
    int32_t prev, next;
  };
  int32_t capacity_;
  Array<Entry> entries_;
};

}  // namespace kvpool::ledger
