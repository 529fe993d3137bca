// What the machine gives: reads in order, reads in the order of a block table, copies, products of bf16. The
// denominators of the bench.
#pragma once

#include <cstdint>

#include "cpu/workers.hpp"

namespace kvpool {

// Reads pieces[i] .. pieces[i] + bytes, each once, in order within a worker's share. Returns a checksum.
uint64_t read_probe(Workers& workers, const uint8_t* base, const int64_t* offsets, int64_t count, int64_t bytes);

// Multiplies bf16 pairs by vdpbf16ps from registers; returns the operations done, 0 where the CPU has no such
// instruction.
double dot_probe(Workers& workers);

// Copies `bytes` by memcpy.
void copy_probe(Workers& workers, uint8_t* dst, const uint8_t* src, int64_t bytes);

}  // namespace kvpool
