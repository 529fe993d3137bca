// What the ledger core decided as Python objects. They are made outside the ledger's lock: making an object may run
// other Python code, which may ask the ledger something.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
// Python 3.11 has PyMemberDef here.
#include <structmember.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "ledger/core.hpp"

namespace kvpool {

namespace nb = nanobind;

inline nb::bytes to_bytes(const ledger::Key& key) { return nb::bytes(key.data(), key.size()); }
inline nb::bytes to_bytes(const std::string& text) { return nb::bytes(text.data(), text.size()); }

template <class T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> to_array(const T* data, size_t n) {
  T* copy = new T[n ? n : 1];
  std::copy(data, data + n, copy);
  nb::capsule owner(copy, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nb::ndarray<nb::numpy, T, nb::ndim<1>>(copy, {n}, owner);
}

template <class T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> to_array(const std::vector<T>& values) {
  return to_array(values.data(), values.size());
}

// A tuple of `make(item)`.
template <class Items, class Make>
nb::tuple to_tuple(const Items& items, Make&& make) {
  nb::object out = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(items.size())));
  Py_ssize_t i = 0;
  for (const auto& item : items) PyTuple_SET_ITEM(out.ptr(), i++, nb::object(make(item)).release().ptr());
  return nb::borrow<nb::tuple>(out);
}

template <class T>
nb::tuple to_tuple(const std::vector<T>& values) {
  return to_tuple(values, [](T v) { return nb::int_(v); });
}

inline nb::list to_tuples(const std::vector<ledger::Move>& moves) {
  nb::list out;
  for (const ledger::Move& m : moves) out.append(nb::make_tuple(m.group, m.src, m.dst));
  return out;
}

// Makes instances of a frozen dataclass with slots by writing the slots: its own __init__ costs 0.2 us a field.
class Record {
 public:
  explicit Record(nb::handle type) : type_(nb::borrow(type)) {
    for (nb::handle name : type.attr("__slots__")) {
      const nb::object slot = type.attr(name);
      if (Py_TYPE(slot.ptr()) != &PyMemberDescr_Type) throw nb::type_error("a record is a dataclass with slots");
      offsets_.push_back(reinterpret_cast<PyMemberDescrObject*>(slot.ptr())->d_member->offset);
    }
  }
  template <class... A>
  nb::object operator()(A&&... fields) const {
    if (sizeof...(A) != offsets_.size()) throw nb::type_error("a record has other fields");
    PyTypeObject* type = reinterpret_cast<PyTypeObject*>(type_.ptr());
    nb::object made = nb::steal(type->tp_alloc(type, 0));
    if (!made.is_valid()) throw nb::python_error();
    size_t i = 0;
    (put(made.ptr(), offsets_[i++], nb::cast(std::forward<A>(fields))), ...);
    return made;
  }

 private:
  static void put(PyObject* record, Py_ssize_t offset, nb::object value) {
    *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(record) + offset) = value.release().ptr();
  }
  nb::object type_;
  std::vector<Py_ssize_t> offsets_;
};

// A step as it was decided, copied under the lock.
struct Decided {
  struct Admission {
    int64_t sequence, cached_tokens, partial_tokens;
  };
  struct Rows {
    int64_t sequence, first, count;
  };
  struct Fill {
    int64_t sequence;
    ledger::Onboard onboard;
  };
  int64_t step, num_rows = 0;
  std::vector<int64_t> sequences, sampled;  // sampled: empty when it is all of them
  bool all_sampled;
  std::vector<ledger::Copy> copies;
  std::vector<Admission> admitted;
  std::vector<Rows> drafts;
  std::vector<Fill> onboards;
  std::vector<ledger::Evicted> evicted;

  Decided(ledger::Core& core, const ledger::Step& given, int64_t num_samples)
      : step(given.id), all_sampled(num_samples == static_cast<int64_t>(given.entries.size())), copies(given.copies) {
    sequences.reserve(given.entries.size());
    for (const ledger::Entry& e : given.entries) {
      sequences.push_back(e.seq->id);
      if (!all_sampled && e.end() == e.seq->size()) sampled.push_back(e.seq->id);
      if (e.num_drafts) drafts.push_back({e.seq->id, num_rows + e.num_tokens, e.num_drafts});
      if (e.admitted) admitted.push_back({e.seq->id, e.cached_tokens, e.partial_tokens});
      num_rows += e.num_tokens + e.num_drafts;
    }
    for (const ledger::Onboard& o : given.onboards) onboards.push_back({given.entries[o.entry].seq->id, o});
    evicted.swap(core.blocks().offered);
  }
};

// The classes of kvpool.ledger.decisions, and the last step's ids: while decoding they are the next one's too.
class Results {
 public:
  Results(nb::handle step, nb::handle copy, nb::handle admission, nb::handle drafts, nb::handle onboard,
          nb::handle evicted)
      : step_(step), copy_(copy), admission_(admission), drafts_(drafts), onboard_(onboard), evicted_(evicted) {}

  nb::object operator()(const Decided& d) {
    if (d.sequences != ids_ || !names_.is_valid()) {
      ids_ = d.sequences;
      names_ = to_tuple(ids_);
    }
    const nb::object names = names_;
    return step_(
        d.step, names, d.num_rows, d.all_sampled ? d.sequences.size() : d.sampled.size(),
        to_tuple(d.copies, [&](const auto& c) { return copy_(c.group, c.src, c.dst, c.num_tokens); }),
        to_tuple(d.admitted, [&](const auto& a) { return admission_(a.sequence, a.cached_tokens, a.partial_tokens); }),
        d.all_sampled ? names : nb::object(to_tuple(d.sampled)),
        to_tuple(d.drafts, [&](const auto& r) { return drafts_(r.sequence, r.first, r.count); }),
        to_tuple(d.onboards,
                 [&](const auto& f) {
                   const ledger::Onboard& o = f.onboard;
                   return onboard_(f.sequence, o.group, o.block, o.index, to_bytes(o.key));
                 }),
        described(d.evicted));
  }

  nb::tuple described(const std::vector<ledger::Evicted>& blocks) const {
    return to_tuple(blocks, [&](const ledger::Evicted& e) {
      return evicted_(e.group, e.block, to_bytes(e.key), to_bytes(e.parent), e.index, e.priority, e.uses,
                      to_tuple(e.tokens), to_bytes(e.extras));
    });
  }

 private:
  Record step_, copy_, admission_, drafts_, onboard_, evicted_;
  std::vector<int64_t> ids_;
  nb::object names_;
};

}  // namespace kvpool
