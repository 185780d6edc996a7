// The matrix product: a block of rows times up to four vectors of columns held in registers along the whole k chain.
#pragma once
#include "lane_math.h"

namespace {

template <int ROWS, int VECTORS>
inline void block(int64_t k0, int64_t k1, const float* a, int64_t row, int64_t step, const uint32_t* b, int64_t ldb,
                  float* c, int64_t ldc, bool resume) {
  vf acc[ROWS][VECTORS];
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECTORS; ++v) acc[r][v] = resume ? load(c + r * ldc + v * cpu::kLanes) : set1(0.0f);
  auto half = [&](const float* x, bool odd, const uint32_t* words) __attribute__((always_inline)) {
    for (int v = 0; v < VECTORS; ++v) {
      pair w = load_pair(words + v * cpu::kLanes);
      for (int r = 0; r < ROWS; ++r) acc[r][v] = fma(set1(x[r * row]), odd ? w.odd : w.even, acc[r][v]);
    }
  };
  const uint32_t* words = b + (k0 / 2) * ldb;
  int64_t k = k0;
  if (k < k1 && k % 2) {
    half(a, true, words);
    ++k, a += step, words += ldb;
  }
  for (; k + 1 < k1; k += 2, a += 2 * step, words += ldb) {
    pair w[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) w[v] = load_pair(words + v * cpu::kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      vf x = set1(a[r * row]);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) acc[r][v] = fma(x, w[v].even, acc[r][v]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      vf x = set1(a[r * row + step]);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) acc[r][v] = fma(x, w[v].odd, acc[r][v]);
    }
  }
  // A last even k stands alone: a zero in its other half would turn a sum of -0 into +0, or inf into NaN.
  if (k < k1) half(a, false, words);
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECTORS; ++v) store(c + r * ldc + v * cpu::kLanes, acc[r][v]);
}

template <int ROWS, int VECTORS>
inline void dispatch(int64_t rows, int64_t k0, int64_t k1, const float* a, int64_t row, int64_t step, const uint32_t* b,
                     int64_t ldb, float* c, int64_t ldc, bool resume) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS)
      block<ROWS, VECTORS>(k0, k1, a, row, step, b, ldb, c, ldc, resume);
    else
      dispatch<ROWS - 1, VECTORS>(rows, k0, k1, a, row, step, b, ldb, c, ldc, resume);
  }
}

template <int VECTORS>
void rows_of(int64_t rows, int64_t k0, int64_t k1, const float* a, int64_t row, int64_t step, const uint32_t* b,
             int64_t ldb, float* c, int64_t ldc, bool resume) {
  constexpr int most = block_rows(VECTORS);
  // Blocks as equal as can be: 9 rows run as 5 and 4, not as 8 and a lonely 1.
  for (int64_t blocks = (rows + most - 1) / most, r = 0; blocks > 0; --blocks) {
    int64_t n = (rows - r + blocks - 1) / blocks;
    dispatch<most, VECTORS>(n, k0, k1, a + r * row, row, step, b, ldb, c + r * ldc, ldc, resume);
    r += n;
  }
}

void tile(int64_t rows, int vectors, int64_t k0, int64_t k1, const float* a, int64_t row, int64_t step,
          const uint32_t* b, int64_t ldb, float* c, int64_t ldc, bool resume) {
  while (vectors > 0) {
    int now = vectors < kMaxVectors ? vectors : kMaxVectors;
    if constexpr (kMaxVectors >= 4) {
      if (now == 4) rows_of<4>(rows, k0, k1, a, row, step, b, ldb, c, ldc, resume);
      if (now == 3) rows_of<3>(rows, k0, k1, a, row, step, b, ldb, c, ldc, resume);
      if (now == 2) rows_of<2>(rows, k0, k1, a, row, step, b, ldb, c, ldc, resume);
    }
    if (now == 1) rows_of<1>(rows, k0, k1, a, row, step, b, ldb, c, ldc, resume);
    vectors -= now, b += now * cpu::kLanes, c += now * cpu::kLanes;
  }
}

}  // namespace
