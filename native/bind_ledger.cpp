// The ledger core in Python: integers and bytes in, tuples out. Shapes and meanings are documented in _native.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <mutex>

#include "ledger/core.hpp"

namespace nb = nanobind;
using namespace kvpool::ledger;

namespace {

using Lock = std::lock_guard<std::mutex>;

// Token ids: a list of ints, or a contiguous int32 or int64 array.
class Tokens {
 public:
  explicit Tokens(nb::handle given) {
    if (PyList_CheckExact(given.ptr()) || PyTuple_CheckExact(given.ptr())) {
      from_sequence(given.ptr());
    } else {
      from_buffer(given.ptr());
    }
    check();
  }
  const std::vector<int32_t>& values() const { return values_; }

 private:
  void from_buffer(PyObject* given) {
    Py_buffer view;
    if (PyObject_GetBuffer(given, &view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) != 0) {
      PyErr_Clear();
      throw nb::type_error("token ids must be a list of ints or a contiguous int32 or int64 array");
    }
    const char kind = view.format ? view.format[0] : 'B';
    const bool is_int = view.ndim == 1 && (kind == 'i' || kind == 'l' || kind == 'q');
    const size_t n = is_int ? static_cast<size_t>(view.shape[0]) : 0;
    if (is_int && view.itemsize == 4) {
      const int32_t* from = static_cast<const int32_t*>(view.buf);
      values_.assign(from, from + n);
    } else if (is_int && view.itemsize == 8) {
      values_.resize(n);
      const int64_t* from = static_cast<const int64_t*>(view.buf);
      bool fits = true;
      for (size_t i = 0; i < n; ++i) {
        values_[i] = static_cast<int32_t>(from[i]);
        fits = fits && from[i] == values_[i];
      }
      if (!fits) values_.assign(1, -1);
    }
    PyBuffer_Release(&view);
    if (!is_int) throw nb::type_error("token ids must be a one-dimensional int32 or int64 array");
  }

