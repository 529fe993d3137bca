// Every invariant, verified the slow way. Returns what is wrong, in words.
#include <algorithm>

#include "ledger/core.hpp"

namespace kvpool::ledger {
namespace {

struct Report {
  std::vector<std::string> lines;
  void expect(bool holds, const std::string& what) {
    if (!holds && lines.size() < 20) lines.push_back(what);
  }
};

std::string name(int g, int32_t b) { return "group " + std::to_string(g) + " block " + std::to_string(b); }

}  // namespace

std::vector<std::string> Core::check() {
  Report report;
  std::vector<std::vector<int32_t>> refs;
  for (const BlockGroup& g : groups_) refs.emplace_back(g.spec.num_blocks, 0);
  std::unordered_map<int32_t, int32_t> ends;
  std::vector<const Sequence*> holders, filled;
  for (const auto& step : steps_) {
    for (const Entry& entry : step->entries) {
      if (entry.external) filled.push_back(entry.seq);
    }
  }
  sequences_.for_each([&](const Sequence& s) { holders.push_back(&s); });
  pins_.for_each([&](const Sequence& s) { holders.push_back(&s); });
  for (const Sequence* holder : holders) {
    const Sequence& s = *holder;
    const int64_t id = s.id;
    if (end_node(s) > 0) ++ends[end_node(s)];
    report.expect(s.computed <= s.scheduled && s.scheduled <= s.size(), "sequence " + std::to_string(id) + " lengths");
    for (int g = 0; g < num_groups(); ++g) {
      for (size_t i = 0; i < s.held[g].table.size(); ++i) {
        const int32_t b = s.held[g].table[i];
        if (b < 0) continue;
        ++refs[g][b];
        const int32_t n = groups_[g][b].node;
        const bool below = n == 0 && std::find(filled.begin(), filled.end(), &s) != filled.end();
        if (i < s.nodes.size() && !below)
          report.expect(n == s.nodes[i], name(g, b) + " is not the block of its sequence's node");
      }
      if (s.held[g].state >= 0) ++refs[g][s.held[g].state];
      for (const int32_t b : s.held[g].draft_states) ++refs[g][b];
    }
    if (s.own_tail && s.scheduled % n_) check_tail(s, report.lines);
    for (size_t i = 0; i < s.nodes.size(); ++i) {
      const Node& node = tree_[s.nodes[i]];
      report.expect(node.len == n_ && node.index == static_cast<int32_t>(i) &&
                        node.parent == (i ? s.nodes[i - 1] : -s.space) && node.extras == s.extras_of(node.index) &&
                        std::equal(tree_.tokens(s.nodes[i]), tree_.tokens(s.nodes[i]) + n_, &s.tokens[i * n_]),
                    "sequence " + std::to_string(id) + " node " + std::to_string(i) + " holds other tokens");
    }
  }
  for (const auto& step : steps_) {
    for (const Copy& c : step->copies) ++refs[c.group][c.src];
    for (size_t i = 0; i < step->reads.size(); ++i) {
      if (step->reads[i] >= 0) ++refs[i % groups_.size()][step->reads[i]];
    }
  }
  for (int g = 0; g < num_groups(); ++g) {
    const BlockGroup& group = groups_[g];
    int32_t free = 0, cached = 0;
    for (int32_t b = 0; b < group.spec.num_blocks; ++b) {
      const Block& block = group[b];
      free += group.is_free(b);
      cached += block.queued;
      report.expect(block.ref == refs[g][b],
                    name(g, b) + " has ref " + std::to_string(block.ref) + ", holders " + std::to_string(refs[g][b]));
      report.expect((block.ref > 0) + block.queued + group.is_free(b) == 1, name(g, b) + " is not in one state");
      if (block.node) report.expect(tree_[block.node].len && tree_.block(block.node, g) == b, name(g, b) + " node");
      if (block.queued) report.expect(block.node != 0, name(g, b) + " is cached without a node");
    }
    report.expect(free == group.num_free && cached == group.num_cached, "counts of group " + std::to_string(g));
    check_lists(g, report.lines);
    check_heap(g, report.lines);
  }
  check_tree(ends, report.lines);
  return report.lines;
}

// Nobody else holds the block its next token goes into, but for copies still to be made.
void Core::check_tail(const Sequence& s, std::vector<std::string>& lines) const {
  for (int g = 0; g < num_groups(); ++g) {
    if (blocks_.is(g, Life::state)) continue;
    const int32_t b = s.held[g].table[static_cast<size_t>(whole_blocks(s.scheduled))];
    int32_t holders = groups_[g][b].ref;
    for (const auto& step : steps_) {
      for (const Copy& c : step->copies) holders -= c.group == g && c.src == b;
    }
    if (holders != 1 || groups_[g][b].node) lines.push_back(name(g, b) + " is not its sequence's own");
  }
}

// A keyed policy sees exactly the cached leaves.
void Core::check_heap(int g, std::vector<std::string>& lines) const {
  const KeyHeap* heap = blocks_.heap(g);
  if (!heap) return;
  for (int32_t b = 0; b < groups_[g].spec.num_blocks; ++b) {
    const bool leaf = groups_[g][b].queued && tree_.is_leaf(groups_[g][b].node);
    if (heap->contains(b) != leaf)
      lines.push_back(name(g, b) + (leaf ? " is missing in" : " does not belong into") + " the heap");
  }
}

// In a full group children stand before their parents, in lists at most as high.
void Core::check_lists(int g, std::vector<std::string>& lines) const {
  const BlockGroup& group = groups_[g];
  std::unordered_map<int32_t, int32_t> place;
  int32_t at = 0;
  for (int level = 0; level < kNumLevels; ++level) {
    for (int32_t b = group.front_of(level); !group.is_head(b); b = group[b].next) {
      place[b] = at++;
      if (group[b].level != level) lines.push_back(name(g, b) + " stands in another level's list");
    }
  }
  if (at != group.num_cached) lines.push_back("lists of group " + std::to_string(g) + " miss blocks");
  if (group.spec.life != Life::full) return;
  for (const auto& [b, position] : place) {
    const int32_t parent = tree_[group[b].node].parent;
    if (parent <= 0) continue;
    const int32_t above = tree_.block(parent, g);
    if (above < 0) {
      lines.push_back(name(g, b) + " is cached under a node without a block");
    } else if (group[above].queued && place[above] < position) {
      lines.push_back(name(g, b) + " stands behind its parent");
    }
  }
}

void Core::check_tree(const std::unordered_map<int32_t, int32_t>& ends, std::vector<std::string>& lines) const {
  int32_t found = 0;
  std::vector<int32_t> stack;
  for (int32_t s = 0; s < tree_.num_spaces(); ++s) {
    for (int32_t n = tree_.space(s).first_child; n; n = tree_[n].next) stack.push_back(n);
  }
  while (!stack.empty()) {
    const int32_t n = stack.back();
    stack.pop_back();
    ++found;
    const Node& node = tree_[n];
    const auto it = ends.find(n);
    const std::string who = "node " + std::to_string(n);
    if (node.holders != (it == ends.end() ? 0 : it->second)) lines.push_back(who + " holders");
    if (node.len < n_ && node.first_child) lines.push_back(who + " is partly filled and has children");
    if (node.key != tree_.make_key(tree_.key_of(node.parent), tree_.tokens(n), node.len, node.extras)) {
      lines.push_back(who + " has another identity than its content");
    }
    if (node.len == n_ && tree_.find(node.finder, node.parent, tree_.tokens(n), node.extras) == 0) {
      lines.push_back(who + " is not found by its content");
    }
    bool any = node.holders > 0 || node.first_child > 0 || node.pending;
    for (int g = 0; g < num_groups(); ++g) {
      const int32_t b = tree_.block(n, g);
      any = any || b >= 0;
      if (b >= 0 && groups_[g][b].node != n) lines.push_back(who + " names a block that does not name it");
      if (b < 0 && blocks_.is(g, Life::full)) lines.push_back(who + " has no block of a full group");
    }
    if (!any) lines.push_back(who + " holds nothing and leads nowhere");
    for (int32_t c = node.first_child; c; c = tree_[c].next) {
      if (tree_[c].parent != n) lines.push_back("node " + std::to_string(c) + " has another parent");
      stack.push_back(c);
    }
  }
  if (found != tree_.num_nodes()) lines.push_back("the tree reaches " + std::to_string(found) + " of its nodes");
}

}  // namespace kvpool::ledger
