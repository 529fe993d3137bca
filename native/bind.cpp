// The Python module. This file and bind_*.cpp are the only ones that know Python.
#include <nanobind/nanobind.h>

#include "cpu/features.hpp"

namespace nb = nanobind;

namespace kvpool {
void bind_kernels(nb::module_& m);
void bind_ledger(nb::module_& m);
void bind_storage(nb::module_& m);
}  // namespace kvpool

NB_MODULE(_native, m) {
  m.doc() = "Native kernels and ledger core of kvpool";
  m.def(
      "best_isa", [] { return static_cast<int>(kvpool::best_isa()); },
      "0 generic, 1 avx2, 2 avx512, 3 amx: the best this process may use");
  m.def("has_sha", &kvpool::has_sha, "True when SHA-256 instructions are there");
  kvpool::bind_kernels(m);
  kvpool::bind_ledger(m);
  kvpool::bind_storage(m);
}
