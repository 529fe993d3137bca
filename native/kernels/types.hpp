// What a kernel is given: planes as pointers and byte strides, a codec, the step's index arrays. No layout name,
// no model, no Python.
#pragma once

#include <cstdint>

// Functions of shared headers must never be emitted out of line by a file of a higher instruction set.
#define KVPOOL_INLINE inline __attribute__((always_inline))

namespace kvpool {

// Stored formats, in the order of the Python table `kvpool.backends.cpu.CODEC_IDS`.
enum class CodecId : int {
  fp32 = 0,
  fp16,
  bf16,
  fp8,
  fp8_tensor,
  fp8e5m2_tensor,
  int8,
  int8_tensor,
  nvfp4,
  nvfp4_token,
  index_fp8,
  index_fp4,
};
inline constexpr int kNumCodecs = 12;

// Element types of tensors outside the pool (queries, new keys, outputs).
enum class DType : int { fp32 = 0, fp16 = 1, bf16 = 2 };

KVPOOL_INLINE constexpr int64_t item_size(DType dtype) { return dtype == DType::fp32 ? 4 : 2; }

// One plane of one layer and factor: `address(b, h, n) = base + b * stride_b + h * stride_h + n * stride_n`, bytes.
// The last axis (containers) is dense.
struct Plane {
  uint8_t* base = nullptr;
  int64_t stride_b = 0, stride_h = 0, stride_n = 0;

  KVPOOL_INLINE uint8_t* at(int64_t b, int64_t h, int64_t n) const {
    return base + b * stride_b + h * stride_h + n * stride_n;
  }
};

// Elements that a codec could not keep; added to atomically.
struct Counters {
  int64_t saturated = 0, flushed = 0, nonfinite = 0;
};

inline constexpr int kMaxSegments = 64;
inline constexpr int kMaxDim = 1024;

// One part (K, V, latent, rope, index) of one layer.
struct Store {
  CodecId codec = CodecId::fp32;
  int num_heads = 0, dim = 0, tokens_per_block = 0;
  int block_shift = 0;  // log2(tokens_per_block)
  int num_segments = 1;
  int segments[kMaxSegments] = {};
  int64_t num_blocks = 0;  // addresses the slab has; ids at or above it are refused
  Plane data, scale, block_scale;
  float constant_scale = 1.0f;
  const float* smoothing = nullptr;  // [H, D] fp32 or null
  bool rotation = false;
  int rotation_block = 1;  // largest power of two that divides every segment
  // [H, D, D] fp32, or null: a vector times one of them is stored, given back, asked. In the place of both above.
  const float *mix_store = nullptr, *mix_restore = nullptr, *mix_ask = nullptr;
  Counters* counters = nullptr;

  bool has_maps() const { return smoothing != nullptr || rotation || mix_store != nullptr; }
};

// A tensor outside the pool, [T, H, D] with a dense last axis. Strides in bytes.
struct Rows {
  uint8_t* base = nullptr;
  DType dtype = DType::fp32;
  int64_t stride_t = 0, stride_h = 0;

