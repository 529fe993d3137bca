#include "kernels/ops.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/heads.hpp"
#include "kernels/isa.hpp"

namespace kvpool {

void attend(Workers& workers, Isa isa, AttendArgs args) {
  std::lock_guard lock(workers.call_mutex());
  const Kernels& kernels = kernels_of(isa);
  const StepView& step = *args.step;
  const int first_free = step.num_sequences > 0 ? step.cu_seqlens[step.num_sequences] : 0;
  for (int t = first_free; t < step.num_tokens; ++t)
    for (int h = 0; h < args.num_q_heads; ++h) {
      std::memset(args.out.at(t, h), 0, static_cast<size_t>(args.v_dim * item_size(args.out.dtype)));
      if (args.lse != nullptr) args.lse[int64_t{t} * args.num_q_heads + h] = -__builtin_huge_valf();
    }
  if (step.num_splits > 0)
    args.partials = reinterpret_cast<float*>(workers.shared(sizeof(float) * static_cast<size_t>(step.num_partial_rows) *
                                                            static_cast<size_t>(args.num_q_heads * (args.v_dim + 2))));
  const int blocks = num_head_blocks(args);
  workers.each(int64_t{step.num_items} * blocks, [&](int64_t i, Scratch& scratch) {
    kernels.attend(args, static_cast<int>(i / blocks), static_cast<int>(i % blocks), scratch);
  });
  workers.each(step.num_merges,
               [&](int64_t i, Scratch& scratch) { kernels.merge(args, static_cast<int>(i), scratch); });
}

namespace {

constexpr int64_t kWriteTokens = 16;  // tokens of one piece of work
constexpr int64_t kBulkBytes = 1 << 20;

}  // namespace

void write(Workers& workers, Isa isa, const WriteArgs* parts, int num_parts) {
  const Kernels& kernels = kernels_of(isa);
  const int64_t tokens = parts[0].num_tokens, chunks = (tokens + kWriteTokens - 1) / kWriteTokens;
  WriteArgs copies[2];
  for (int i = 0; i < num_parts; ++i) {
    copies[i] = parts[i];
    copies[i].bulk = tokens * parts[i].store->num_heads * parts[i].store->dim >= kBulkBytes;
  }
  workers.each(chunks * num_parts, [&](int64_t i, Scratch& scratch) {
    const int64_t begin = i / num_parts * kWriteTokens;
    kernels.write(copies[i % num_parts], begin, std::min(begin + kWriteTokens, tokens), scratch);
  });
}

void read(Workers& workers, Isa isa, const ReadArgs& args) {
  const Kernels& kernels = kernels_of(isa);
  workers.each((args.num_tokens + kWriteTokens - 1) / kWriteTokens, [&](int64_t i, Scratch& scratch) {
    kernels.read(args, i * kWriteTokens, std::min((i + 1) * kWriteTokens, args.num_tokens), scratch);
  });
}

void gather(Workers& workers, Isa isa, const StepView& step, const Store& store, Rows out, const int64_t* indptr,
            const int32_t* starts) {
  const Kernels& kernels = kernels_of(isa);
  struct Piece {
    int sequence, begin, end;
  };
  constexpr int kPiece = 64;
  std::vector<Piece> pieces;
  for (int s = 0; s < step.num_sequences; ++s)
    for (int t = starts != nullptr ? starts[s] : 0; t < step.seq_lens[s]; t += kPiece)
      pieces.push_back({s, t, std::min(t + kPiece, step.seq_lens[s])});
  workers.each(static_cast<int64_t>(pieces.size()), [&](int64_t i, Scratch& scratch) {
    const Piece& p = pieces[static_cast<size_t>(i)];
    const int32_t* table = step.block_table + p.sequence * step.table_stride;
    int64_t slots[kPiece];
    for (int t = p.begin; t < p.end; ++t) {
      const int64_t block = table[t >> store.block_shift];
      slots[t - p.begin] = block < 0 ? -1 : block * store.tokens_per_block + (t & (store.tokens_per_block - 1));
    }
    const int64_t row = indptr[p.sequence] + p.begin - (starts != nullptr ? starts[p.sequence] : 0);
    ReadArgs args{&store, out, slots, p.end - p.begin};
    args.out.base += row * out.stride_t;
    kernels.read(args, 0, args.num_tokens, scratch);
  });
}

}  // namespace kvpool
