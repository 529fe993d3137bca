// The Python module. This file and bind_*.cpp are the only ones that know Python.
#include "cpu/features.hpp"

#include <nanobind/nanobind.h>

namespace nb = nanobind;

NB_MODULE(_native, m) {
  m.doc() = "Native kernels and ledger core of kvpool";
  m.def("best_isa", [] { return static_cast<int>(kvpool::best_isa()); },
        "0 generic, 1 avx2, 2 avx512, 3 amx: the best this process may use");
  m.def("has_sha", &kvpool::has_sha, "True when SHA-256 instructions are there");
}
