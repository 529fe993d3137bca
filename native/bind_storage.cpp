// Python names of native/storage.
#include <nanobind/nanobind.h>

#include "cpu/stream_copy.hpp"
#include "storage/crc32c.hpp"

namespace nb = nanobind;

namespace kvpool {

void bind_storage(nb::module_& m) {
  m.def(
      "crc32c",
      [](uintptr_t address, size_t num_bytes, uint32_t crc, bool portable) {
        const auto* data = reinterpret_cast<const uint8_t*>(address);
        return portable ? crc32c_portable(crc, data, num_bytes) : crc32c(crc, data, num_bytes);
      },
      nb::arg("address"), nb::arg("num_bytes"), nb::arg("crc") = 0, nb::arg("portable") = false,
      nb::call_guard<nb::gil_scoped_release>(),
      "CRC-32C of `num_bytes` bytes at `address`, continuing `crc`; reads memory, so the caller must own it");
  m.def(
      "copy_bytes",
      [](uintptr_t dst, uintptr_t src, size_t num_bytes) {
        stream_copy(reinterpret_cast<uint8_t*>(dst), reinterpret_cast<const uint8_t*>(src),
                    static_cast<int64_t>(num_bytes));
      },
      nb::arg("dst"), nb::arg("src"), nb::arg("num_bytes"), nb::call_guard<nb::gil_scoped_release>(),
      "Copy `num_bytes` bytes past the cache; the ranges must not overlap, and the caller must own both");
}

}  // namespace kvpool
