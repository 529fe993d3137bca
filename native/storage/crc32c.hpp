// CRC-32C (Castagnoli, RFC 3720), the checksum of stored blocks.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvpool {

// Continues `crc` (0 at the start) over `size` bytes at `data`.
uint32_t crc32c(uint32_t crc, const uint8_t* data, size_t size);

// The same by tables; the check of the fast path.
uint32_t crc32c_portable(uint32_t crc, const uint8_t* data, size_t size);

}  // namespace kvpool
