#include "ledger/tree.hpp"

#include <bit>
#include <random>

namespace kvpool::ledger {
namespace {

uint64_t random_seed() {
  std::random_device device;
  return uint64_t{device()} << 32 | device();
}

void append_field(std::string& out, char tag, const std::string& value) {
  const uint64_t size = value.size();
  out.push_back(tag);
  for (int i = 0; i < 8; ++i) out.push_back(static_cast<char>(size >> (8 * i)));
  out += value;
}

std::string space_name(const std::string& salt, const std::string& lora) {
  std::string name = "KVS1";
  append_field(name, 'S', salt);
  append_field(name, 'L', lora);
  return name;
}

}  // namespace

Tree::Tree(int32_t num_nodes, int32_t n, int num_groups, uint64_t finder_mask, bool portable_sha)
    : tokens_per_block(n),
      nodes_(size_t(num_nodes) + 1),
      tokens_((size_t(num_nodes) + 1) * n),
      table_(std::bit_ceil(size_t(num_nodes) * 2 + 2)),
      mask_(table_.size() - 1),
      seeds_{random_seed(), random_seed(), random_seed()},
      finder_mask_(finder_mask),
      sha_(choose_sha(portable_sha)) {
  for (int g = 1; g < num_groups; ++g) more_blocks_.emplace_back(size_t(num_nodes) + 1);
  extras_.push_back({"", 1});
}

size_t Tree::bytes() const {
  size_t sum = nodes_.bytes() + tokens_.bytes() + table_.bytes();
  for (const auto& a : more_blocks_) sum += a.bytes();
  return sum;
}

size_t Tree::find_slot(int32_t n) const {
  size_t i = slot(nodes_[n].finder);
  while (table_[i].node != n) i = (i + 1) & mask_;
  return i;
}

int32_t Tree::insert(uint64_t finder, int32_t parent, const int32_t* tokens, int32_t len, int32_t extras,
                     int32_t index) {
  int32_t n = free_node_;
  if (n) {
    free_node_ = nodes_[n].next;
  } else {
    if (num_touched_ == capacity()) return 0;
    n = ++num_touched_;
  }
  ++num_nodes_;
  Node& node = nodes_[n];
  node = Node{};
  node.finder = finder;
  node.parent = parent;
  node.extras = extras;
  node.index = index;
  node.first_token = tokens[0];
  node.len = static_cast<uint16_t>(len);
  unsealed_.push_back(n);
  for (size_t g = 0; g <= more_blocks_.size(); ++g) set_block(n, static_cast<int>(g), -1);
  std::memcpy(&tokens_[size_t(n) * tokens_per_block], tokens, size_t(len) * 4);
  keep(extras);
  link(n);
  return n;
}

void Tree::link(int32_t n) {
  Node& node = nodes_[n];
  int32_t& first = node.parent > 0 ? nodes_[node.parent].first_child : spaces_[-node.parent].first_child;
  node.next = first;
  if (first) nodes_[first].prev = n;
  first = n;
  if (node.len < tokens_per_block) return;
  size_t i = slot(node.finder);
  while (table_[i].node) i = (i + 1) & mask_;
  table_[i] = {static_cast<uint32_t>(node.finder >> 32), n};
}

void Tree::remove(int32_t n) {
  unlink(n);
  Node& node = nodes_[n];
  drop(node.extras);
  if (node.parent <= 0) drop_space_if_unused(-node.parent);
  node.len = 0;
  node.next = free_node_;
  free_node_ = n;
  --num_nodes_;
}

void Tree::unlink(int32_t n) {
  Node& node = nodes_[n];
  if (node.next) nodes_[node.next].prev = node.prev;
  if (node.prev) {
    nodes_[node.prev].next = node.next;
  } else {
    (node.parent > 0 ? nodes_[node.parent].first_child : spaces_[-node.parent].first_child) = node.next;
  }
  if (node.len < tokens_per_block) return;
  // Backward-shift deletion: every later entry of the run that may stand in the hole moves into it.
  size_t hole = find_slot(n);
  for (size_t i = (hole + 1) & mask_; table_[i].node; i = (i + 1) & mask_) {
    const size_t home = table_[i].tag & mask_;
    if (((i - home) & mask_) >= ((i - hole) & mask_)) {
      table_[hole] = table_[i];
      hole = i;
    }
  }
  table_[hole] = {};
}

std::string Tree::named_extras(int32_t space, int32_t extras) const {
  const Space& root = spaces_[space];
  const std::string& own = extras_[extras].bytes;
  std::string out;
  if (root.salt.empty() && root.lora.empty() && own.empty()) return out;
  for (const std::string* part : {&root.salt, &root.lora, &own}) {
    const uint32_t size = static_cast<uint32_t>(part->size());
    for (int i = 0; i < 4; ++i) out.push_back(static_cast<char>(size >> 8 * i));
    out += *part;
  }
  return out;
}

int32_t Tree::space_of(int32_t n) const {
  while (n > 0) n = nodes_[n].parent;
  return -n;
}

int32_t Tree::open_space(const std::string& salt, const std::string& lora) {
  const bool plain = salt.empty() && lora.empty();
  if (plain && plain_ >= 0) {
    ++spaces_[plain_].holders;
    return plain_;
  }
  const std::string name = space_name(salt, lora);
  const auto [it, is_new] = space_ids_.try_emplace(name, 0);
  if (is_new) {
    if (free_spaces_.empty()) {
      free_spaces_.push_back(num_spaces());
      spaces_.emplace_back();
    }
    it->second = free_spaces_.back();
    free_spaces_.pop_back();
    uint8_t digest[32];
    sha256(sha_, reinterpret_cast<const uint8_t*>(name.data()), name.size(), digest);
    Space& space = spaces_[it->second];
    space = {salt, lora, {}, 0, 0, 0, false};
    std::memcpy(space.key.data(), digest, 16);
    std::memcpy(&space.seed, digest + 16, 8);
  }
  ++spaces_[it->second].holders;
  if (plain) plain_ = it->second;
  return it->second;
}

void Tree::close_space(int32_t s) {
  --spaces_[s].holders;
  drop_space_if_unused(s);
}

void Tree::drop_space_if_unused(int32_t s) {
  Space& space = spaces_[s];
  if (space.holders || space.first_child) return;
  if (s == plain_) plain_ = -1;
  if (!space.retired) space_ids_.erase(space_name(space.salt, space.lora));
  space = {};
  free_spaces_.push_back(s);
}

void Tree::retire_space(int32_t s) {
  Space& space = spaces_[s];
  if (space.retired || !is_open(s)) return;
  space.retired = true;
  if (s == plain_) plain_ = -1;
  space_ids_.erase(space_name(space.salt, space.lora));
}

int32_t Tree::intern(const std::string& bytes) {
  if (bytes.empty()) return 0;
  const auto [it, is_new] = extras_ids_.try_emplace(bytes, 0);
  if (is_new) {
    if (free_extras_.empty()) {
      free_extras_.push_back(static_cast<int32_t>(extras_.size()));
      extras_.emplace_back();
    }
    it->second = free_extras_.back();
    free_extras_.pop_back();
    extras_[it->second] = {bytes, 0};
  }
  ++extras_[it->second].holders;
  return it->second;
}

void Tree::drop(int32_t id) {
  if (id == 0 || --extras_[id].holders) return;
  extras_ids_.erase(extras_[id].bytes);
  extras_[id].bytes.clear();
  free_extras_.push_back(id);
}

}  // namespace kvpool::ledger
