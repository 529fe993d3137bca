// SHA-256 (FIPS 180-4) of short messages: the identity of blocks, equal in every process.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvpool::ledger {

// Update `state` with `num_blocks` 64-byte blocks.
using Compress = void (*)(uint32_t state[8], const uint8_t* data, size_t num_blocks);

void compress_portable(uint32_t state[8], const uint8_t* data, size_t num_blocks);
#if defined(__x86_64__)
void compress_sha(uint32_t state[8], const uint8_t* data, size_t num_blocks);  // needs the SHA extensions
#endif

// The fastest of the above this CPU runs; `portable` asks for the plain one.
Compress choose_compress(bool portable);

// The same without a copy: `data` has room for kShaPadding bytes more, which are written.
constexpr size_t kShaPadding = 72;
void sha256_in_place(Compress compress, uint8_t* data, size_t size, uint8_t digest[32]);

// Write the 32-byte digest of `size` bytes.
void sha256(Compress compress, const uint8_t* data, size_t size, uint8_t digest[32]);

}  // namespace kvpool::ledger
