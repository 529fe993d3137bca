// SHA-256 (FIPS 180-4) of short messages: the identity of blocks, equal in every process.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvpool::ledger {

constexpr uint32_t kShaStart[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                   0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

// How to update states. One block after the other waits for itself; two independent ones take little longer than one.
struct Sha {
  void (*blocks)(uint32_t state[8], const uint8_t* data, size_t num_blocks);                   // of 64 bytes
  void (*pair)(uint32_t state_a[8], const uint8_t* a, uint32_t state_b[8], const uint8_t* b);  // one block each
};

// The fastest this CPU runs; `portable` asks for the plain one.
const Sha& choose_sha(bool portable);
#if defined(__x86_64__)
extern const Sha kShaExtensions;  // needs the SHA extensions
#endif

// Ends a message: `last` holds its bytes after the last whole block, `rest` of them, and has room for `rest` + 72.
// Returns the blocks there now.
size_t sha256_pad(uint8_t* last, size_t rest, uint64_t message_bytes);
void sha256_store(const uint32_t state[8], uint8_t* out, size_t size);  // the first `size` bytes, a multiple of 4

// Write the 32-byte digest of `size` bytes.
void sha256(const Sha& sha, const uint8_t* data, size_t size, uint8_t digest[32]);

}  // namespace kvpool::ledger
