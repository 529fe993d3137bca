// The ledger core in Python: integers and bytes in, tuples out. Shapes and meanings are documented in _native.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind_ledger_arguments.hpp"
#include "bind_ledger_lock.hpp"
#include "bind_ledger_results.hpp"
#include "ledger/core.hpp"

namespace nb = nanobind;
using namespace kvpool::ledger;

namespace kvpool {

void bind_ledger_tree(nb::class_<Core>& c);  // bind_ledger_tree.cpp

namespace {

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

int64_t open_sequence(Core& self, nb::handle tokens, nb::handle salt, nb::handle lora, const nb::list& media,
                      const nb::list& retention, int64_t max_cached) {
  const Tokens ids(tokens);
  OpenRequest request = parse_request(ids, salt, lora, media);
  request.max_cached = max_cached;
  for (nb::handle item : retention) {
    request.retention.push_back({nb::cast<int64_t>(item[0]), nb::cast<int64_t>(item[1]), nb::cast<uint8_t>(item[2]),
                                 nb::cast<double>(item[3])});
  }
  const Lock lock(self.mutex());
  return self.open(request);
}

void extend_sequences(Core& self, nb::handle sequences, nb::handle tokens) {
  const Ids ids(sequences);
  if (tokens.is_none()) {
    const Lock lock(self.mutex());
    return self.extend(ids.data(), nullptr, ids.size());
  }
  const Tokens values(tokens);
  if (values.size() != ids.size()) throw nb::value_error("extend takes one token id a sequence");
  const Lock lock(self.mutex());
  self.extend(ids.data(), values.data(), ids.size());
}

void resolve_tokens(Core& self, nb::handle sequences, nb::handle tokens) {
  const Ids ids(sequences);
  const Tokens values(tokens);
  if (values.size() != ids.size()) throw nb::value_error("resolve takes one token id a sequence");
  const Lock lock(self.mutex());
  self.resolve(ids.data(), values.data(), ids.size());
}

// The step before ends, each sequence gets one token, and a step computes it: one call, one lock.
nb::object decode_step(Core& self, int64_t previous, nb::handle sequences, nb::handle tokens, StepArrays& arrays,
                       double now, Results& results) {
  const Ids ids(sequences);
  const Tokens values(tokens);
  if (values.size() != ids.size()) throw nb::value_error("a decode step takes one token id a sequence");
  const Decided decided = [&] {
    const Lock lock(self.mutex());
    self.blocks().now = now;
    int64_t num_samples = 0;
    const Step& step = self.decode(previous, ids.data(), values.data(), ids.size(), arrays, &num_samples);
    return Decided(self, step, num_samples);
  }();
  return results(decided);
}

nb::object begin_step(Core& self, const nb::list& items, StepArrays& arrays, bool commit, const nb::list& drafts,
                      double now, Results& results) {
  const std::vector<Item> parsed = parse_items(items);
  std::vector<std::pair<int64_t, Drafts>> given;
  for (nb::handle d : drafts) {
    given.push_back({nb::cast<int64_t>(d[0]), {Tokens(d[1]).copy(), nb::cast<std::vector<int32_t>>(d[2])}});
  }
  const Decided decided = [&] {
    const Lock lock(self.mutex());
    self.blocks().now = now;
    const auto forget = [&] {  // drafts are for this step, whether it took them or not
      for (const auto& d : given) self.forget_drafts(d.first);
    };
    try {
      for (auto& [id, draft] : given) self.set_drafts(id, std::move(draft));
      int64_t num_samples = 0;
      const Step& step = self.begin(parsed, arrays, commit, &num_samples);
      forget();
      return Decided(self, step, num_samples);
    } catch (...) {
      forget();
      throw;
    }
  }();
  return results(decided);
}

// The fields of SequenceStats, in order.
nb::tuple sequence_stats(Core& self, int64_t id) {
  int64_t n[7];
  bool admitted, paused;
  {
    const Lock lock(self.mutex());
    const Sequence& s = self.sequence(id);
    const int64_t now[7] = {s.size(),         s.num_known,     s.computed,      s.hit_tokens,
                            s.partial_tokens, s.missed_tokens, s.resumed_tokens};
    std::copy(now, now + 7, n);
    admitted = s.admitted;
    paused = s.paused;
  }
  return nb::make_tuple(n[0], n[1], n[2], n[3], n[4], n[5], n[6], admitted, paused);
}

void bind_errors() {
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const OutOfBlocks& e) {
      nb::object type = nb::module_::import_("kvpool.errors").attr("OutOfBlocks");
      nb::list ids;
      nb::list missing;
      for (const int64_t id : e.sequences) ids.append(id);
      for (const int64_t blocks : e.missing) missing.append(blocks);
      PyErr_SetObject(type.ptr(), type(e.what(), nb::tuple(ids), nb::tuple(missing)).ptr());
    } catch (const Unsupported& e) {
      nb::object type = nb::module_::import_("kvpool.errors").attr("UnsupportedError");
      PyErr_SetString(type.ptr(), e.what());
    }
  });
}

