// Every kernel on every instruction set of this CPU against plain loops in double, on buffers of exactly the size
// they need: built with the address and undefined-behaviour sanitizers, a read or write outside them ends the run.
//
//   cmake --build build --target native_tests && build/native_tests
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "kernels/isa.hpp"
#include "kernels/ops.hpp"
#include "kernels/probe.hpp"
#include "kernels/schedule.hpp"

namespace kvpool {
namespace {

int failures = 0;

void check(bool ok, const char* what, int codec, int isa) {
  if (ok) return;
  ++failures;
  std::printf("FAILED %s: codec %d, instruction set %d\n", what, codec, isa);
}

int bytes_per_vector(CodecId codec, int dim) {
  switch (codec) {
    case CodecId::fp32:
      return 4 * dim;
    case CodecId::fp16:
    case CodecId::bf16:
      return 2 * dim;
    case CodecId::nvfp4:
    case CodecId::nvfp4_token:
    case CodecId::index_fp4:
      return dim / 2;
    default:
      return dim;
  }
}

bool has_scale(CodecId codec) {
  return codec == CodecId::fp8 || codec == CodecId::int8 || codec == CodecId::nvfp4_token ||
         codec == CodecId::index_fp8;
}

// Bytes of the block scales of one vector.
int block_scale_bytes(CodecId codec, int dim) {
  if (codec == CodecId::nvfp4 || codec == CodecId::nvfp4_token) return dim / 16;
  return codec == CodecId::index_fp4 ? dim / 32 : 0;
}

// A store whose planes are separate allocations of exactly their size; a codec has no others.
struct Owned {
  Store store;
  Counters counters;
  std::unique_ptr<uint8_t[]> data, scale, block_scale;

  Owned(CodecId codec, int heads, const std::vector<int>& segments, int tokens, int blocks, bool token_major) {
    store.codec = codec;
    store.num_heads = heads;
    store.num_segments = static_cast<int>(segments.size());
    for (size_t i = 0; i < segments.size(); ++i) store.dim += store.segments[i] = segments[i];
    const int dim = store.dim;
    store.tokens_per_block = tokens;
    store.block_shift = __builtin_ctz(static_cast<unsigned>(tokens));
    store.num_blocks = blocks;
    store.constant_scale = 0.02f;
    store.counters = &counters;
    data = plane(store.data, bytes_per_vector(codec, dim), token_major);
    if (has_scale(codec)) scale = plane(store.scale, 4 * store.num_segments, false);
    if (const int bytes = block_scale_bytes(codec, dim); bytes > 0)
      block_scale = plane(store.block_scale, bytes, token_major);
  }