  void from_sequence(PyObject* list) {
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(list);
    PyObject** items = PySequence_Fast_ITEMS(list);
    values_.resize(static_cast<size_t>(n));
    for (Py_ssize_t i = 0; i < n; ++i) {
      const long v = PyLong_AsLong(items[i]);
      values_[i] = v < 0 || v > INT32_MAX ? -1 : static_cast<int32_t>(v);
    }
    if (PyErr_Occurred()) {
      PyErr_Clear();
      throw nb::type_error("token ids must be ints");
    }
  }
  void check() const {
    int32_t all = 0;
    for (const int32_t v : values_) all |= v;
    if (all < 0) throw nb::value_error("a token id is negative or does not fit 31 bits; ids are 0 .. 2147483647");
  }
  std::vector<int32_t> values_;
};

std::vector<Item> parse_items(const nb::list& items) {
  std::vector<Item> out;
  out.reserve(nb::len(items));
  for (nb::handle item : items) {
    if (!PyTuple_CheckExact(item.ptr()) || PyTuple_GET_SIZE(item.ptr()) != 2) {
      throw nb::type_error("an item of a step is a tuple (sequence id, max tokens)");
    }
    out.push_back(
        {PyLong_AsLongLong(PyTuple_GET_ITEM(item.ptr(), 0)), PyLong_AsLongLong(PyTuple_GET_ITEM(item.ptr(), 1))});
  }
  if (PyErr_Occurred()) {
    PyErr_Clear();
    throw nb::type_error("an item of a step is a tuple (sequence id, max tokens) of ints");
  }
  return out;
}

nb::tuple decision(const Step& step, int64_t num_samples) {
  nb::list sequences, copies, admitted, sampled;
  int64_t num_tokens = 0;
  for (const Entry& e : step.entries) {
    sequences.append(e.seq->id);
    num_tokens += e.num_tokens;
    if (e.start + e.num_tokens == e.seq->size()) sampled.append(e.seq->id);
    if (e.admitted) admitted.append(nb::make_tuple(e.seq->id, e.cached_tokens, e.partial_tokens));
  }
  for (const Copy& c : step.copies) copies.append(nb::make_tuple(c.group, c.src, c.dst, c.num_tokens));
  return nb::make_tuple(step.id, nb::tuple(sequences), num_tokens, num_samples, nb::tuple(copies), nb::tuple(admitted),
                        nb::tuple(sampled));
}

nb::ndarray<nb::numpy, int32_t, nb::ndim<1>> to_array(const int32_t* data, size_t n) {
  int32_t* copy = new int32_t[n ? n : 1];
  std::copy(data, data + n, copy);
  nb::capsule owner(copy, [](void* p) noexcept { delete[] static_cast<int32_t*>(p); });
  return nb::ndarray<nb::numpy, int32_t, nb::ndim<1>>(copy, {n}, owner);
}

template <class T>
T* pointer(uint64_t address) {
  return reinterpret_cast<T*>(address);
}

void bind_arrays(nb::module_& m) {
  nb::class_<StepArrays>(m, "StepArrays", "Addresses of the index tensors of a step")
      .def(
          "__init__",
          [](StepArrays* self, const std::vector<uint64_t>& addresses, int64_t max_tokens, int64_t max_sequences) {
            new (self) StepArrays();
            self->token_ids = pointer<int64_t>(addresses.at(0));
            self->positions = pointer<int32_t>(addresses.at(1));
            self->cu_seqlens = pointer<int32_t>(addresses.at(2));
            self->num_tokens = pointer<int32_t>(addresses.at(3));
            self->last_rows = pointer<int32_t>(addresses.at(4));
            self->sample_seqs = pointer<int32_t>(addresses.at(5));
            self->draft_parents = pointer<int32_t>(addresses.at(6));
            self->max_tokens = max_tokens;
            self->max_sequences = max_sequences;
          },
          nb::arg("addresses"), nb::arg("max_tokens"), nb::arg("max_sequences"))
      .def(
          "add_group",
          [](StepArrays& self, int32_t tokens_per_block, uint64_t slots, uint64_t table, int64_t width, uint64_t lens) {
            self.groups.push_back({pointer<int64_t>(slots), pointer<int32_t>(table), width, pointer<int32_t>(lens),
                                   nullptr, nullptr, nullptr, tokens_per_block});
          },
          nb::arg("tokens_per_block"), nb::arg("slots"), nb::arg("block_table"), nb::arg("width"), nb::arg("seq_lens"))
      .def(
          "add_state_group",
          [](StepArrays& self, uint64_t read, uint64_t write, uint64_t drafts, int64_t num_draft, uint64_t lens) {
            self.groups.push_back({nullptr, nullptr, num_draft, pointer<int32_t>(lens), pointer<int32_t>(read),
                                   pointer<int32_t>(write), pointer<int32_t>(drafts), 1});
          },
          nb::arg("read_slots"), nb::arg("write_slots"), nb::arg("draft_slots"), nb::arg("num_draft"),
          nb::arg("seq_lens"), "Add a state group; its table width is `num_draft`.");
}

std::string text(nb::handle bytes) {
  char* data;
  Py_ssize_t size;
  if (PyBytes_AsStringAndSize(bytes.ptr(), &data, &size) != 0) {
    PyErr_Clear();
    throw nb::type_error("expected bytes");
  }
  return std::string(data, static_cast<size_t>(size));
}

int64_t open_sequence(Core& self, nb::handle tokens, nb::bytes salt, nb::bytes lora, const nb::list& media,
                      const nb::list& retention, int64_t max_cached) {
  OpenRequest request;
  const Tokens ids(tokens);
  request.tokens = ids.values().data();
  request.num_tokens = static_cast<int64_t>(ids.values().size());
  request.salt = text(salt);
  request.lora = text(lora);
  request.max_cached = max_cached;
  for (nb::handle item : media) {
    request.media.push_back({nb::cast<int64_t>(item[0]), nb::cast<int64_t>(item[1]), text(item[2])});
  }
  for (nb::handle item : retention) {
    request.retention.push_back({nb::cast<int64_t>(item[0]), nb::cast<int64_t>(item[1]), nb::cast<uint8_t>(item[2]),
                                 nb::cast<double>(item[3])});
  }
  const Lock lock(self.mutex());
  return self.open(request);
}

void extend_sequences(Core& self, nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> ids,
                      nb::object tokens) {
  if (tokens.is_none()) {
    const Lock lock(self.mutex());
    return self.extend(ids.data(), nullptr, ids.size());
  }
  const Tokens values(tokens);
  if (values.values().size() != ids.size()) throw nb::value_error("extend takes one token id a sequence");
  const Lock lock(self.mutex());
  self.extend(ids.data(), values.values().data(), ids.size());
}

nb::dict sequence_info(Core& self, int64_t id) {
  const Lock lock(self.mutex());
  const Sequence& s = self.sequence(id);
  nb::dict out;
  out["num_tokens"] = s.size();
  out["num_known"] = s.num_known;
  out["num_computed"] = s.computed;
  out["num_scheduled"] = s.scheduled;
  out["num_cached"] = s.hit_tokens;
  out["prompt_len"] = s.prompt_len;
  out["admitted"] = s.admitted;
  out["open_steps"] = s.open_steps;
  return out;
}

nb::dict statistics(Core& self) {
  const Lock lock(self.mutex());
  const Totals& t = self.totals();
  nb::dict out;
  out["hit_tokens"] = t.hit_tokens;
  out["partial_tokens"] = t.partial_tokens;
  out["missed_tokens"] = t.missed_tokens;
  out["admitted"] = t.admitted;
  out["allocated_blocks"] = t.allocated;
  out["evicted_blocks"] = t.evicted;
  out["copied_blocks"] = t.copied;
  out["taken_blocks"] = t.taken;
  out["adopted_blocks"] = t.adopted;
  out["stored_blocks"] = t.stored;
  nb::list groups;
  for (int g = 0; g < self.num_groups(); ++g) {
    const BlockGroup& group = self.group(g);
    groups.append(nb::make_tuple(group.num_used(), group.num_cached, group.num_free, group.spec.num_blocks));
  }
  out["groups"] = groups;
  out["num_sequences"] = self.num_sequences();
  out["num_nodes"] = self.tree().num_nodes();
  return out;
}

void bind_errors() {
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const OutOfBlocks& e) {
      nb::object type = nb::module_::import_("kvpool.errors").attr("OutOfBlocks");
      nb::list ids;
      for (const int64_t id : e.sequences) ids.append(id);
      PyErr_SetObject(type.ptr(), type(e.what(), nb::tuple(ids)).ptr());
    } catch (const Unsupported& e) {
      nb::object type = nb::module_::import_("kvpool.errors").attr("UnsupportedError");
      PyErr_SetString(type.ptr(), e.what());
    }
  });
}