  KVPOOL_INLINE uint8_t* at(int64_t t, int64_t h) const { return base + t * stride_t + h * stride_h; }
};

// A piece of attention work: query rows of one sequence over a range of its tokens.
struct WorkItem {
  int32_t sequence;
  int32_t row_begin, row_end;      // within the sequence's rows of this step
  int32_t token_begin, token_end;  // positions looked at, before masks
  int32_t first;                   // 1 on the piece that also looks at the sink tokens
  int32_t last;                    // 1 on the piece that ends the range
  int32_t split;                   // place of its partial result; -1 when it is the whole answer
};

// The splits [first, first + count) that make up the rows of one item.
struct Merge {
  int32_t sequence;
  int32_t row_begin, row_end;
  int32_t first_split, num_splits;
};

// One step of one group.
struct StepView {
  const int32_t* cu_seqlens = nullptr;   // [S+1]
  const int32_t* seq_lens = nullptr;     // [S], after the step
  const int32_t* block_table = nullptr;  // [S, M]
  int64_t table_stride = 0;              // entries from one row to the next
  const int64_t* slots = nullptr;        // [T], -1 = write nothing
  int num_sequences = 0, num_tokens = 0;
  // The group's lifetime.
  int window = 0, chunk = 0, sink_tokens = 0;  // 0 = none
  // The schedule, owned by `Schedule`.
  const WorkItem* items = nullptr;
  int num_items = 0;
  const Merge* merges = nullptr;
  int num_merges = 0;
  const int32_t* split_rows = nullptr;  // [num_splits] first row of a split in the partial buffer
  int num_splits = 0;
  int64_t num_partial_rows = 0;
};

// One attention call: every layer of a step makes one.
struct AttendArgs {
  const StepView* step = nullptr;
  const Store* k[2] = {};  // latent and rope when they are stored apart
  int num_k = 1;
  const Store* v = nullptr;  // may be k[0]: MLA reads its first v_dim elements
  int v_dim = 0;
  int num_q_heads = 0;
  Rows q, out;
  float scale = 1.0f, softcap = 0.0f;
  const float* sinks = nullptr;  // [Q], an extra logit of the denominator
  float* lse = nullptr;          // [T, Q] fp32 or null
  // Sparse attention: slots seen by each row, -1 none. Overrides positions.
  const int64_t* indices = nullptr;  // [T, num_indices]
  int num_indices = 0;
  // Tree verification: bit j of row i says that the step's row j of the same sequence is seen by row i.
  const uint64_t* tree_mask = nullptr;  // [T, tree_words]
  int tree_words = 0;
  int heads_together = 1;  // KV heads that a piece of work takes
  int num_workers = 1;
  // Partial results of split items: [rows, Q, v_dim + 2] fp32 (sum, maximum, then the unnormalised output).
  float* partials = nullptr;
};

struct WriteArgs {
  const Store* store = nullptr;
  Rows src;
  const int64_t* slots = nullptr;
  int64_t num_tokens = 0;
  bool bulk = false;  // rows are not read soon: non-temporal stores
};

// The codec that stores elements of a type as they are.
KVPOOL_INLINE constexpr CodecId plain_codec(DType type) {
  return type == DType::fp32 ? CodecId::fp32 : type == DType::fp16 ? CodecId::fp16 : CodecId::bf16;
}

// A write of elements that are stored as they come: no codec runs.
KVPOOL_INLINE bool is_copy(const WriteArgs& a) {
  return a.store->codec == plain_codec(a.src.dtype) && !a.store->has_maps();
}

// Decode whole tokens by slot; -1 gives zeros.
struct ReadArgs {
  const Store* store = nullptr;
  Rows out;
  const int64_t* slots = nullptr;
  int64_t num_tokens = 0;
};

// Indexer scores of every row of a step over the keys of its sequence.
struct ScoreArgs {
  const StepView* step = nullptr;
  const Store* store = nullptr;    // one head
  Rows q;                          // [T, Q, D]
  const float* weights = nullptr;  // [T, Q] fp32
  int num_q_heads = 0;
};

// Rows [row_begin, row_end) of a sequence against its tokens [begin, end).
struct ScoreItem {
  int sequence, row_begin, row_end, begin, end;
};

struct Scratch;

// The kernels of one instruction set. Each call does one piece of work on the calling thread.
struct Kernels {
  void (*attend)(const AttendArgs&, int item, int head_block, Scratch&);
  void (*merge)(const AttendArgs&, int merge, Scratch&);
  void (*write)(const WriteArgs&, int64_t begin, int64_t end, Scratch&);
  void (*read)(const ReadArgs&, int64_t begin, int64_t end, Scratch&);
  void (*score)(const ScoreArgs&, const ScoreItem&, float* out, Scratch&);
};

}  // namespace kvpool