Core* make_core(const std::vector<std::vector<int64_t>>& groups, const std::vector<int64_t>& limits,
                uint64_t finder_mask, bool portable_sha, bool keyed, bool offer, int64_t num_events) {
  std::vector<GroupSpec> specs;
  for (const auto& g : groups) {
    specs.push_back({static_cast<Life>(g.at(0)), static_cast<int32_t>(g.at(1)), static_cast<int32_t>(g.at(2)),
                     static_cast<int32_t>(g.at(3)), g.at(4), g.at(5), g.at(6)});
  }
  Options options;
  options.finder_mask = finder_mask;
  options.portable_sha = portable_sha;
  options.keyed = keyed;
  options.offer = offer;
  options.num_events = num_events;
  return new Core(specs, {limits.at(0), limits.at(1), limits.at(2), limits.at(3), limits.at(4)}, options);
}

void bind_steps(nb::class_<Core>& c) {
  c.def("begin_step", &begin_step, nb::arg("items"), nb::arg("arrays"), nb::arg("commit"), nb::arg("drafts"),
        nb::arg("now"), nb::arg("results"))
      .def("decode_step", &decode_step, nb::arg("previous"), nb::arg("sequences"), nb::arg("token_ids"),
           nb::arg("arrays"), nb::arg("now"), nb::arg("results"))
      .def(
          "fits",
          [](Core& self, const nb::list& items) {
            const std::vector<Item> parsed = parse_items(items);
            const Lock lock(self.mutex());
            return self.fits(parsed);
          },
          nb::arg("items"))
      .def(
          "missing",
          [](Core& self, const nb::list& items) {
            const std::vector<Item> parsed = parse_items(items);
            const Lock lock(self.mutex());
            return self.missing(parsed);
          },
          nb::arg("items"))
      .def("end_step", timed(&Core::end), nb::arg("step"), nb::arg("now"))
      .def("abort_step", timed(&Core::abort), nb::arg("step"), nb::arg("now"))
      .def(
          "accept",
          [](Core& self, int64_t id, const std::vector<int32_t>& indices) {
            return to_tuples(locked(&Core::accept)(self, id, indices));
          },
          nb::arg("sequence"), nb::arg("indices"));
}

