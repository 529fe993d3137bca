// The identity of blocks: SHA-256, cut to 128 bits, over
//   tokens (LE u32 each) | extras | parent identity (16) | "KVB1" | tokens per block | tokens held | bytes of extras
// with numbers as LE u32. The parent stands behind the tokens, so that only the last part of a message waits for the
// block before it: it is hashed beside the first part of the next block's.
#include <bit>

#include "ledger/tree.hpp"

namespace kvpool::ledger {
namespace {

void store_le(uint8_t* p, uint32_t v) {
  if constexpr (std::endian::native == std::endian::big) v = __builtin_bswap32(v);
  std::memcpy(p, &v, 4);
}

class Message {
 public:
  void set(const int32_t* tokens, int32_t len, int32_t tokens_per_block, const std::string& extras) {
    const size_t token_bytes = size_t(len) * 4, size = token_bytes + extras.size();
    body_ = reinterpret_cast<const uint8_t*>(tokens);
    if (!extras.empty() || std::endian::native == std::endian::big) {
      copy_.resize(size);
      for (int32_t i = 0; i < len; ++i) store_le(&copy_[4 * size_t(i)], static_cast<uint32_t>(tokens[i]));
      std::memcpy(&copy_[token_bytes], extras.data(), extras.size());
      body_ = copy_.data();
    }
    num_free_ = size / 64;
    rest_ = size % 64;
    if (rest_) std::memcpy(last_, body_ + 64 * num_free_, rest_);
    uint8_t* header = last_ + rest_ + sizeof(Key);
    std::memcpy(header, "KVB1", 4);
    store_le(header + 4, static_cast<uint32_t>(tokens_per_block));
    store_le(header + 8, static_cast<uint32_t>(len));
    store_le(header + 12, static_cast<uint32_t>(extras.size()));
    num_last_ = sha256_pad(last_, rest_ + 32, size + 32);
    std::memcpy(state, kShaStart, sizeof state);
  }
  void set_parent(const Key& parent) { std::memcpy(last_ + rest_, parent.data(), parent.size()); }

  size_t num_free() const { return num_free_; }
  size_t num_last() const { return num_last_; }
  const uint8_t* free(size_t i) const { return body_ + 64 * i; }  // blocks without the parent
  const uint8_t* last(size_t i) const { return last_ + 64 * i; }  // the ones after them
  Key key() const {
    Key key;
    sha256_store(state, key.data(), key.size());
    return key;
  }

  uint32_t state[8];

 private:
  const uint8_t* body_ = nullptr;
  size_t num_free_ = 0, num_last_ = 0, rest_ = 0;
  uint8_t last_[128];  // less than 64 bytes of the body, 32 of parent and header, 9 of padding
  std::vector<uint8_t> copy_;
};

}  // namespace

Key Tree::make_key(const Key& parent, const int32_t* tokens, int32_t len, int32_t extras) const {
  Message message;
  message.set(tokens, len, tokens_per_block, extras_[static_cast<size_t>(extras)].bytes);
  message.set_parent(parent);
  sha_.blocks(message.state, message.free(0), message.num_free());
  sha_.blocks(message.state, message.last(0), message.num_last());
  return message.key();
}

void Tree::seal() {
  Message messages[2];
  const auto prepare = [&](size_t i) {
    const int32_t n = unsealed_[i];
    messages[i & 1].set(tokens(n), nodes_[n].len, tokens_per_block, extras_[nodes_[n].extras].bytes);
  };
  const size_t count = unsealed_.size();
  if (count == 0) return;
  prepare(0);
  sha_.blocks(messages[0].state, messages[0].free(0), messages[0].num_free());
  for (size_t i = 0; i < count; ++i) {
    Message &message = messages[i & 1], &next = messages[(i + 1) & 1];
    Node& node = nodes_[unsealed_[i]];
    size_t ahead = 0;  // blocks of the next message that are hashed already
    if (i + 1 < count) prepare(i + 1);
    message.set_parent(key_of(node.parent));
    for (size_t j = 0; j < message.num_last(); ++j) {
      if (i + 1 < count && ahead < next.num_free()) {
        sha_.pair(message.state, message.last(j), next.state, next.free(ahead++));
      } else {
        sha_.blocks(message.state, message.last(j), 1);
      }
    }
    node.key = message.key();
    if (i + 1 < count) sha_.blocks(next.state, next.free(ahead), next.num_free() - ahead);
  }
  unsealed_.clear();
}

}  // namespace kvpool::ledger