void bind_core(nb::module_& m) {
  nb::class_<Core>(m, "Ledger", "The ledger core")
      .def(
          "__init__",
          [](Core* self, const std::vector<std::vector<int64_t>>& groups, const std::vector<int64_t>& limits,
             uint64_t finder_mask, bool portable_sha) {
            std::vector<GroupSpec> specs;
            for (const auto& g : groups) {
              specs.push_back({static_cast<Life>(g.at(0)), static_cast<int32_t>(g.at(1)), static_cast<int32_t>(g.at(2)),
                               static_cast<int32_t>(g.at(3)), g.at(4), g.at(5), g.at(6)});
            }
            new (self) Core(specs, {limits.at(0), limits.at(1), limits.at(2), limits.at(3), limits.at(4)},
                            {finder_mask, portable_sha});
          },
          nb::arg("groups"), nb::arg("limits"), nb::arg("finder_mask") = ~uint64_t{0}, nb::arg("portable_sha") = false)
      .def("open", &open_sequence, nb::arg("tokens"), nb::arg("salt"), nb::arg("lora"), nb::arg("media"),
           nb::arg("retention"), nb::arg("max_cached"))
      .def("extend", &extend_sequences, nb::arg("sequences"), nb::arg("token_ids").none())
      .def(
          "append",
          [](Core& self, int64_t id, nb::handle tokens) {
            const Tokens ids(tokens);
            const Lock lock(self.mutex());
            self.append(id, ids.values());
          },
          nb::arg("sequence"), nb::arg("token_ids"))
      .def(
          "begin_step",
          [](Core& self, const nb::list& items, StepArrays& arrays, bool commit) {
            const std::vector<Item> parsed = parse_items(items);
            const Lock lock(self.mutex());
            int64_t num_samples = 0;
            const Step& step = self.begin(parsed, arrays, commit, &num_samples);
            return decision(step, num_samples);
          },
          nb::arg("items"), nb::arg("arrays"), nb::arg("commit"))
      .def(
          "fits",
          [](Core& self, const nb::list& items) {
            const std::vector<Item> parsed = parse_items(items);
            const Lock lock(self.mutex());
            return self.fits(parsed);
          },
          nb::arg("items"))
      .def(
          "end_step",
          [](Core& self, int64_t step) {
            const Lock lock(self.mutex());
            self.end(step);
          },
          nb::arg("step"))
      .def(
          "abort_step",
          [](Core& self, int64_t step) {
            const Lock lock(self.mutex());
            self.abort(step);
          },
          nb::arg("step"))
      .def(
          "release",
          [](Core& self, int64_t id, bool keep) {
            const Lock lock(self.mutex());
            self.release(id, keep);
          },
          nb::arg("sequence"), nb::arg("keep"))
      .def(
          "tokens",
          [](Core& self, int64_t id) {
            const Lock lock(self.mutex());
            const Sequence& s = self.sequence(id);
            return to_array(s.tokens.data(), s.tokens.size());
          },
          nb::arg("sequence"))
      .def(
          "block_table",
          [](Core& self, int64_t id, int32_t group) {
            const Lock lock(self.mutex());
            const std::vector<int32_t>& table = self.sequence(id).held.at(static_cast<size_t>(group)).table;
            return to_array(table.data(), table.size());
          },
          nb::arg("sequence"), nb::arg("group"))
      .def("sequence", &sequence_info, nb::arg("sequence"))
      .def("stats", &statistics)
      .def("check", [](Core& self) {
        const Lock lock(self.mutex());
        return self.check();
      });
}

}  // namespace

namespace kvpool {

void bind_ledger(nb::module_& m) {
  bind_errors();
  bind_arrays(m);
  bind_core(m);
  m.def(
      "sha256",
      [](nb::bytes data, bool portable) {
        uint8_t digest[32];
        sha256(choose_compress(portable), static_cast<const uint8_t*>(data.data()), data.size(), digest);
        return nb::bytes(digest, 32);
      },
      nb::arg("data"), nb::arg("portable") = false, "SHA-256 as the ledger computes it");
}

}  // namespace kvpool
