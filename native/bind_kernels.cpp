// Bindings of the kernels. Objects are made once; calls pass integers (addresses, strides in elements) because a
// DLPack tensor costs microseconds each. Every call releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <bit>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/isa.hpp"
#include "kernels/ops.hpp"
#include "kernels/probe.hpp"
#include "kernels/schedule.hpp"

namespace nb = nanobind;

namespace kvpool {

namespace {

using Strides = std::tuple<uintptr_t, int64_t, int64_t, int64_t>;  // address, bytes from b, h, n to the next

struct PyWorkers {
  PyWorkers(int num_threads, int isa_code) : workers(num_threads), isa(static_cast<Isa>(isa_code)) {}
  Workers workers;
  Isa isa;
};

struct PyStore : Store {
  Counters counts;
};

struct PyStep : StepView {
  Schedule schedule;
  int max_sequences = 0, max_tokens = 0;
};

// What is the same in every call of a layer's attention.
struct PyAttention {
  AttendArgs args;
};

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void need(bool ok, const std::string& message) {
  if (!ok) throw std::invalid_argument(message);
}

Plane plane(const std::optional<Strides>& p) {
  if (!p) return {};
  return {pointer<uint8_t>(std::get<0>(*p)), std::get<1>(*p), std::get<2>(*p), std::get<3>(*p)};
}

DType dtype(int code) {
  need(code >= 0 && code <= 2, "dtype code must be 0 (fp32), 1 (fp16) or 2 (bf16), got " + std::to_string(code));
  return static_cast<DType>(code);
}

Rows rows(uintptr_t address, int code, int64_t stride_t, int64_t stride_h) {
  const DType type = dtype(code);
  return {pointer<uint8_t>(address), type, stride_t * item_size(type), stride_h * item_size(type)};
}

void make_workers(PyWorkers* self, int num_threads, int isa) {
  need(num_threads >= 1 && num_threads <= 1024, "num_threads must be 1..1024, got " + std::to_string(num_threads));
  const int best = static_cast<int>(best_isa());
  need(isa >= 0 && isa <= best, "isa must be 0.." + std::to_string(best) + " on this CPU, got " + std::to_string(isa));
  new (self) PyWorkers(num_threads, isa);
}

void make_store(PyStore* self, int codec, int num_heads, const std::vector<int>& segments, int tokens_per_block,
                int64_t num_blocks, const Strides& data, const std::optional<Strides>& scale,
                const std::optional<Strides>& block_scale, float constant_scale, uintptr_t smoothing, bool rotation,
                uintptr_t mix_store, uintptr_t mix_restore, uintptr_t mix_ask) {
  need(codec >= 0 && codec < kNumCodecs, "unknown codec code " + std::to_string(codec));
  need(num_heads >= 1, "num_heads must be positive, got " + std::to_string(num_heads));
  need(tokens_per_block >= 2 && std::has_single_bit(static_cast<unsigned>(tokens_per_block)),
       "tokens_per_block must be a power of two of at least 2, got " + std::to_string(tokens_per_block));
  need(!segments.empty() && segments.size() <= kMaxSegments,
       "a vector has 1.." + std::to_string(kMaxSegments) + " segments, got " + std::to_string(segments.size()));
  new (self) PyStore();
  Store& s = *self;
  s.codec = static_cast<CodecId>(codec);
  s.num_heads = num_heads;
  s.tokens_per_block = tokens_per_block;
  s.block_shift = std::countr_zero(static_cast<unsigned>(tokens_per_block));
  s.num_blocks = num_blocks;
  s.num_segments = static_cast<int>(segments.size());
  for (size_t i = 0; i < segments.size(); ++i) {
    need(segments[i] >= 1, "a segment must have elements, got " + std::to_string(segments[i]));
    s.segments[i] = segments[i];
    s.dim += segments[i];
  }
  need(s.dim <= kMaxDim, "vectors have at most " + std::to_string(kMaxDim) + " elements, got " + std::to_string(s.dim));
  s.data = plane(data);
  s.scale = plane(scale);
  s.block_scale = plane(block_scale);
  s.constant_scale = constant_scale;
  s.smoothing = pointer<const float>(smoothing);
  s.rotation = rotation;
  s.mix_store = pointer<const float>(mix_store);
  s.mix_restore = pointer<const float>(mix_restore);
  s.mix_ask = pointer<const float>(mix_ask);
  int common = 0;
  for (int segment : segments) common = std::gcd(common, segment);
  s.rotation_block = common & -common;
  need(!rotation || s.rotation_block >= 32,
       "rotation needs a power of two of at least 32 that divides the vector's segments, got " +
           std::to_string(s.rotation_block) + "; switch it off for this part");
  s.counters = &self->counts;
}

void make_step(PyStep* self, uintptr_t cu_seqlens, uintptr_t seq_lens, uintptr_t block_table, int64_t table_stride,
               uintptr_t slots, int max_sequences, int max_tokens, int window, int chunk, int sink_tokens) {
  need(window >= 0 && chunk >= 0 && sink_tokens >= 0, "window, chunk and sink_tokens must not be negative");
  need(window == 0 || chunk == 0, "a group has a window or a chunk, not both");
  new (self) PyStep();
  self->cu_seqlens = pointer<const int32_t>(cu_seqlens);
  self->seq_lens = pointer<const int32_t>(seq_lens);
  self->block_table = pointer<const int32_t>(block_table);
  self->table_stride = table_stride;
  self->slots = pointer<const int64_t>(slots);
  self->max_sequences = max_sequences;
  self->max_tokens = max_tokens;
  self->window = window;
  self->chunk = chunk;
  self->sink_tokens = sink_tokens;
}

void plan_step(PyStep& self, int num_sequences, int num_tokens, int num_workers, int num_kv_heads, int rows_per_item,
               int split_tokens) {
  need(num_sequences >= 0 && num_sequences <= self.max_sequences,
       "num_sequences must be 0.." + std::to_string(self.max_sequences) + ", got " + std::to_string(num_sequences));
  need(num_tokens >= 0 && num_tokens <= self.max_tokens,
       "num_tokens must be 0.." + std::to_string(self.max_tokens) + ", got " + std::to_string(num_tokens));
  need(rows_per_item >= 1 && num_workers >= 1 && num_kv_heads >= 1 && split_tokens >= 0,
       "rows_per_item, num_workers and num_kv_heads must be positive, split_tokens not negative");
  self.num_sequences = num_sequences;
  self.num_tokens = num_tokens;
  nb::gil_scoped_release release;
  self.schedule.plan(self, {num_workers, num_kv_heads, rows_per_item, split_tokens});
  self.schedule.attach(self);
}

void make_attention(PyAttention* self, const std::vector<const PyStore*>& k, const PyStore& v, int v_dim,
                    int num_q_heads) {
  need(k.size() == 1 || k.size() == 2, "keys are one store or two (latent and rope), got " + std::to_string(k.size()));
  const int heads = k[0]->num_heads;
  need(num_q_heads >= heads && num_q_heads % heads == 0 && num_q_heads / heads <= 128,
       "num_q_heads must be a multiple of the " + std::to_string(heads) + " KV heads, at most 128 times, got " +
           std::to_string(num_q_heads));
  int dim = 0;
  for (const PyStore* store : k) {
    need(store->num_heads == heads && store->tokens_per_block == v.tokens_per_block,
         "keys and values must have the same heads and tokens_per_block");
    dim += store->dim;
  }
  need(v.num_heads == heads, "keys and values must have the same heads");
  need(dim <= kMaxDim, "keys have at most " + std::to_string(kMaxDim) + " elements, got " + std::to_string(dim));
  need(v_dim >= 1 && v_dim <= v.dim, "v_dim must be 1.." + std::to_string(v.dim) + ", got " + std::to_string(v_dim));
  need(!v.rotation || v_dim % v.rotation_block == 0, "v_dim must be a multiple of the rotation block " +
                                                         std::to_string(v.rotation_block) + ", got " +
                                                         std::to_string(v_dim));
  need(v.mix_restore == nullptr, "mixing is for keys; values can have smoothing or rotation");
  new (self) PyAttention();
  self->args.num_k = static_cast<int>(k.size());
  for (size_t i = 0; i < k.size(); ++i) self->args.k[i] = k[i];
  self->args.v = &v;
  self->args.v_dim = v_dim;
  self->args.num_q_heads = num_q_heads;
}

void call_attention(const PyAttention& self, PyWorkers& workers, const PyStep& step, uintptr_t q, int q_dtype,
                    int64_t q_stride_t, int64_t q_stride_h, uintptr_t out, int out_dtype, int64_t out_stride_t,
                    int64_t out_stride_h, float scale, float softcap, uintptr_t sinks, uintptr_t lse, uintptr_t indices,
                    int num_indices, uintptr_t tree_mask, int tree_words) {
  AttendArgs args = self.args;
  args.step = &step;
  args.q = rows(q, q_dtype, q_stride_t, q_stride_h);
  args.out = rows(out, out_dtype, out_stride_t, out_stride_h);
  args.scale = scale;
  args.softcap = softcap;
  args.sinks = pointer<const float>(sinks);
  args.lse = pointer<float>(lse);
  args.indices = pointer<const int64_t>(indices);
  args.num_indices = num_indices;
  args.tree_mask = pointer<const uint64_t>(tree_mask);
  args.tree_words = tree_words;
  nb::gil_scoped_release release;
  attend(workers.workers, workers.isa, args);
}

WriteArgs write_args(const PyStep& step, const PyStore& store, uintptr_t src, int code, int64_t stride_t,
                     int64_t stride_h) {
  return {&store, rows(src, code, stride_t, stride_h), step.slots, step.num_tokens};
}

void check_slots(const Store& store, const int64_t* slots, int64_t count) {
  const int64_t limit = store.num_blocks * store.tokens_per_block;
  int64_t top = -1;
  for (int64_t i = 0; i < count; ++i) top = slots[i] > top ? slots[i] : top;
  need(top < limit, "slot " + std::to_string(top) + " lies outside the pool of " + std::to_string(limit) + " slots");
}

void write_one(PyWorkers& workers, const PyStep& step, const PyStore& store, uintptr_t src, int code, int64_t stride_t,
               int64_t stride_h) {
  check_slots(store, step.slots, step.num_tokens);
  const WriteArgs args = write_args(step, store, src, code, stride_t, stride_h);
  nb::gil_scoped_release release;
  write(workers.workers, workers.isa, &args, 1);
}

void write_two(PyWorkers& workers, const PyStep& step, const PyStore& k_store, uintptr_t k, int64_t k_stride_t,
               int64_t k_stride_h, const PyStore& v_store, uintptr_t v, int64_t v_stride_t, int64_t v_stride_h,
               int code) {
  check_slots(k_store, step.slots, step.num_tokens);
  check_slots(v_store, step.slots, step.num_tokens);
  const WriteArgs args[] = {write_args(step, k_store, k, code, k_stride_t, k_stride_h),
                            write_args(step, v_store, v, code, v_stride_t, v_stride_h)};
  nb::gil_scoped_release release;
  write(workers.workers, workers.isa, args, 2);
}

void read_slots(PyWorkers& workers, const PyStore& store, uintptr_t slots, int64_t count, uintptr_t out, int code,
                int64_t stride_t, int64_t stride_h) {
  check_slots(store, pointer<const int64_t>(slots), count);
  const ReadArgs args{&store, rows(out, code, stride_t, stride_h), pointer<const int64_t>(slots), count};
  nb::gil_scoped_release release;
  read(workers.workers, workers.isa, args);
}

void gather_step(PyWorkers& workers, const PyStep& step, const PyStore& store, uintptr_t out, int code,
                 int64_t stride_t, int64_t stride_h, uintptr_t indptr, uintptr_t starts) {
  const Rows to = rows(out, code, stride_t, stride_h);
  nb::gil_scoped_release release;
  gather(workers.workers, workers.isa, step, store, to, pointer<const int64_t>(indptr), pointer<const int32_t>(starts));
}

void copy(PyWorkers& workers, uintptr_t src, int64_t src_stride, int64_t src_pitch, uintptr_t dst, int64_t dst_stride,
          int64_t dst_pitch, int64_t bytes, int pieces, uintptr_t src_ids, uintptr_t dst_ids, int64_t count) {
  need(bytes >= 0 && pieces >= 1 && count >= 0, "bytes and count must not be negative, pieces must be positive");
  nb::gil_scoped_release release;
  copy_blocks(workers.workers, {pointer<uint8_t>(src), src_stride, src_pitch},
              {pointer<uint8_t>(dst), dst_stride, dst_pitch}, bytes, pieces, pointer<const int32_t>(src_ids),
              pointer<const int32_t>(dst_ids), count);
}

void score_step(PyWorkers& workers, const PyStep& step, const PyStore& store, uintptr_t q, int code, int64_t stride_t,
                int64_t stride_h, int num_q_heads, uintptr_t weights, int topk, uintptr_t slots) {
  need(store.num_heads == 1, "indexer keys have one head, got " + std::to_string(store.num_heads));
  need(num_q_heads >= 1 && topk >= 1, "num_q_heads and topk must be positive");
  const ScoreArgs args{&step, &store, rows(q, code, stride_t, stride_h), pointer<const float>(weights), num_q_heads};
  nb::gil_scoped_release release;
  score(workers.workers, workers.isa, args, topk, pointer<int64_t>(slots));
}

void convert_slots(PyWorkers& workers, const PyStore& src, uintptr_t src_slots, const PyStore& dst, uintptr_t dst_slots,
                   int64_t count) {
  need(src.num_heads == dst.num_heads && src.dim == dst.dim,
       "both stores must have the same heads and sizes, got " + std::to_string(src.num_heads) + " x " +
           std::to_string(src.dim) + " and " + std::to_string(dst.num_heads) + " x " + std::to_string(dst.dim));
  check_slots(src, pointer<const int64_t>(src_slots), count);
  check_slots(dst, pointer<const int64_t>(dst_slots), count);
  nb::gil_scoped_release release;
  convert(workers.workers, workers.isa, src, pointer<const int64_t>(src_slots), dst, pointer<const int64_t>(dst_slots),
          count);
}

struct PyMover {
  std::vector<VectorPlane> planes;
  int tokens_per_block;
};

void make_mover(PyMover* self, const std::vector<std::tuple<Strides, int, int64_t>>& planes, int tokens_per_block) {
  need(tokens_per_block >= 1, "tokens_per_block must be positive, got " + std::to_string(tokens_per_block));
  new (self) PyMover();
  for (const auto& [strides, num_heads, bytes] : planes) self->planes.push_back({plane(strides), num_heads, bytes});
  self->tokens_per_block = tokens_per_block;
}

void move(const PyMover& self, PyWorkers& workers, uintptr_t src, uintptr_t dst, int64_t count) {
  nb::gil_scoped_release release;
  move_slots(workers.workers, self.planes.data(), static_cast<int>(self.planes.size()), self.tokens_per_block,
             pointer<const int64_t>(src), pointer<const int64_t>(dst), count);
}

}  // namespace

void bind_kernels(nb::module_& m) {
  nb::class_<PyWorkers>(m, "Workers", "Threads and the instruction set they use.")
      .def("__init__", &make_workers, nb::arg("num_threads"), nb::arg("isa"))
      .def_prop_ro("num_threads", [](const PyWorkers& w) { return w.workers.num_threads(); })
      .def_prop_ro("isa", [](const PyWorkers& w) { return static_cast<int>(w.isa); });

  nb::class_<PyStore>(m, "Store", "One part (K, V, latent, rope, index) of one layer.")
      .def("__init__", &make_store, nb::arg("codec"), nb::arg("num_heads"), nb::arg("segments"),
           nb::arg("tokens_per_block"), nb::arg("num_blocks"), nb::arg("data"), nb::arg("scale").none() = nb::none(),
           nb::arg("block_scale").none() = nb::none(), nb::arg("constant_scale") = 1.0f, nb::arg("smoothing") = 0,
           nb::arg("rotation") = false, nb::arg("mix_store") = 0, nb::arg("mix_restore") = 0, nb::arg("mix_ask") = 0)
      .def("counters", [](const PyStore& s) {
        return std::tuple(__atomic_load_n(&s.counts.saturated, __ATOMIC_RELAXED),
                          __atomic_load_n(&s.counts.flushed, __ATOMIC_RELAXED),
                          __atomic_load_n(&s.counts.nonfinite, __ATOMIC_RELAXED));
      });

  nb::class_<PyStep>(m, "StepView", "The index arrays of a step of one group, at fixed addresses.")
      .def("__init__", &make_step, nb::arg("cu_seqlens"), nb::arg("seq_lens"), nb::arg("block_table"),
           nb::arg("table_stride"), nb::arg("slots"), nb::arg("max_sequences"), nb::arg("max_tokens"),
           nb::arg("window") = 0, nb::arg("chunk") = 0, nb::arg("sink_tokens") = 0)
      .def("plan", &plan_step, nb::arg("num_sequences"), nb::arg("num_tokens"), nb::arg("num_workers"),
           nb::arg("num_kv_heads"), nb::arg("rows_per_item") = 32, nb::arg("split_tokens") = 0)
      .def_prop_ro("num_sequences", [](const PyStep& s) { return s.num_sequences; })
      .def_prop_ro("num_tokens", [](const PyStep& s) { return s.num_tokens; })
      .def("items",
           [](const PyStep& s) {
             std::vector<std::tuple<int, int, int, int, int, int>> out;
             for (const WorkItem& i : s.schedule.items())
               out.emplace_back(i.sequence, i.row_begin, i.row_end, i.token_begin, i.token_end, i.split);
             return out;
           })
      .def("cumulative_splits", [](const PyStep& s) { return s.schedule.cumulative_splits(); });

  nb::class_<PyAttention>(m, "Attention", "What is the same in every attention call of a layer.")
      .def("__init__", &make_attention, nb::arg("k"), nb::arg("v"), nb::arg("v_dim"), nb::arg("num_q_heads"),
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
      .def(
          "path",
          [](const PyAttention& self, const PyWorkers& workers, int q_dtype, int rows) {
            AttendArgs args = self.args;
            args.q.dtype = dtype(q_dtype);
            return attend_kernel(workers.isa, args, rows * (args.num_q_heads / args.k[0]->num_heads)).name;
          },
          nb::arg("workers"), nb::arg("q_dtype"), nb::arg("rows") = 1)
      .def("__call__", &call_attention, nb::arg("workers"), nb::arg("step"), nb::arg("q"), nb::arg("q_dtype"),
           nb::arg("q_stride_t"), nb::arg("q_stride_h"), nb::arg("out"), nb::arg("out_dtype"), nb::arg("out_stride_t"),
           nb::arg("out_stride_h"), nb::arg("scale"), nb::arg("softcap"), nb::arg("sinks"), nb::arg("lse"),
           nb::arg("indices"), nb::arg("num_indices"), nb::arg("tree_mask"), nb::arg("tree_words"));

  nb::class_<PyMover>(m, "Mover", "All planes of a group, for moves of single tokens.")
      .def("__init__", &make_mover, nb::arg("planes"), nb::arg("tokens_per_block"))
      .def("__call__", &move, nb::arg("workers"), nb::arg("src"), nb::arg("dst"), nb::arg("count"));

  m.def("write", &write_one, nb::arg("workers"), nb::arg("step"), nb::arg("store"), nb::arg("src"), nb::arg("dtype"),
        nb::arg("stride_t"), nb::arg("stride_h"), "Store the rows of one part at the step's slots.");
  m.def("write_kv", &write_two, nb::arg("workers"), nb::arg("step"), nb::arg("k_store"), nb::arg("k"),
        nb::arg("k_stride_t"), nb::arg("k_stride_h"), nb::arg("v_store"), nb::arg("v"), nb::arg("v_stride_t"),
        nb::arg("v_stride_h"), nb::arg("dtype"), "Store the rows of K and V at the step's slots.");
  m.def("read", &read_slots, nb::arg("workers"), nb::arg("store"), nb::arg("slots"), nb::arg("count"), nb::arg("out"),
        nb::arg("dtype"), nb::arg("stride_t"), nb::arg("stride_h"), "Decode tokens by slot; -1 gives zeros.");
  m.def("gather", &gather_step, nb::arg("workers"), nb::arg("step"), nb::arg("store"), nb::arg("out"), nb::arg("dtype"),
        nb::arg("stride_t"), nb::arg("stride_h"), nb::arg("indptr"), nb::arg("starts"),
        "Decode the sequences of a step one after another.");
  m.def("score", &score_step, nb::arg("workers"), nb::arg("step"), nb::arg("store"), nb::arg("q"), nb::arg("dtype"),
        nb::arg("stride_t"), nb::arg("stride_h"), nb::arg("num_q_heads"), nb::arg("weights"), nb::arg("topk"),
        nb::arg("slots"), "Write the slots of the best-scored tokens of every row.");
  m.def("convert", &convert_slots, nb::arg("workers"), nb::arg("src"), nb::arg("src_slots"), nb::arg("dst"),
        nb::arg("dst_slots"), nb::arg("count"), "Store tokens of one part in another, in its format.");
  m.def(
      "read_probe",
      [](PyWorkers& w, uintptr_t base, uintptr_t offsets, int64_t count, int64_t num_bytes) {
        nb::gil_scoped_release release;
        return read_probe(w.workers, pointer<const uint8_t>(base), pointer<const int64_t>(offsets), count, num_bytes);
      },
      nb::arg("workers"), nb::arg("base"), nb::arg("offsets"), nb::arg("count"), nb::arg("num_bytes"),
      "Read pieces of memory in the given order; returns a checksum.");
  m.def(
      "dot_probe",
      [](PyWorkers& w) {
        nb::gil_scoped_release release;
        return dot_probe(w.workers);
      },
      nb::arg("workers"), "Multiply bf16 pairs in registers; returns the operations done, 0 where the CPU cannot.");
  m.def(
      "copy_probe",
      [](PyWorkers& w, uintptr_t dst, uintptr_t src, int64_t num_bytes) {
        nb::gil_scoped_release release;
        copy_probe(w.workers, pointer<uint8_t>(dst), pointer<const uint8_t>(src), num_bytes);
      },
      nb::arg("workers"), nb::arg("dst"), nb::arg("src"), nb::arg("num_bytes"), "Copy memory by memcpy.");
  m.def("copy_blocks", &copy, nb::arg("workers"), nb::arg("src"), nb::arg("src_stride"), nb::arg("src_pitch"),
        nb::arg("dst"), nb::arg("dst_stride"), nb::arg("dst_pitch"), nb::arg("num_bytes"), nb::arg("pieces"),
        nb::arg("src_ids"), nb::arg("dst_ids"), nb::arg("count"), "Copy whole blocks between ids or slabs.");
}

}  // namespace kvpool