void bind_sequences(nb::class_<Core>& c) {
  c.def("open", &open_sequence, nb::arg("tokens"), nb::arg("salt"), nb::arg("lora"), nb::arg("media"),
        nb::arg("retention"), nb::arg("max_cached"))
      .def("extend", &extend_sequences, nb::arg("sequences"), nb::arg("token_ids").none())
      .def("resolve", &resolve_tokens, nb::arg("sequences"), nb::arg("token_ids"))
      .def(
          "append",
          [](Core& self, int64_t id, nb::handle tokens) {
            const Tokens ids(tokens);
            const Lock lock(self.mutex());
            self.append(id, ids.data(), ids.size());
          },
          nb::arg("sequence"), nb::arg("token_ids"))
      .def("rewind", timed(&Core::rewind), nb::arg("sequence"), nb::arg("num_tokens"), nb::arg("now"))
      .def("fork", locked(&Core::fork), nb::arg("sequence"))
      .def("release", timed(&Core::release), nb::arg("sequence"), nb::arg("keep"), nb::arg("now"))
      .def("pause", timed(&Core::pause), nb::arg("sequence"), nb::arg("now"))
      .def("resume", locked(&Core::resume), nb::arg("sequence"))
      .def("expect", locked(&Core::expect), nb::arg("sequence"), nb::arg("num_blocks"))
      .def(
          "keys",
          [](Core& self, int64_t id) {
            nb::list out;
            for (const Key& key : locked (&Core::keys)(self, id)) out.append(to_bytes(key));
            return out;
          },
          nb::arg("sequence"))
      .def(
          "extras",
          [](Core& self, int64_t id) {
            nb::list out;
            for (const std::string& extras : locked (&Core::extras)(self, id)) out.append(to_bytes(extras));
            return out;
          },
          nb::arg("sequence"))
      .def("matched", locked(&Core::matched), nb::arg("sequence"))
      .def(
          "in_tree",
          [](Core& self, int64_t id) {
            nb::list out;
            for (const std::string& have : locked (&Core::in_tree)(self, id)) out.append(to_bytes(have));
            return out;
          },
          nb::arg("sequence"))
      .def(
          "tokens",
          [](Core& self, int64_t id) { return to_array(read(self, [&] { return self.sequence(id).tokens; })); },
          nb::arg("sequence"))
      .def(
          "block_table",
          [](Core& self, int64_t id, int32_t group) {
            return to_array(read(self, [&] { return self.sequence(id).held.at(static_cast<size_t>(group)).table; }));
          },
          nb::arg("sequence"), nb::arg("group"))
      .def(
          "state",
          [](Core& self, int64_t id, int32_t group) {
            return read(self, [&] { return self.sequence(id).held.at(static_cast<size_t>(group)).state; });
          },
          nb::arg("sequence"), nb::arg("group"))
      .def("sequence", &sequence_stats, nb::arg("sequence"))
      .def(
          "num_tokens", [](Core& self, int64_t id) { return read(self, [&] { return self.sequence(id).size(); }); },
          nb::arg("sequence"))
      .def(
          "num_computed", [](Core& self, int64_t id) { return read(self, [&] { return self.sequence(id).computed; }); },
          nb::arg("sequence"))
      .def(
          "num_cached", [](Core& self, int64_t id) { return read(self, [&] { return self.sequence(id).hit_tokens; }); },
          nb::arg("sequence"));
}

}  // namespace

void bind_ledger(nb::module_& m) {
  bind_errors();
  bind_arrays(m);
  nb::class_<Results>(m, "Results", "Makes the decisions of a ledger of these classes")
      .def(nb::init<nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle>(), nb::arg("step"),
           nb::arg("copy"), nb::arg("admission"), nb::arg("drafts"), nb::arg("onboard"), nb::arg("evicted"));
  nb::class_<Core> core(m, "Ledger", "The ledger core");
  core.def(nb::new_(&make_core), nb::arg("groups"), nb::arg("limits"), nb::arg("finder_mask") = ~uint64_t{0},
           nb::arg("portable_sha") = false, nb::arg("keyed") = false, nb::arg("offer") = false,
           nb::arg("num_events") = 0);
  bind_sequences(core);
  bind_steps(core);
  bind_ledger_tree(core);
  m.def(
      "sha256",
      [](nb::bytes data, bool portable) {
        uint8_t digest[32];
        sha256(choose_sha(portable), static_cast<const uint8_t*>(data.data()), data.size(), digest);
        return nb::bytes(digest, 32);
      },
      nb::arg("data"), nb::arg("portable") = false, "SHA-256 as the ledger computes it");
}

}  // namespace kvpool
