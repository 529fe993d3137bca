// What happened to blocks, in order, in a ring of fixed size. Tokens and names are copied: a node may be another's by
// the time the ring is read.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ledger/tree.hpp"

namespace kvpool::ledger {

enum class EventKind : uint8_t { stored, removed, moved, updated, cleared };

struct Event {
  int64_t number = 0;
  EventKind kind = EventKind::stored;
  int32_t group = 0, block = -1, to = -1;  // to: where a moved block went; the new priority of an updated one
  Key key{}, parent{};
  bool has_parent = false;
  int64_t start = 0;  // first token of the block in its sequences
  int32_t num_tokens = 0;
  int32_t priority = 0;
  std::string salt, lora, extras;  // copies: whose they were may be gone by the time the ring is read
};

class EventLog {
 public:
  // 0 writes nothing.
  EventLog(size_t capacity, int32_t tokens_per_block)
      : events_(capacity), tokens_(capacity * tokens_per_block), n_(tokens_per_block) {}

  bool on() const { return !events_.empty(); }
  int64_t num_written() const { return next_; }

  void add(Event event, const int32_t* tokens) {
    if (!on()) return;
    const size_t at = static_cast<size_t>(next_) % events_.size();
    event.number = next_++;
    if (next_ - first_ > static_cast<int64_t>(events_.size())) ++first_;  // the oldest is lost: a gap in the numbers
    if (event.num_tokens) std::copy(tokens, tokens + event.num_tokens, &tokens_[at * n_]);
    events_[at] = std::move(event);
  }

  template <class Visit>
  void drain(Visit&& visit) {
    for (; first_ < next_; ++first_) {
      const size_t at = static_cast<size_t>(first_) % events_.size();
      visit(events_[at], &tokens_[at * n_]);
    }
  }

 private:
  std::vector<Event> events_;
  std::vector<int32_t> tokens_;
  int32_t n_;
  int64_t first_ = 0, next_ = 0;
};

}  // namespace kvpool::ledger
