// The ledger core in Python, continued: the tree, policies, events and statistics.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "bind_ledger_arguments.hpp"
#include "bind_ledger_lock.hpp"
#include "bind_ledger_results.hpp"

namespace nb = nanobind;
using namespace kvpool::ledger;

namespace kvpool {
namespace {

nb::dict statistics(Core& self) {
  struct Group {
    int32_t used, cached, free, committed;
  };
  std::vector<Group> groups;
  std::vector<int64_t> by_priority;
  Totals t;
  int64_t allocated, evicted, stored, num_sequences, num_nodes;
  {
    const Lock lock(self.mutex());
    const Blocks& blocks = self.blocks();
    for (const BlockGroup& g : blocks.groups)
      groups.push_back({g.num_used(), g.num_cached, g.num_free, g.spec.num_blocks});
    by_priority.assign(blocks.evicted_by_priority, blocks.evicted_by_priority + kNumLevels);
    t = self.totals();
    allocated = blocks.num_allocated;
    evicted = blocks.num_evicted;
    stored = blocks.num_stored;
    num_sequences = static_cast<int64_t>(self.num_sequences());
    num_nodes = blocks.tree.num_nodes();
  }
  nb::dict out;
  out["hit_tokens"] = t.hit_tokens;
  out["partial_tokens"] = t.partial_tokens;
  out["missed_tokens"] = t.missed_tokens;
  out["resumed_tokens"] = t.resumed_tokens;
  out["onboarded_tokens"] = t.onboarded_tokens;
  out["admitted"] = t.admitted;
  out["allocated_blocks"] = allocated;
  out["evicted_blocks"] = evicted;
  out["copied_blocks"] = t.copied;
  out["taken_blocks"] = t.taken;
  out["adopted_blocks"] = t.adopted;
  out["stored_blocks"] = stored;
  nb::dict levels;
  for (int p = 0; p < kNumLevels; ++p) {
    if (by_priority[static_cast<size_t>(p)]) levels[nb::int_(p)] = by_priority[static_cast<size_t>(p)];
  }
  out["evicted_by_priority"] = levels;
  out["groups"] =
      to_tuple(groups, [](const Group& g) { return nb::make_tuple(g.used, g.cached, g.free, g.committed); });
  out["num_sequences"] = num_sequences;
  out["num_nodes"] = num_nodes;
  out["bookkeeping_bytes"] = self.blocks().bytes();
  return out;
}

nb::list drain_events(Core& self) {
  std::vector<std::pair<Event, std::vector<int32_t>>> drained;
  {
    const Lock lock(self.mutex());
    self.blocks().events.drain([&](const Event& e, const int32_t* tokens) {
      drained.emplace_back(e, std::vector<int32_t>(tokens, tokens + e.num_tokens));
    });
  }
  nb::list out;
  for (const auto& [e, tokens] : drained) {
    out.append(nb::make_tuple(e.number, static_cast<int>(e.kind), e.group, e.block, e.to, to_bytes(e.key),
                              e.has_parent ? nb::object(to_bytes(e.parent)) : nb::none(), e.start, to_tuple(tokens),
                              e.priority, to_bytes(e.salt), to_bytes(e.lora), to_bytes(e.extras)));
  }
  return out;
}

// What a keyed policy gives keys to: the blocks of full groups cached since the last call, group after group.
nb::list unkeyed(Core& self) {
  struct Released {
    int group;
    std::vector<int32_t> ids, uses, index, own;
    std::vector<uint64_t> names;
    std::vector<double> keys;
  };
  std::vector<Released> released;
  uint32_t clock;
  {
    const Lock lock(self.mutex());
    Blocks& blocks = self.blocks();
    clock = blocks.clock;
    for (int g = 0; g < self.num_groups(); ++g) {
      if (!blocks.heap(g)) continue;
      Released r{g, {}, {}, {}, {}, {}, {}};
      for (size_t i = 0; i < blocks.unkeyed.size(); ++i) {
        const int32_t b = blocks.unkeyed[i];
        const Block& block = blocks.groups[g][b];
        if (blocks.unkeyed_group[i] != g || !block.queued) continue;
        const Node& node = blocks.tree[block.node];
        uint64_t name;
        std::memcpy(&name, node.key.data(), 8);
        r.ids.push_back(b);
        r.uses.push_back(static_cast<int32_t>(block.uses));
        r.index.push_back(node.index);
        r.own.push_back(block.own);
        r.names.push_back(name);
        r.keys.push_back(blocks.unkeyed_key[i]);
      }
      if (!r.ids.empty()) released.push_back(std::move(r));
    }
    blocks.unkeyed.clear();
    blocks.unkeyed_group.clear();
    blocks.unkeyed_key.clear();
  }
  nb::list out;
  for (const Released& r : released) {
    out.append(nb::make_tuple(r.group, to_array(r.ids), to_array(r.uses), to_array(r.index), to_array(r.own),
                              to_array(r.names), to_array(r.keys), clock));
  }
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

}  // namespace

void bind_ledger_tree(nb::class_<Core>& c) {
  c.def(
       "peek",
       [](Core& self, nb::handle tokens, nb::handle salt, nb::handle lora, const nb::list& media) {
         const Tokens ids(tokens);
         const OpenRequest request = parse_request(ids, salt, lora, media);
         const Peek found = read(self, [&] { return self.peek(request); });
         return nb::make_tuple(found.num_tokens, found.num_whole);
       },
       nb::arg("tokens"), nb::arg("salt"), nb::arg("lora"), nb::arg("media"))
      .def(
          "pin",
          [](Core& self, nb::handle tokens, nb::handle salt, nb::handle lora, const nb::list& media) {
            const Tokens ids(tokens);
            const OpenRequest request = parse_request(ids, salt, lora, media);
            int64_t num_tokens = 0;
            const int64_t pin = read(self, [&] { return self.pin(request, &num_tokens); });
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
          [](Core& self, int32_t group, int32_t num_blocks, Results& results) {
            std::vector<Move> moves;
            std::vector<Evicted> evicted;
            int32_t stopped_by = -1;
            const int32_t reached = read(self, [&] {
              const int32_t reached = self.resize(group, num_blocks, &moves, &stopped_by);
              evicted.swap(self.blocks().offered);
              return reached;
            });
            return nb::make_tuple(reached, to_tuples(moves), stopped_by, results.described(evicted));
          },
          nb::arg("group"), nb::arg("num_blocks"), nb::arg("results"))
      .def(
          "stored",
          [](Core& self, const Results& results) {
            return results.described(read(self, [&] { return self.blocks().stored(); }));
          },
          nb::arg("results"))
      .def("events", &drain_events)
      .def("unkeyed", &unkeyed)
      .def("push_keys", &push_keys, nb::arg("group"), nb::arg("blocks"), nb::arg("keys"))
      .def("stats", &statistics)
      .def("check", locked(&Core::check));
}

}  // namespace kvpool
