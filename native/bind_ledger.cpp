// The ledger core in Python: integers and bytes in, tuples out. Shapes and meanings are documented in _native.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <mutex>

#include "bind_ledger_arguments.hpp"
#include "ledger/core.hpp"

namespace nb = nanobind;
using namespace kvpool::ledger;

namespace kvpool {
namespace {

using Lock = std::lock_guard<std::mutex>;
using Ids = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

nb::bytes to_bytes(const Key& key) { return nb::bytes(key.data(), key.size()); }

template <class T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> to_array(const T* data, size_t n) {
  T* copy = new T[n ? n : 1];
  std::copy(data, data + n, copy);
  nb::capsule owner(copy, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nb::ndarray<nb::numpy, T, nb::ndim<1>>(copy, {n}, owner);
}

nb::list described(const std::vector<Evicted>& blocks) {
  nb::list out;
  for (const Evicted& e : blocks) {
    out.append(nb::make_tuple(e.group, e.block, to_bytes(e.key), to_bytes(e.parent), e.index, e.priority, e.uses,
                              to_array(e.tokens.data(), e.tokens.size()), nb::bytes(e.extras.data(), e.extras.size())));
  }
  return out;
}

nb::object evicted(Core& core) {
  if (core.blocks().offered.empty()) return nb::none();
  nb::list out = described(core.blocks().offered);
  core.blocks().offered.clear();
  return out;
}

// A list that exists only once something is in it; None until then.
class Rows {
 public:
  template <class... A>
  void add(const A&... fields) {
    if (!list_) list_ = nb::list();
    nb::borrow<nb::list>(list_).append(nb::make_tuple(fields...));
  }
  nb::object get() const { return list_ ? list_ : nb::none(); }

 private:
  nb::object list_;
};

nb::tuple decision(Core& core, const Step& step, int64_t num_samples) {
  const size_t rows = step.entries.size();
  nb::object sequences = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(rows)));
  Rows copies, admitted, drafts, onboards;
  int64_t row = 0;
  for (size_t i = 0; i < rows; ++i) {
    const Entry& e = step.entries[i];
    PyTuple_SET_ITEM(sequences.ptr(), static_cast<Py_ssize_t>(i), PyLong_FromLongLong(e.seq->id));
    if (e.num_drafts) drafts.add(e.seq->id, row + e.num_tokens, e.num_drafts);
    row += e.num_tokens + e.num_drafts;
    if (e.admitted) admitted.add(e.seq->id, e.cached_tokens, e.partial_tokens);
  }
  nb::object sampled = sequences;  // the rule while decoding
  if (static_cast<size_t>(num_samples) < rows) {
    nb::list some;
    for (const Entry& e : step.entries) {
      if (e.end() == e.seq->size()) some.append(e.seq->id);
    }
    sampled = nb::tuple(some);
  }
  for (const Copy& c : step.copies) copies.add(c.group, c.src, c.dst, c.num_tokens);
  for (const Onboard& o : step.onboards) {
    onboards.add(step.entries[o.entry].seq->id, o.group, o.block, o.index, to_bytes(o.key));
  }
  return nb::make_tuple(step.id, sequences, row, num_samples, copies.get(), admitted.get(), sampled, drafts.get(),
                        onboards.get(), evicted(core));
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

OpenRequest parse_request(const Tokens& ids, nb::bytes salt, nb::bytes lora, const nb::list& media) {
  OpenRequest request;
  request.tokens = ids.values().data();
  request.num_tokens = static_cast<int64_t>(ids.values().size());
  request.salt = text(salt);
  request.lora = text(lora);
  for (nb::handle item : media) {
    request.media.push_back({nb::cast<int64_t>(item[0]), nb::cast<int64_t>(item[1]), text(item[2])});
  }
  return request;
}

int64_t open_sequence(Core& self, nb::handle tokens, nb::bytes salt, nb::bytes lora, const nb::list& media,
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

void extend_sequences(Core& self, Ids ids, nb::object tokens) {
  if (tokens.is_none()) {
    const Lock lock(self.mutex());
    return self.extend(ids.data(), nullptr, ids.size());
  }
  const Tokens values(tokens);
  if (values.values().size() != ids.size()) throw nb::value_error("extend takes one token id a sequence");
  const Lock lock(self.mutex());
  self.extend(ids.data(), values.values().data(), ids.size());
}

void resolve_tokens(Core& self, Ids ids, nb::handle tokens) {
  const Tokens values(tokens);
  if (values.values().size() != ids.size()) throw nb::value_error("resolve takes one token id a sequence");
  const Lock lock(self.mutex());
  self.resolve(ids.data(), values.values().data(), ids.size());
}

// The step before ends, each sequence gets one token, and a step computes it: one call, one lock.
nb::tuple decode_step(Core& self, int64_t previous, Ids ids, nb::handle tokens, StepArrays& arrays, double now) {
  const Tokens values(tokens);
  if (values.values().size() != ids.size()) throw nb::value_error("a decode step takes one token id a sequence");
  const Lock lock(self.mutex());
  self.blocks().now = now;
  if (previous >= 0) self.end(previous);
  self.extend(ids.data(), values.values().data(), ids.size());
  std::vector<Item> items(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) items[i] = {ids.data()[i], 1};
  int64_t num_samples = 0;
  const Step& step = self.begin(items, arrays, true, &num_samples);
  return decision(self, step, num_samples);
}

nb::tuple begin_step(Core& self, const nb::list& items, StepArrays& arrays, bool commit, const nb::list& drafts,
                     double now) {
  const std::vector<Item> parsed = parse_items(items);
  std::vector<std::pair<int64_t, Drafts>> given;
  for (nb::handle d : drafts) {
    given.push_back({nb::cast<int64_t>(d[0]), {Tokens(d[1]).values(), nb::cast<std::vector<int32_t>>(d[2])}});
  }
  const Lock lock(self.mutex());
  self.blocks().now = now;
  int64_t num_samples = 0;
  const auto forget = [&] {  // drafts are for this step, whether it took them or not
    for (const auto& d : given) self.forget_drafts(d.first);
  };
  try {
    for (auto& [id, draft] : given) self.set_drafts(id, std::move(draft));
    const Step& step = self.begin(parsed, arrays, commit, &num_samples);
    forget();
    return decision(self, step, num_samples);
  } catch (...) {
    forget();
    throw;
  }
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
  out["num_partial"] = s.partial_tokens;
  out["num_missed"] = s.missed_tokens;
  out["num_resumed"] = s.resumed_tokens;
  out["prompt_len"] = s.prompt_len;
  out["admitted"] = s.admitted;
  out["paused"] = s.paused;
  out["open_steps"] = s.open_steps;
  return out;
}

nb::dict statistics(Core& self) {
  const Lock lock(self.mutex());
  const Totals& t = self.totals();
  const Blocks& blocks = self.blocks();
  nb::dict out;
  out["hit_tokens"] = t.hit_tokens;
  out["partial_tokens"] = t.partial_tokens;
  out["missed_tokens"] = t.missed_tokens;
  out["resumed_tokens"] = t.resumed_tokens;
  out["onboarded_tokens"] = t.onboarded_tokens;
  out["admitted"] = t.admitted;
  out["allocated_blocks"] = blocks.num_allocated;
  out["evicted_blocks"] = blocks.num_evicted;
  out["copied_blocks"] = t.copied;
  out["taken_blocks"] = t.taken;
  out["adopted_blocks"] = t.adopted;
  out["stored_blocks"] = blocks.num_stored;
  nb::dict by_priority;
  for (int p = 0; p < kNumLevels; ++p) {
    if (blocks.evicted_by_priority[p]) by_priority[nb::int_(p)] = blocks.evicted_by_priority[p];
  }
  out["evicted_by_priority"] = by_priority;
  nb::list groups;
  for (int g = 0; g < self.num_groups(); ++g) {
    const BlockGroup& group = blocks.groups[g];
    groups.append(nb::make_tuple(group.num_used(), group.num_cached, group.num_free, group.spec.num_blocks));
  }
  out["groups"] = groups;
  out["num_sequences"] = self.num_sequences();
  out["num_nodes"] = blocks.tree.num_nodes();
  out["bookkeeping_bytes"] = blocks.bytes();
  return out;
}

nb::list drain_events(Core& self) {
  const Lock lock(self.mutex());
  nb::list out;
  const Tree& tree = self.blocks().tree;
  self.blocks().events.drain([&](const Event& e, const int32_t* tokens) {
    const bool cleared = e.kind == EventKind::cleared;
    const bool named = !cleared && e.space < tree.num_spaces();
    const std::string& salt = named ? tree.space(e.space).salt : std::string();
    const std::string& lora = named ? tree.space(e.space).lora : std::string();
    out.append(nb::make_tuple(e.number, static_cast<int>(e.kind), e.group, e.block, e.to, to_bytes(e.key),
                              e.has_parent ? nb::object(to_bytes(e.parent)) : nb::none(), e.start,
                              to_array(tokens, static_cast<size_t>(e.num_tokens)), e.priority,
                              nb::bytes(salt.data(), salt.size()), nb::bytes(lora.data(), lora.size())));
  });
  return out;
}

// What a keyed policy gives keys to: the blocks of full groups cached since the last call, group after group.
nb::list unkeyed(Core& self) {
  const Lock lock(self.mutex());
  Blocks& blocks = self.blocks();
  nb::list out;
  for (int g = 0; g < self.num_groups(); ++g) {
    if (!blocks.heap(g)) continue;
    std::vector<int32_t> ids, uses, index, own;
    std::vector<uint64_t> names;
    std::vector<double> keys;
    for (size_t i = 0; i < blocks.unkeyed.size(); ++i) {
      const int32_t b = blocks.unkeyed[i];
      const Block& block = blocks.groups[g][b];
      if (blocks.unkeyed_group[i] != g || !block.queued) continue;
      const Node& node = blocks.tree[block.node];
      ids.push_back(b);
      uses.push_back(static_cast<int32_t>(block.uses));
      index.push_back(node.index);
      own.push_back(block.own);
      uint64_t name;
      std::memcpy(&name, node.key.data(), 8);
      names.push_back(name);
      keys.push_back(blocks.unkeyed_key[i]);
    }
    if (ids.empty()) continue;
    out.append(nb::make_tuple(g, to_array(ids.data(), ids.size()), to_array(uses.data(), uses.size()),
                              to_array(index.data(), index.size()), to_array(own.data(), own.size()),
                              to_array(names.data(), names.size()), to_array(keys.data(), keys.size()), blocks.clock));
  }
  blocks.unkeyed.clear();
  blocks.unkeyed_group.clear();
  blocks.unkeyed_key.clear();
  return out;
}

void push_keys(Core& self, int32_t group, nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> ids,
               nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu> keys) {
  if (ids.size() != keys.size()) throw nb::value_error("a policy returns one key a block");
  for (size_t i = 0; i < keys.size(); ++i) {
    if (!(keys.data()[i] == keys.data()[i])) throw nb::value_error("a policy's keys must not be NaN");
  }
  const Lock lock(self.mutex());
  for (size_t i = 0; i < ids.size(); ++i) self.blocks().set_key(group, ids.data()[i], keys.data()[i]);
}

nb::list to_tuples(const std::vector<Move>& moves) {
  nb::list out;
  for (const Move& m : moves) out.append(nb::make_tuple(m.group, m.src, m.dst));
  return out;
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

// A method that takes the ledger's lock and passes its arguments on.
template <class R, class... A>
auto locked(R (Core::*method)(A...)) {
  return [method](Core& self, A... arguments) -> R {
    const Lock lock(self.mutex());
    return (self.*method)(arguments...);
  };
}

// The same for what may release blocks: they are stamped with the caller's clock.
template <class... A>
auto timed(void (Core::*method)(A...)) {
  return [method](Core& self, A... arguments, double now) {
    const Lock lock(self.mutex());
    self.blocks().now = now;
    (self.*method)(arguments...);
  };
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
        nb::arg("now"))
      .def("decode_step", &decode_step, nb::arg("previous"), nb::arg("sequences"), nb::arg("token_ids"),
           nb::arg("arrays"), nb::arg("now"))
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
            const Lock lock(self.mutex());
            return to_tuples(self.accept(id, indices));
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
            self.append(id, ids.values());
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
            const Lock lock(self.mutex());
            nb::list out;
            for (const Key& key : self.keys(id)) out.append(to_bytes(key));
            return out;
          },
          nb::arg("sequence"))
      .def(
          "extras",
          [](Core& self, int64_t id) {
            const Lock lock(self.mutex());
            nb::list out;
            for (const std::string& extras : self.extras(id)) out.append(nb::bytes(extras.data(), extras.size()));
            return out;
          },
          nb::arg("sequence"))
      .def("matched", locked(&Core::matched), nb::arg("sequence"))
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
      .def(
          "state",
          [](Core& self, int64_t id, int32_t group) {
            const Lock lock(self.mutex());
            return self.sequence(id).held.at(static_cast<size_t>(group)).state;
          },
          nb::arg("sequence"), nb::arg("group"))
      .def("sequence", &sequence_info, nb::arg("sequence"));
}

void bind_tree(nb::class_<Core>& c) {
  c.def(
       "peek",
       [](Core& self, nb::handle tokens, nb::bytes salt, nb::bytes lora, const nb::list& media) {
         const Tokens ids(tokens);
         const OpenRequest request = parse_request(ids, salt, lora, media);
         const Lock lock(self.mutex());
         const Peek found = self.peek(request);
         return nb::make_tuple(found.num_tokens, found.num_whole);
       },
       nb::arg("tokens"), nb::arg("salt"), nb::arg("lora"), nb::arg("media"))
      .def(
          "pin",
          [](Core& self, nb::handle tokens, nb::bytes salt, nb::bytes lora, const nb::list& media) {
            const Tokens ids(tokens);
            const OpenRequest request = parse_request(ids, salt, lora, media);
            const Lock lock(self.mutex());
            int64_t num_tokens = 0;
            const int64_t pin = self.pin(request, &num_tokens);
            return nb::make_tuple(pin, num_tokens);
          },
          nb::arg("tokens"), nb::arg("salt"), nb::arg("lora"), nb::arg("media"))
      .def("unpin", timed(&Core::unpin), nb::arg("pin"), nb::arg("now"))
      .def(
          "clear",
          [](Core& self, nb::object salt) {
            const std::string given = salt.is_none() ? std::string() : text(salt);
            const Lock lock(self.mutex());
            self.clear(salt.is_none() ? nullptr : &given);
          },
          nb::arg("salt").none())
      .def("reset", locked(&Core::reset))
      .def(
          "resize",
          [](Core& self, int32_t group, int32_t num_blocks) {
            const Lock lock(self.mutex());
            std::vector<Move> moves;
            int32_t stopped_by = -1;
            const int32_t reached = self.resize(group, num_blocks, &moves, &stopped_by);
            return nb::make_tuple(reached, to_tuples(moves), stopped_by, evicted(self));
          },
          nb::arg("group"), nb::arg("num_blocks"))
      .def("stored",
           [](Core& self) {
             const Lock lock(self.mutex());
             return described(self.blocks().stored());
           })
      .def("events", &drain_events)
      .def("unkeyed", &unkeyed)
      .def("push_keys", &push_keys, nb::arg("group"), nb::arg("blocks"), nb::arg("keys"))
      .def("stats", &statistics)
      .def("check", locked(&Core::check));
}

}  // namespace

void bind_ledger(nb::module_& m) {
  bind_errors();
  bind_arrays(m);
  nb::class_<Core> core(m, "Ledger", "The ledger core");
  core.def(nb::new_(&make_core), nb::arg("groups"), nb::arg("limits"), nb::arg("finder_mask") = ~uint64_t{0},
           nb::arg("portable_sha") = false, nb::arg("keyed") = false, nb::arg("offer") = false,
           nb::arg("num_events") = 0);
  bind_sequences(core);
  bind_steps(core);
  bind_tree(core);
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
