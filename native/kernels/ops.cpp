#include "kernels/ops.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/heads.hpp"
#include "kernels/isa.hpp"
#include "kernels/special.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvpool {

namespace {

// KV heads that a piece of work walks together, so that it reads a block from its begin to its end. One where many rows
// work on each head's tokens, or where the heads are needed to give every worker some.
int heads_together(const AttendArgs& args, int num_workers) {
  const Store& k = *args.k[0];
  if (args.indices != nullptr) return 1;
  int each = std::min(k.num_heads, kMostHeadsTogether);
  if (k.data.stride_h < k.data.stride_n) return each;  // side by side: they share lines
  for (int i = 0; i < args.step->num_items; ++i)
    if (rows_of_item(args, i) > kFewRows) return 1;
  const int wanted = num_workers > 1 ? 2 * num_workers : 1;
  while (each > 1 && args.step->num_items * ((k.num_heads + each - 1) / each) < wanted) each = (each + 1) / 2;
  return each;
}

}  // namespace

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
  args.num_workers = workers.num_threads();
  args.heads_together = heads_together(args, args.num_workers);
  const int blocks = num_head_blocks(args);
  workers.each(int64_t{step.num_items} * blocks, [&](int64_t i, Scratch& scratch) {
    const int item = static_cast<int>(i / blocks);
    attend_kernel(isa, args, rows_of_item(args, item)).attend(args, item, static_cast<int>(i % blocks), scratch);
  });
  workers.each(step.num_merges,
               [&](int64_t i, Scratch& scratch) { kernels.merge(args, static_cast<int>(i), scratch); });
}

