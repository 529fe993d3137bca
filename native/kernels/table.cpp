// Which kernel serves a call: one table of instruction sets, one of attention kernels.
#include "kernels/isa.hpp"
#include "kernels/special.hpp"

namespace kvpool {

namespace {

bool always(const AttendArgs&, int) { return true; }

// First match wins: from the most special to the shared kernels, which take every call.
const AttendKernel kAttend[] = {
#if defined(__x86_64__)
    {"avx512-few-rows", Isa::avx512, fits_few_rows_avx512, attend_few_rows_avx512},
    {"amx-panels", Isa::amx, fits_panels_avx512, attend_panels_amx},
    {"avx512-panels", Isa::avx512, fits_panels_avx512, attend_panels_avx512},
    {"avx512", Isa::avx512, always, avx512_kernels.attend},
    {"avx2", Isa::avx2, always, avx2_kernels.attend},
#endif
    {"generic", Isa::generic, always, generic_kernels.attend},
};

}  // namespace

const AttendKernel& attend_kernel(Isa isa, const AttendArgs& args, int rows) {
  for (const AttendKernel& kernel : kAttend)
    if (kernel.isa <= isa && kernel.fits(args, rows)) return kernel;
  return kAttend[sizeof kAttend / sizeof kAttend[0] - 1];
}

const Kernels& kernels_of(Isa isa) {
#if defined(__x86_64__)
  if (isa >= Isa::avx512) return avx512_kernels;
  if (isa == Isa::avx2) return avx2_kernels;
#endif
  static_cast<void>(isa);
  return generic_kernels;
}

}  // namespace kvpool
