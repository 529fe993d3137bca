#include "cpu/features.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvpool {

#if defined(__x86_64__)
namespace {

// Linux: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA); threads started later inherit the permission.
bool request_amx() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

bool cpu_has_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool bf16 = d >> 22 & 1, tile = d >> 24 & 1, int8 = d >> 25 & 1;  // Intel SDM, CPUID leaf 7 EDX
  return bf16 && tile && int8;
}

Isa detect() {
  __builtin_cpu_init();
  if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))) return Isa::generic;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16") &&
                      __builtin_cpu_supports("avx512vnni");
  if (!avx512) return Isa::avx2;
  return cpu_has_amx() && request_amx() ? Isa::amx : Isa::avx512;
}

}  // namespace

Isa best_isa() {
  static const Isa isa = detect();
  return isa;
}

bool has_sha() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 29 & 1);
}
#else
Isa best_isa() { return Isa::generic; }
bool has_sha() { return false; }
#endif

}  // namespace kvpool
