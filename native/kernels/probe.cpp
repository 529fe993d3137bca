#include "kernels/probe.hpp"

#include <atomic>
#include <cstring>

#include "cpu/features.hpp"

namespace kvpool {

namespace {

#if defined(__x86_64__)
// Assembly, so that no compiler or flag changes the figure: 512 bytes a turn, prefetched 4 KiB ahead.
uint64_t read_avx512(const uint8_t* p, int64_t bytes) {
  uint64_t out[8];
  const uint8_t* end = p + bytes / 512 * 512;
  asm volatile(
      "vpxorq %%zmm0, %%zmm0, %%zmm0\n vpxorq %%zmm1, %%zmm1, %%zmm1\n"
      "vpxorq %%zmm2, %%zmm2, %%zmm2\n vpxorq %%zmm3, %%zmm3, %%zmm3\n"
      "jmp 2f\n .p2align 5\n 1:\n"
      "prefetcht0 4096(%0)\n prefetcht0 4160(%0)\n prefetcht0 4224(%0)\n prefetcht0 4288(%0)\n"
      "prefetcht0 4352(%0)\n prefetcht0 4416(%0)\n prefetcht0 4480(%0)\n prefetcht0 4544(%0)\n"
      "vpxorq (%0), %%zmm0, %%zmm0\n vpxorq 64(%0), %%zmm1, %%zmm1\n"
      "vpxorq 128(%0), %%zmm2, %%zmm2\n vpxorq 192(%0), %%zmm3, %%zmm3\n"
      "vpxorq 256(%0), %%zmm0, %%zmm0\n vpxorq 320(%0), %%zmm1, %%zmm1\n"
      "vpxorq 384(%0), %%zmm2, %%zmm2\n vpxorq 448(%0), %%zmm3, %%zmm3\n"
      "add $512, %0\n 2: cmp %1, %0\n jb 1b\n"
      "vpxorq %%zmm1, %%zmm0, %%zmm0\n vpxorq %%zmm3, %%zmm2, %%zmm2\n vpxorq %%zmm2, %%zmm0, %%zmm0\n"
      "vmovdqu64 %%zmm0, (%2)\n vzeroupper\n"
      : "+r"(p)
      : "r"(end), "r"(out)
      : "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3");
  return out[0] ^ out[1] ^ out[2] ^ out[3] ^ out[4] ^ out[5] ^ out[6] ^ out[7];
}

// Twelve sums by vdpbf16ps, `turns` times; registers only. 64 operations an instruction.
#define KVPOOL_DOT(k) "vdpbf16ps %%zmm15, %%zmm14, %%zmm" #k "\n"
void dot_avx512(int64_t turns) {
  asm volatile("vpxorq %%zmm15, %%zmm15, %%zmm15\n vpxorq %%zmm14, %%zmm14, %%zmm14\n 1:\n" KVPOOL_DOT(0) KVPOOL_DOT(1)
                   KVPOOL_DOT(2) KVPOOL_DOT(3) KVPOOL_DOT(4) KVPOOL_DOT(5) KVPOOL_DOT(6) KVPOOL_DOT(7) KVPOOL_DOT(8)
                       KVPOOL_DOT(9) KVPOOL_DOT(10) KVPOOL_DOT(11) "dec %0\n jnz 1b\n vzeroupper\n"
               : "+r"(turns)
               :
               : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
                 "xmm14", "xmm15");
}
#undef KVPOOL_DOT
#endif

uint64_t read_plain(const uint8_t* p, int64_t bytes) {
  typedef uint64_t Line __attribute__((vector_size(64), aligned(16), may_alias));
  Line a{}, b{};
  for (int64_t i = 0; i + 128 <= bytes; i += 128) {
    __builtin_prefetch(p + i + 4096);
    a ^= *reinterpret_cast<const Line*>(p + i);
    b ^= *reinterpret_cast<const Line*>(p + i + 64);
  }
  a ^= b;
  return a[0] ^ a[1] ^ a[2] ^ a[3] ^ a[4] ^ a[5] ^ a[6] ^ a[7];
}

}  // namespace

uint64_t read_probe(Workers& workers, const uint8_t* base, const int64_t* offsets, int64_t count, int64_t bytes) {
  std::atomic<uint64_t> total{0};
  const bool wide = best_isa() >= Isa::avx512;
  constexpr int64_t kShare = 16;  // pieces taken at a time
  workers.each((count + kShare - 1) / kShare, [&](int64_t share, Scratch&) {
    uint64_t sum = 0;
    for (int64_t i = share * kShare; i < count && i < (share + 1) * kShare; ++i) {
#if defined(__x86_64__)
      sum ^= wide ? read_avx512(base + offsets[i], bytes) : read_plain(base + offsets[i], bytes);
#else
      sum ^= read_plain(base + offsets[i], bytes);
#endif
    }
    total.fetch_xor(sum);
  });
  static_cast<void>(wide);
  return total.load();
}

double dot_probe(Workers& workers) {
#if defined(__x86_64__)
  if (best_isa() < Isa::avx512) return 0;
  constexpr int64_t kTurns = 20'000, kShares = 8;  // about a millisecond a thread
  workers.each(kShares * workers.num_threads(), [](int64_t, Scratch&) { dot_avx512(kTurns / kShares); });
  return double{kTurns} * 12 * 64 * workers.num_threads();
#else
  static_cast<void>(workers);
  return 0;
#endif
}

void copy_probe(Workers& workers, uint8_t* dst, const uint8_t* src, int64_t bytes) {
  constexpr int64_t kPiece = 1 << 20;
  workers.each((bytes + kPiece - 1) / kPiece, [&](int64_t i, Scratch&) {
    const int64_t begin = i * kPiece, size = bytes - begin < kPiece ? bytes - begin : kPiece;
    std::memcpy(dst + begin, src + begin, static_cast<size_t>(size));
  });
}

}  // namespace kvpool