  std::unique_ptr<uint8_t[]> plane(Plane& p, int64_t bytes, bool token_major) {
    const int64_t heads = store.num_heads, tokens = store.tokens_per_block;
    p.stride_b = bytes * heads * tokens;
    p.stride_h = token_major ? bytes : bytes * tokens;
    p.stride_n = token_major ? bytes * heads : bytes;
    auto memory = std::make_unique<uint8_t[]>(static_cast<size_t>(p.stride_b * store.num_blocks));
    std::memset(memory.get(), 0xff, static_cast<size_t>(p.stride_b * store.num_blocks));  // NaN everywhere
    p.base = memory.get();
    return memory;
  }
};

struct Case {
  CodecId codec;
  int heads, group, dim, tokens;
  bool token_major;
  DType q_type;
  int window, split;
  bool latent = false;  // one store is key and value; its last quarter is the rope part, with a scale of its own
};

uint16_t to_bf16(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

float from_bf16(uint16_t x) {
  const uint32_t u = uint32_t{x} << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

// Returns what attention gave.
std::vector<float> run(const Case& c, Isa isa, Workers& workers) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  const int lengths[] = {70, 0, 131, 5}, rows[] = {1, 2, 37, 3};
  const int sequences = 4;
  const int code = static_cast<int>(c.codec), set = static_cast<int>(isa);
  std::vector<int32_t> cu{0}, lens(lengths, lengths + sequences);
  int blocks = 0, most = 0;
  for (int s = 0; s < sequences; ++s) {
    cu.push_back(cu.back() + rows[s]);
    const int need = (lengths[s] + c.tokens - 1) / c.tokens;
    blocks += need;
    most = std::max(most, need);
  }
  const int total = cu.back();
  std::vector<int32_t> table(static_cast<size_t>(sequences * most), -1);
  int next = blocks - 1;
  for (int s = 0; s < sequences; ++s)
    for (int b = 0; b < (lengths[s] + c.tokens - 1) / c.tokens; ++b) table[static_cast<size_t>(s * most + b)] = next--;
  const int v_dim = c.latent ? c.dim / 4 * 3 : c.dim;
  const std::vector<int> segments = c.latent ? std::vector<int>{v_dim, c.dim - v_dim} : std::vector<int>{c.dim};
  Owned k(c.codec, c.heads, segments, c.tokens, blocks, c.token_major);
  Owned v(c.codec, c.heads, segments, c.tokens, blocks, c.token_major);

  for (int s = 0; s < sequences; ++s) {
    std::vector<int64_t> slots;
    for (int t = 0; t < lengths[s]; ++t)
      slots.push_back(int64_t{table[static_cast<size_t>(s * most + t / c.tokens)]} * c.tokens + t % c.tokens);
    std::vector<float> x(static_cast<size_t>(lengths[s] * c.heads * c.dim));
    for (Owned* part : {&k, &v}) {
      for (float& value : x) value = normal(random);
      std::vector<uint16_t> x16(x.size());
      for (size_t i = 0; i < x.size(); ++i) x16[i] = to_bf16(x[i]);
      uint8_t* rows =
          c.q_type == DType::bf16 ? reinterpret_cast<uint8_t*>(x16.data()) : reinterpret_cast<uint8_t*>(x.data());
      const int64_t bytes = item_size(c.q_type);
      WriteArgs args{&part->store, {rows, c.q_type, bytes * c.heads * c.dim, bytes * c.dim}, slots.data(), lengths[s]};
      if (lengths[s] > 0) write(workers, isa, &args, 1);
    }
  }

  StepView step;
  step.cu_seqlens = cu.data();
  step.seq_lens = lens.data();
  step.block_table = table.data();
  step.table_stride = most;
  step.num_sequences = sequences;
  step.num_tokens = total;
  step.window = c.window;
  Schedule schedule;
  schedule.plan(step, {workers.num_threads(), c.heads, 32, c.split});
  schedule.attach(step);

  const int queries = c.heads * c.group;
  std::vector<float> q32(static_cast<size_t>(total * queries * c.dim));
  std::vector<uint16_t> q16(q32.size());
  for (size_t i = 0; i < q32.size(); ++i) {
    q16[i] = to_bf16(normal(random));
    q32[i] = from_bf16(q16[i]);
  }
  std::vector<float> out(static_cast<size_t>(total * queries * v_dim), NAN),
      lse(static_cast<size_t>(total * queries), NAN);
  AttendArgs args;
  args.step = &step;
  args.k[0] = &k.store;
  args.v = c.latent ? &k.store : &v.store;
  args.v_dim = v_dim;
  args.num_q_heads = queries;
  const int64_t item = item_size(c.q_type);
  args.q = {c.q_type == DType::fp32 ? reinterpret_cast<uint8_t*>(q32.data()) : reinterpret_cast<uint8_t*>(q16.data()),
            c.q_type, item * queries * c.dim, item * c.dim};
  args.out = {reinterpret_cast<uint8_t*>(out.data()), DType::fp32, 4 * queries * v_dim, 4 * v_dim};
  args.scale = 0.1f;
  args.lse = lse.data();
  attend(workers, isa, args);

  std::vector<int64_t> indptr{0};
  for (int s = 0; s < sequences; ++s) indptr.push_back(indptr.back() + lengths[s]);
  std::vector<float> keys(static_cast<size_t>(indptr.back() * c.heads * c.dim)), values(keys.size());
  for (auto [part, to] : {std::pair{&k, &keys}, std::pair{c.latent ? &k : &v, &values}})
    gather(workers, isa, step, part->store,
           {reinterpret_cast<uint8_t*>(to->data()), DType::fp32, 4 * c.heads * c.dim, 4 * c.dim}, indptr.data(),
           nullptr);

  double worst = 0;
  for (int s = 0; s < sequences; ++s)
    for (int r = 0; r < rows[s]; ++r)
      for (int h = r % 4; h < queries; h += 4) {  // every head in some row
        const int position = lengths[s] - rows[s] + r, row = cu[static_cast<size_t>(s)] + r;
        const int first = c.window > 0 ? std::max(0, position - c.window + 1) : 0;
        std::vector<double> weight, want(static_cast<size_t>(v_dim), 0.0);
        double sum = 0;
        for (int t = first; t <= position; ++t) {
          double dot = 0;
          for (int d = 0; d < c.dim; ++d)
            dot +=
                double{q32[static_cast<size_t>((row * queries + h) * c.dim + d)]} *
                keys[static_cast<size_t>(((indptr[static_cast<size_t>(s)] + t) * c.heads + h / c.group) * c.dim + d)];
          weight.push_back(std::exp(0.1 * dot));
          sum += weight.back();
        }
        for (int t = first; t <= position; ++t)
          for (int d = 0; d < v_dim; ++d)
            want[static_cast<size_t>(d)] +=
                weight[static_cast<size_t>(t - first)] / sum *
                values[static_cast<size_t>(((indptr[static_cast<size_t>(s)] + t) * c.heads + h / c.group) * c.dim + d)];
        for (int d = 0; d < v_dim; ++d) {
          const double error =
              std::fabs(out[static_cast<size_t>((row * queries + h) * v_dim + d)] - want[static_cast<size_t>(d)]);
          worst = error > worst || error != error ? error : worst;
        }
      }
  check(worst < (c.q_type == DType::fp32 ? 1e-4 : 3e-2), "attend", code, set);
  return out;
}

// The set's answer against AVX-512's, which differs in the order of sums only.
void same_as_avx512(const Case& c, Isa isa, Workers& workers) {
  const std::vector<float> a = run(c, isa, workers), b = run(c, Isa::avx512, workers);
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) worst = std::max(worst, std::fabs(double{a[i]} - double{b[i]}));
  check(worst < 4e-3, "like AVX-512", static_cast<int>(c.codec), static_cast<int>(isa));
}

void moves(Workers& workers) {
  std::vector<uint8_t> src(7 * 100'003), dst(src.size());
  for (size_t i = 0; i < src.size(); ++i) src[i] = static_cast<uint8_t>(i * 31);
  const int32_t from[] = {6, 0, 3}, to[] = {1, 6, 2};
  copy_blocks(workers, {src.data(), 100'003, 0}, {dst.data(), 100'003, 0}, 100'003, 1, from, to, 3);
  for (int i = 0; i < 3; ++i)
    check(std::memcmp(&dst[static_cast<size_t>(to[i]) * 100'003], &src[static_cast<size_t>(from[i]) * 100'003],
                      100'003) == 0,
          "copy_blocks", -1, -1);
}

}  // namespace
}  // namespace kvpool

int main() {
  using namespace kvpool;
  Workers workers(3);
  // AMX kernels run on emulated tiles here, on any CPU with the rest.
  const bool emulated = best_isa() >= Isa::avx512;
  for (int isa = 0; isa <= static_cast<int>(emulated ? Isa::amx : best_isa()); ++isa)
    for (int codec = 0; codec < kNumCodecs; ++codec) {
      const auto id = static_cast<CodecId>(codec);
      const auto set = static_cast<Isa>(isa);
      for (const DType type : {DType::fp32, DType::bf16}) {
        if (set == Isa::amx && type == DType::fp32) continue;  // AVX-512's kernels
        run({id, 2, 4, 96, 16, false, type, 0, 0}, set, workers);
        if (set < Isa::avx512 && type == DType::bf16) continue;  // as fp32 but for the load of queries
        run({id, 3, 1, 64, 8, true, type, 33, 64}, set, workers);
        run({id, 1, 12, 160, 64, true, type, 0, 64}, set, workers);
        run({id, 1, 16, 256, 16, false, type, 0, 0, true}, set, workers);
      }
      if (set == Isa::amx) {
        same_as_avx512({id, 1, 40, 64, 16, false, DType::bf16, 50, 64}, set, workers);
        same_as_avx512({id, 1, 16, 256, 16, true, DType::bf16, 0, 0, true}, set, workers);
      }
    }
  moves(workers);
  std::printf(failures == 0 ? "all passed\n" : "%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
