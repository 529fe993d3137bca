// Parsing of what Python gives the ledger core, without a call a token.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <vector>

#include "ledger/core.hpp"

namespace kvpool {

namespace nb = nanobind;

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

inline std::vector<ledger::Item> parse_items(const nb::list& items) {
  std::vector<ledger::Item> out;
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

inline std::string text(nb::handle bytes) {
  char* data;
  Py_ssize_t size;
  if (PyBytes_AsStringAndSize(bytes.ptr(), &data, &size) != 0) {
    PyErr_Clear();
    throw nb::type_error("expected bytes");
  }
  return std::string(data, static_cast<size_t>(size));
}

}  // namespace kvpool
