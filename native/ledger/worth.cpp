// What blocks are worth, and what that holds up: a block's level is at least its cached children's, and falls when they
// go or their time is over.
#include <algorithm>
#include <cmath>

#include "ledger/blocks.hpp"

namespace kvpool::ledger {
namespace {

constexpr int kChildren = 16;       // children looked at for a level; beyond them the old level stays as an upper bound
constexpr int kExpiries = 64;       // a call
constexpr int kExactTimers = 128;   // durations beyond so many are rounded up to a quarter of an octave
constexpr double kShortest = 1e-3;  // seconds, of the rounded ones

}  // namespace

uint8_t Blocks::level_of(int g, int32_t b) const {
  const BlockGroup& group = groups[g];
  uint8_t level = group[b].own;
  if (!leveled_ || group.spec.life != Life::full) return level;
  int seen = 0;
  for (int32_t c = tree[group[b].node].first_child; c; c = tree[c].next) {
    if (++seen > kChildren) return std::max(level, group[b].level);
    const int32_t child = tree.block(c, g);
    if (child >= 0) level = std::max(level, group[child].level);
  }
  return level;
}

// After something below node `n` went or fell: what only it held up falls too. A falling block's ancestors stand in
// higher lists, so it may go to the back; to the front only if it has no children there.
void Blocks::sink(int g, int32_t n) {
  BlockGroup& group = groups[g];
  for (; n > 0; n = tree[n].parent) {
    const int32_t b = tree.block(n, g);
    if (b < 0 || !group[b].queued || group[b].level == group[b].own) return;
    const uint8_t level = level_of(g, b);
    if (level >= group[b].level) return;
    group.unlink(b);
    tree.is_leaf(n) ? group.push_front(b, level) : group.push_back(b, level);
  }
}

// A block's own priority rose: to the front of its new list, ancestors that stood lower right behind it.
void Blocks::rise(int g, int32_t b) {
  BlockGroup& group = groups[g];
  const uint8_t level = group[b].own;
  group.unlink(b);
  group.push_front(b, level);
  if (group.spec.life != Life::full) return;
  for (int32_t n = tree[group[b].node].parent, last = b; n > 0; n = tree[n].parent) {
    const int32_t above = tree.block(n, g);
    if (above < 0 || group[above].level >= level) return;
    if (!group[above].queued) {
      group[above].level = level;
      return;
    }
    group.unlink(above);
    group.insert_after(above, last, level);
    last = above;
  }
}

void Blocks::set_worth(int g, int32_t b, Worth worth) {
  Block& block = groups[g][b];
  if (events.on() && block.own != worth.priority) {
    block.own = worth.priority;
    tell(EventKind::updated, g, b, block.node, worth.priority);
  }
  block.own = worth.priority;
  block.timer = worth.timer;
  leveled_ = leveled_ || worth.priority != kDefaultPriority;
}

uint8_t Blocks::timer_of(double duration) {
  if (duration < 0) return 0;
  for (size_t c = 1; c < durations_.size(); ++c) {
    if (durations_[c] == duration) return static_cast<uint8_t>(c);
  }
  if (durations_.size() < kExactTimers) {
    durations_.push_back(duration);
    return static_cast<uint8_t>(durations_.size() - 1);
  }
  const double step = std::ceil(4 * std::log2(std::max(duration, kShortest) / kShortest));
  return step > 127 ? 0 : static_cast<uint8_t>(kExactTimers + step);  // longer than 40 days: for ever
}

double Blocks::duration_of(int timer) const {
  return timer < kExactTimers ? durations_[static_cast<size_t>(timer)]
                              : kShortest * std::exp2((timer - kExactTimers) / 4.0);
}

void Blocks::expire() {
  if (durations_.size() == 1) return;
  int left = kExpiries;
  for (int g = 0; g < num_groups(); ++g) {
    for (int c = 1; c < Timers::kClasses && left > 0; ++c) {
      for (int32_t b; left > 0 && (b = timers_[g].due(c, now)) >= 0; --left) {
        Block& block = groups[g][b];
        timers_[g].disarm(b);
        block.timer = 0;
        const uint8_t before = block.own;
        block.own = kDefaultPriority;
        if (before == kDefaultPriority) continue;
        tell(EventKind::updated, g, b, block.node, kDefaultPriority);
        const uint8_t level = level_of(g, b);
        if (level > block.level) {
          rise(g, b);
        } else if (level < block.level) {
          groups[g].unlink(b);
          groups[g].push_back(b, level);
          if (groups[g].spec.life == Life::full) sink(g, tree[block.node].parent);
        }
      }
    }
  }
}

}  // namespace kvpool::ledger
