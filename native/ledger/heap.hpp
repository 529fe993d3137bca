// An indexed 4-ary heap of blocks by a key: the leaves a policy may evict, smallest key first; ties by block id.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "ledger/pages.hpp"

namespace kvpool::ledger {

class KeyHeap {
 public:
  explicit KeyHeap(int32_t capacity) : keys_(capacity), places_(capacity), heap_(capacity) {}

  bool contains(int32_t b) const { return places_[b] != 0; }
  int32_t front() const { return size_ ? heap_[0] : -1; }
  double key(int32_t b) const { return keys_[b]; }
  const double* keys() const { return keys_.data(); }
  int32_t size() const { return size_; }
  size_t bytes() const { return keys_.bytes() + places_.bytes() + heap_.bytes(); }

  void insert(int32_t b) {
    put(size_, b);
    up(size_++);
  }

  void erase(int32_t b) {
    const int32_t at = places_[b] - 1;
    places_[b] = 0;
    const int32_t last = heap_[--size_];
    if (last == b) return;
    put(at, last);
    up(at);
    down(places_[last] - 1);
  }

  // Keeps its place right when the block is in the heap.
  void set_key(int32_t b, double key) {
    keys_[b] = key;
    if (!places_[b]) return;
    up(places_[b] - 1);
    down(places_[b] - 1);
  }

 private:
  bool less(int32_t a, int32_t b) const { return keys_[a] != keys_[b] ? keys_[a] < keys_[b] : a < b; }
  void put(int32_t at, int32_t b) {
    heap_[at] = b;
    places_[b] = at + 1;
  }
  void up(int32_t at) {
    const int32_t b = heap_[at];
    for (; at > 0 && less(b, heap_[(at - 1) / 4]); at = (at - 1) / 4) put(at, heap_[(at - 1) / 4]);
    put(at, b);
  }
  void down(int32_t at) {
    const int32_t b = heap_[at];
    for (;;) {
      int32_t best = -1;
      for (int32_t c = 4 * at + 1; c <= 4 * at + 4 && c < size_; ++c) {
        if (best < 0 || less(heap_[c], heap_[best])) best = c;
      }
      if (best < 0 || !less(heap_[best], b)) break;
      put(at, heap_[best]);
      at = best;
    }
    put(at, b);
  }

  Array<double> keys_;
  Array<int32_t> places_;  // position + 1; 0 = not in the heap
  Array<int32_t> heap_;
  int32_t size_ = 0;
};

}  // namespace kvpool::ledger
