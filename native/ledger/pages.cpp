#include "ledger/pages.hpp"

#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace kvpool::ledger {

#if defined(__linux__)
void* allocate_zeroed(size_t bytes, bool lazy) {
  if (bytes == 0) return nullptr;
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) throw std::bad_alloc();
  if (bytes >= size_t{2} << 20) madvise(address, bytes, MADV_HUGEPAGE);  // a wish; small pages are correct too
#if defined(MADV_POPULATE_WRITE)
  if (!lazy) madvise(address, bytes, MADV_POPULATE_WRITE);  // since Linux 5.14; before, pages come one by one
#else
  static_cast<void>(lazy);
#endif
  return address;
}

void free_zeroed(void* address, size_t bytes) {
  if (address) munmap(address, bytes);
}
#else
void* allocate_zeroed(size_t bytes, bool) {
  if (bytes == 0) return nullptr;
  void* address = std::calloc(1, bytes);
  if (!address) throw std::bad_alloc();
  return address;
}

void free_zeroed(void* address, size_t) { std::free(address); }
#endif

}  // namespace kvpool::ledger
