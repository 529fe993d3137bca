// Sequences by id. Ids ascend, so the id itself is the hash: neighbours stand beside one another and seldom collide.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "ledger/sequence.hpp"

namespace kvpool::ledger {

class SequenceMap {
 public:
  SequenceMap() : slots_(64) {}

  size_t size() const { return size_; }

  Sequence* find(int64_t id) const {
    for (size_t i = home(id);; i = (i + 1) & mask()) {
      if (!slots_[i].second || slots_[i].first == id) return slots_[i].second.get();
    }
  }

  void add(std::unique_ptr<Sequence> s) {
    if (++size_ * 2 > slots_.size()) grow();
    put(std::move(s));
  }

  std::unique_ptr<Sequence> take(int64_t id) {
    size_t hole = home(id);
    while (slots_[hole].first != id || !slots_[hole].second) hole = (hole + 1) & mask();
    std::unique_ptr<Sequence> out = std::move(slots_[hole].second);
    --size_;
    for (size_t i = (hole + 1) & mask(); slots_[i].second; i = (i + 1) & mask()) {
      if (((i - home(slots_[i].first)) & mask()) < ((i - hole) & mask())) continue;
      slots_[hole] = std::move(slots_[i]);
      hole = i;
    }
    return out;
  }

  template <class Visit>
  void for_each(Visit&& visit) const {
    for (const auto& slot : slots_) {
      if (slot.second) visit(*slot.second);
    }
  }

 private:
  size_t mask() const { return slots_.size() - 1; }
  size_t home(int64_t id) const { return static_cast<size_t>(id) & mask(); }
  void put(std::unique_ptr<Sequence> s) {
    const int64_t id = s->id;
    size_t i = home(id);
    while (slots_[i].second) i = (i + 1) & mask();
    slots_[i] = {id, std::move(s)};
  }
  void grow() {
    std::vector<std::pair<int64_t, std::unique_ptr<Sequence>>> before(slots_.size() * 2);
    before.swap(slots_);
    for (auto& slot : before) {
      if (slot.second) put(std::move(slot.second));
    }
  }

  std::vector<std::pair<int64_t, std::unique_ptr<Sequence>>> slots_;
  size_t size_ = 0;
};

}  // namespace kvpool::ledger
