// The operations on pools, each spread over the workers. Arguments are checked by the caller (the bindings).
#pragma once

#include "cpu/features.hpp"
#include "cpu/workers.hpp"
#include "kernels/types.hpp"

namespace kvpool {

// Fills `args.out` for all rows of the step; rows of no sequence and rows that see nothing become 0.
void attend(Workers& workers, Isa isa, AttendArgs args);

// Stores the rows of up to two parts (K and V) at the same slots.
void write(Workers& workers, Isa isa, const WriteArgs* parts, int num_parts);

void read(Workers& workers, Isa isa, const ReadArgs& args);

// Decodes the tokens [starts[s], seq_lens[s]) of every sequence one after another; sequence s begins at row
// indptr[s] of `out`. Tokens of blocks not held become 0. `starts` may be null (0).
void gather(Workers& workers, Isa isa, const StepView& step, const Store& store, Rows out, const int64_t* indptr,
            const int32_t* starts);

// The slots of the `topk` best-scored tokens of every row, best first, equal scores by position; -1 behind the last.
// Writes `slots` [T, topk].
void score(Workers& workers, Isa isa, const ScoreArgs& args, int topk, int64_t* slots);

// Stores tokens of one part in another: decoded to fp32, encoded again. Slots of -1 on either side are skipped.
void convert(Workers& workers, Isa isa, const Store& src, const int64_t* src_slots, const Store& dst,
             const int64_t* dst_slots, int64_t count);

// A range that holds `bytes` of every block at `base + piece * pitch + block * stride`.
struct Blocks {
  uint8_t* base;
  int64_t stride, pitch;
};

// Copies blocks src_ids[i] of `src` to dst_ids[i] of `dst`, `pieces` ranges of `bytes` each. No destination may
// be a source of the same call.
void copy_blocks(Workers& workers, Blocks src, Blocks dst, int64_t bytes, int pieces, const int32_t* src_ids,
                 const int32_t* dst_ids, int64_t count);

// One plane with the bytes one vector takes in it.
struct VectorPlane {
  Plane plane;
  int num_heads;
  int64_t bytes;
};

// Copies tokens from slot to slot in all planes, in order within a plane: as if one after another.
void move_slots(Workers& workers, const VectorPlane* planes, int num_planes, int tokens_per_block, const int64_t* src,
                const int64_t* dst, int64_t count);

}  // namespace kvpool
