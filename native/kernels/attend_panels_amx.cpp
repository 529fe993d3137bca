// Products of blocks by AMX tiles: 32 rows by 32 columns of sums in four registers, two more for each side.
#include "cpu/tiles.hpp"
#include "kernels/attend_panels.hpp"

namespace kvpool {
namespace {

struct TileProducts {
  static constexpr int kRows = 16;  // rows of queries are padded to a multiple
  static constexpr int kDirectRows = 0;
  static constexpr int kChunk = 32;  // rows that take a step together

  // The sums of 16 or 32 rows and 32 columns, into `c` (`add`: on top of what is there). Strides in elements.
  template <bool two>
  static void block(const uint16_t* a, int64_t lda, const uint32_t* b, int pairs, float* c, int64_t ldc, bool add) {
    const int64_t rows = ldc * 4, a_rows = lda * 2, b_rows = kPanelColumns * 4;
    if (add) {
      _tile_loadd(0, c, rows);
      _tile_loadd(1, c + 16, rows);
      if constexpr (two) {
        _tile_loadd(2, c + 16 * ldc, rows);
        _tile_loadd(3, c + 16 * ldc + 16, rows);
      }
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int i = 0; i < pairs; i += 16, a += 32, b += int64_t{16} * kPanelColumns) {
      _tile_loadd(4, a, a_rows);
      _tile_loadd(6, b, b_rows);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b + 16, b_rows);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (two) {
        _tile_loadd(5, a + 16 * lda, a_rows);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, c, rows);
    _tile_stored(1, c + 16, rows);
    if constexpr (two) {
      _tile_stored(2, c + 16 * ldc, rows);
      _tile_stored(3, c + 16 * ldc + 16, rows);
    }
  }

  // The same for `rows` rows, fewer than whole tiles or with factors: by way of a block of its own.
  static void partial_block(const uint16_t* a, int64_t lda, int rows, const uint32_t* b, int pairs, float* c,
                            int64_t ldc, const float* factor, bool add) {
    alignas(64) float sums[32 * 32];
    const auto product = rows > 16 ? block<true> : block<false>;
    product(a, lda, b, pairs, sums, 32, false);
    for (int r = 0; r < rows; ++r)
      for (int n = 0; n < 32; n += 16) {
        float* to = c + r * ldc + n;
        __m512 x = _mm512_load_ps(sums + 32 * r + n);
        if (factor != nullptr) x = _mm512_mul_ps(x, _mm512_load_ps(factor + n));
        if (add) x = _mm512_add_ps(x, _mm512_loadu_ps(to));
        _mm512_storeu_ps(to, x);
      }
  }

  static void multiply(const uint16_t* a, int64_t lda, int rows, const uint32_t* b, int pairs, float* c, int64_t ldc,
                       int num_columns, const float* factor, bool add) {
    for (int r = 0; r < rows; r += 32)
      for (int n = 0; n < num_columns; n += 32) {
        const int count = imin(32, rows - r);
        const uint16_t* from = a + r * lda;
        float* to = c + r * ldc + n;
        if (count % 16 != 0 || factor != nullptr) {
          partial_block(from, lda, count, b + n, pairs, to, ldc, factor == nullptr ? nullptr : factor + n, add);
        } else {
          const auto product = count == 32 ? block<true> : block<false>;
          product(from, lda, b + n, pairs, to, ldc, add);
        }
      }
  }
};

}  // namespace

void attend_panels_amx(const AttendArgs& a, int item, int head_block, Scratch& scratch) {
  const Tiles tiles;
  attend_panels<TileProducts>(a, item, head_block, scratch);
}

}  // namespace kvpool
