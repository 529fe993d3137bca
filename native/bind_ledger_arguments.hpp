// Parsing of what Python gives the ledger core, without a call a token.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <vector>

#include "ledger/core.hpp"

namespace kvpool {

namespace nb = nanobind;

// An int of one digit without a call; -1 stands for an error too, which Python then has.
inline long long small_int(PyObject* o) {
#if PY_VERSION_HEX >= 0x030c0000
  if (PyLong_CheckExact(o) && PyUnstable_Long_IsCompact(reinterpret_cast<PyLongObject*>(o)))
    return PyUnstable_Long_CompactValue(reinterpret_cast<PyLongObject*>(o));
#else
  if (PyLong_CheckExact(o) && Py_SIZE(o) == 1) return reinterpret_cast<PyLongObject*>(o)->ob_digit[0];
#endif
  return PyLong_AsLongLong(o);
}

// Ints of a list or tuple, or a contiguous int32 or int64 array, which is read where it is if it has the type wanted.
template <class T>
class Ints {
 public:
  Ints(nb::handle given, const char* what) : what_(what) {
    if (PyList_CheckExact(given.ptr()) || PyTuple_CheckExact(given.ptr())) {
      from_sequence(given.ptr());
    } else {
      from_buffer(given.ptr());
    }
  }
  ~Ints() {
    if (view_.obj) PyBuffer_Release(&view_);
  }
  Ints(const Ints&) = delete;
  Ints& operator=(const Ints&) = delete;

  const T* data() const { return data_; }
  size_t size() const { return size_; }
  std::vector<T> copy() const { return std::vector<T>(data_, data_ + size_); }

 private:
  void from_buffer(PyObject* given) {
    if (PyObject_GetBuffer(given, &view_, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) != 0) {
      view_.obj = nullptr;
      PyErr_Clear();
      throw nb::type_error((what_ + " must be a list of ints or a contiguous int32 or int64 array").c_str());
    }
    const char kind = view_.format ? view_.format[0] : 'B';
    const bool is_int =
        view_.ndim == 1 && (kind == 'i' || kind == 'l' || kind == 'q') && (view_.itemsize == 4 || view_.itemsize == 8);
    if (!is_int) {
      PyBuffer_Release(&view_);
      throw nb::type_error((what_ + " must be a one-dimensional int32 or int64 array").c_str());
    }
    size_ = static_cast<size_t>(view_.shape[0]);
    if (view_.itemsize == sizeof(T)) {
      data_ = static_cast<const T*>(view_.buf);
    } else if (view_.itemsize == 8) {
      convert(static_cast<const int64_t*>(view_.buf));
    } else {
      convert(static_cast<const int32_t*>(view_.buf));
    }
  }

  // What does not fit becomes -1.
  template <class S>
  void convert(const S* from) {
    values_.resize(size_);
    for (size_t i = 0; i < size_; ++i) {
      const T v = static_cast<T>(from[i]);
      values_[i] = v == from[i] ? v : T{-1};
    }
    data_ = values_.data();
  }

  void from_sequence(PyObject* list) {
    size_ = static_cast<size_t>(PySequence_Fast_GET_SIZE(list));
    PyObject** items = PySequence_Fast_ITEMS(list);
    values_.resize(size_);
    for (size_t i = 0; i < size_; ++i) {
      const long long v = small_int(items[i]);
      values_[i] = static_cast<T>(v) == v ? static_cast<T>(v) : T{-1};
      if (v == -1 && PyErr_Occurred()) {
        const bool is_int = PyErr_ExceptionMatches(PyExc_OverflowError);  // which does not fit: -1
        PyErr_Clear();
        if (!is_int) throw nb::type_error((what_ + " must be ints").c_str());
      }
    }
    data_ = values_.data();
  }

  std::string what_;
  Py_buffer view_{};
  std::vector<T> values_;
  const T* data_ = nullptr;
  size_t size_ = 0;
};

class Tokens : public Ints<int32_t> {
 public:
  explicit Tokens(nb::handle given) : Ints(given, "token ids") {
    int32_t all = 0;
    for (size_t i = 0; i < size(); ++i) all |= data()[i];
    if (all < 0) throw nb::value_error("a token id is negative or does not fit 31 bits; ids are 0 .. 2147483647");
  }
};

class Ids : public Ints<int64_t> {
 public:
  explicit Ids(nb::handle given) : Ints(given, "sequence ids") {}
};

inline std::vector<ledger::Item> parse_items(const nb::list& items) {
  std::vector<ledger::Item> out;
  out.reserve(nb::len(items));
  for (nb::handle item : items) {
    if (!PyTuple_CheckExact(item.ptr()) || PyTuple_GET_SIZE(item.ptr()) != 2) {
      throw nb::type_error("an item of a step is a tuple (sequence id, max tokens)");
    }
    out.push_back({small_int(PyTuple_GET_ITEM(item.ptr(), 0)), small_int(PyTuple_GET_ITEM(item.ptr(), 1))});
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

// Everything a prompt is asked for with; empty sequences are the rule.
inline ledger::OpenRequest parse_request(const Tokens& ids, nb::handle salt, nb::handle lora, const nb::list& media) {
  ledger::OpenRequest request;
  request.tokens = ids.data();
  request.num_tokens = static_cast<int64_t>(ids.size());
  request.salt = text(salt);
  request.lora = text(lora);
  for (nb::handle item : media) {
    request.media.push_back({nb::cast<int64_t>(item[0]), nb::cast<int64_t>(item[1]), text(item[2])});
  }
  return request;
}

}  // namespace kvpool