namespace {

constexpr int64_t kPieceTokens = 16;            // tokens of one piece of work
constexpr int64_t kMostWriteBytes = 512 << 10;  // of a write's source: long pieces suit the prefetchers
constexpr int64_t kBulkBytes = 1 << 20;
constexpr int64_t kTurnBytes = 4 << 10;  // of each part that large copies take in turn

// Waits for this thread's stores past the cache.
void finish_stores() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace

void write(Workers& workers, Isa isa, const WriteArgs* parts, int num_parts) {
  const Kernels& kernels = kernels_of(isa);
  const int64_t tokens = parts[0].num_tokens;
  const int64_t row = parts[0].store->num_heads * parts[0].store->dim * item_size(parts[0].src.dtype);
  const int64_t most = std::max(kPieceTokens, kMostWriteBytes / row);
  const int64_t piece = std::clamp(tokens / (8 * workers.num_threads()), kPieceTokens, most);
  const int64_t chunks = (tokens + piece - 1) / piece;
  WriteArgs copies[2];
  bool in_turn = true;
  for (int i = 0; i < num_parts; ++i) {
    copies[i] = parts[i];
    copies[i].bulk = tokens * parts[i].store->num_heads * parts[i].store->dim >= kBulkBytes;
    in_turn = in_turn && copies[i].bulk && is_copy(copies[i]);
  }
  // Copies wait for memory: two sources at a time hide each other's changes of page. Codecs rather read one.
  const int64_t turn = in_turn ? std::max(int64_t{1}, kTurnBytes / row) : piece;
  const int together = in_turn ? num_parts : 1;
  workers.each(chunks * num_parts / together, [&](int64_t i, Scratch& scratch) {
    const int64_t begin = i * together / num_parts * piece, end = std::min(begin + piece, tokens);
    const int64_t first = i * together % num_parts;
    for (int64_t t = begin; t < end; t += turn)
      for (int64_t part = first; part < first + together; ++part)
        kernels.write(copies[part], t, std::min(t + turn, end), scratch);
    if (copies[first].bulk) finish_stores();
  });
}

void read(Workers& workers, Isa isa, const ReadArgs& args) {
  const Kernels& kernels = kernels_of(isa);
  workers.each((args.num_tokens + kPieceTokens - 1) / kPieceTokens, [&](int64_t i, Scratch& scratch) {
    kernels.read(args, i * kPieceTokens, std::min((i + 1) * kPieceTokens, args.num_tokens), scratch);
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

void convert(Workers& workers, Isa isa, const Store& src, const int64_t* src_slots, const Store& dst,
             const int64_t* dst_slots, int64_t count) {
  const Kernels& kernels = kernels_of(isa);
  const int64_t row = int64_t{src.num_heads} * src.dim * 4;
  workers.each((count + kPieceTokens - 1) / kPieceTokens, [&](int64_t i, Scratch& scratch) {
    const int64_t begin = i * kPieceTokens, tokens = std::min(kPieceTokens, count - begin);
    int64_t slots[kPieceTokens];
    for (int64_t t = 0; t < tokens; ++t) slots[t] = src_slots[begin + t] < 0 ? -1 : dst_slots[begin + t];
    std::vector<uint8_t> rows(static_cast<size_t>(tokens * row));
    const Rows between{rows.data(), DType::fp32, row, int64_t{src.dim} * 4};
    kernels.read({&src, between, src_slots + begin, tokens}, 0, tokens, scratch);
    kernels.write({&dst, between, slots, tokens}, 0, tokens, scratch);
  });
}

namespace {

constexpr int kScoreRows = 16;              // rows that share decoded keys
constexpr int kScoreTokens = 2048;          // keys of one piece of work
constexpr int64_t kScoreFloats = 16 << 20;  // scores held at a time

// Writes the best `topk` of `scores[0, count)` as slots.
void choose(const StepView& step, const Store& store, int sequence, const float* scores, int count, int topk,
            int64_t* out) {
  std::vector<int> order;
  for (int t = 0; t < count; ++t)
    if (scores[t] != -__builtin_huge_valf()) order.push_back(t);
  const auto better = [&](int a, int b) { return scores[a] != scores[b] ? scores[a] > scores[b] : a < b; };
  const int kept = std::min(topk, static_cast<int>(order.size()));
  std::partial_sort(order.begin(), order.begin() + kept, order.end(), better);
  const int32_t* table = step.block_table + sequence * step.table_stride;
  for (int i = 0; i < topk; ++i) {
    const int n = store.tokens_per_block;
    out[i] = i < kept ? int64_t{table[order[i] / n]} * n + order[i] % n : -1;
  }
}

}  // namespace

void score(Workers& workers, Isa isa, const ScoreArgs& args, int topk, int64_t* slots) {
  std::lock_guard lock(workers.call_mutex());
  const Kernels& kernels = kernels_of(isa);
  const StepView& step = *args.step;
  struct Piece {
    ScoreItem item;
    int64_t at;  // of its scores in the buffer
  };
  std::vector<Piece> pieces;
  struct Row {
    int sequence;
    int64_t row;
    int first_piece;
  };
  std::vector<Row> rows;
  int64_t used = 0;
  const auto flush = [&] {
    float* buffer = reinterpret_cast<float*>(workers.shared(sizeof(float) * static_cast<size_t>(used)));
    workers.each(static_cast<int64_t>(pieces.size()), [&](int64_t i, Scratch& scratch) {
      kernels.score(args, pieces[static_cast<size_t>(i)].item, buffer + pieces[static_cast<size_t>(i)].at, scratch);
    });
    workers.each(static_cast<int64_t>(rows.size()), [&](int64_t i, Scratch&) {
      const Row& r = rows[static_cast<size_t>(i)];
      const int count = step.seq_lens[r.sequence];
      std::vector<float> all(static_cast<size_t>(count));
      for (size_t p = static_cast<size_t>(r.first_piece); p < pieces.size(); ++p) {
        const ScoreItem& item = pieces[p].item;
        const int64_t local = r.row - step.cu_seqlens[r.sequence];
        if (item.sequence != r.sequence || local < item.row_begin || local >= item.row_end) break;
        const int length = item.end - item.begin;
        std::copy_n(buffer + pieces[p].at + (local - item.row_begin) * length, length, all.begin() + item.begin);
      }
      choose(step, *args.store, r.sequence, all.data(), count, topk, slots + r.row * topk);
    });
    pieces.clear();
    rows.clear();
    used = 0;
  };
  std::fill_n(slots, int64_t{step.num_tokens} * topk, int64_t{-1});
  for (int s = 0; s < step.num_sequences; ++s) {
    const int num_rows = step.cu_seqlens[s + 1] - step.cu_seqlens[s], length = step.seq_lens[s];
    for (int r = 0; r < num_rows; r += kScoreRows) {
      const int end = std::min(r + kScoreRows, num_rows);
      const int first = static_cast<int>(pieces.size());
      for (int t = 0; t < length; t += kScoreTokens) {
        const int stop = std::min(t + kScoreTokens, length);
        pieces.push_back({{s, r, end, t, stop}, used});
        used += int64_t{end - r} * (stop - t);
      }
      for (int i = r; i < end; ++i) rows.push_back({s, step.cu_seqlens[s] + i, first});
      if (used >= kScoreFloats) flush();
    }
  }
  flush();
}

}  // namespace kvpool
