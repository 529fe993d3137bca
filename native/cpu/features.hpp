// Which instruction sets this process may use. Asked once; `KVPOOL_CPU` can only lower it (read in Python).
#pragma once

namespace kvpool {

enum class Isa : int { generic = 0, avx2 = 1, avx512 = 2, amx = 3 };

// The best instruction set of this CPU that the operating system grants (AMX needs a permission, asked here).
Isa best_isa();

// True when the CPU has the SHA-256 instructions.
bool has_sha();

}  // namespace kvpool
