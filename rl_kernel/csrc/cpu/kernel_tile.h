// The matrix product: a block of rows times up to four vectors of columns held in registers along the whole k chain.
#pragma once
#include "lane_math.h"

namespace {

// Pairs of k that packed words are asked for ahead: 18 KiB in a weight panel. Measured on Zen 5 at 8 rows of weights
// that come from memory: 150 GFLOP/s without, 186 at 8 ahead, 226 at 64, 246 at 96, 235 at 160.
constexpr int64_t kAhead = 96;

// Rows r of `a` are reached as groups of three: a + 3g*row is one pointer, and the offsets 0, row, 2*row fit into an
// x86 address. One pointer a row would not leave the compiler enough registers.
template <int ROWS>
struct Cursor {
  static constexpr int groups = (ROWS + 2) / 3;
  const float* group[groups];
  Cursor(const float* a, int64_t row) {
    for (int g = 0; g < groups; ++g) group[g] = a + 3 * g * row;
  }
  vf value(int r, int64_t row, int64_t ahead) const { return set1(group[r / 3][r % 3 * row + ahead]); }
  void advance(int64_t by) {
    for (const float*& p : group) p += by;
  }
};

template <int ROWS, int VECTORS>
struct Block {
  vf acc[ROWS][VECTORS];

  __attribute__((always_inline)) void start(const float* c, int64_t ldc, bool resume) {
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) acc[r][v] = resume ? load(c + r * ldc + v * cpu::kLanes) : set1(0.0f);
  }
  __attribute__((always_inline)) void store(float* c, int64_t ldc) const {
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) ::store(c + r * ldc + v * cpu::kLanes, acc[r][v]);
  }

  // One k: acc[r][v] <- fma(a of row r, w[v], acc[r][v]).
  __attribute__((always_inline)) void step(const Cursor<ROWS>& a, int64_t row, int64_t ahead, const vf* w) {
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r) {
      const vf x = a.value(r, row, ahead);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) fma_into(acc[r][v], x, w[v]);
    }
  }
  __attribute__((always_inline)) void even(const Cursor<ROWS>& a, int64_t row, const uint32_t* words) {
    vf w[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) w[v] = load_even(words + v * cpu::kLanes);
    step(a, row, 0, w);
  }
  __attribute__((always_inline)) void odd(const Cursor<ROWS>& a, int64_t row, int64_t ahead, const uint32_t* words) {
    vf w[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) w[v] = load_odd(words + v * cpu::kLanes);
    step(a, row, ahead, w);
  }
};

// UNIT: `step` is 1, known at compile time.
template <int ROWS, int VECTORS, bool UNIT>
void block(const cpu::Tile& t) {
  const int64_t row = t.row, step = UNIT ? 1 : t.step, ldb = t.ldb;
  Block<ROWS, VECTORS> sums;
  sums.start(t.c, t.ldc, t.resume);
  Cursor<ROWS> at(t.a, row);
  const uint32_t* words = t.b + (t.k0 / 2) * ldb;
  int64_t k = t.k0;
  if (k < t.k1 && k % 2) {
    sums.odd(at, row, 0, words);
    ++k, at.advance(step), words += ldb;
  }
  const uint32_t* ahead = words + kAhead * ldb;
  for (int64_t pairs = (t.k1 - k) / 2; pairs > 0; --pairs) {
    if (pairs == kAhead && t.next) ahead = t.next;
    for (int v = 0; v < VECTORS; ++v) prefetch(ahead + v * cpu::kLanes);
    sums.even(at, row, words);
    // Load the words again rather than keep them: registers are what is short.
    asm("" : "+r"(words));
    sums.odd(at, row, step, words);
    at.advance(2 * step), words += ldb, ahead += ldb, k += 2;
  }
  // A last even k stands alone: a zero in its other half would turn a sum of -0 into +0, or inf into NaN.
  if (k < t.k1) sums.even(at, row, words);
  sums.store(t.c, t.ldc);
}

template <int ROWS, int VECTORS>
void block_unpacked(int64_t depth, const float* a, int64_t row, const uint16_t* const* b_rows, int64_t column, float* c,
                    int64_t ldc, bool resume) {
  Block<ROWS, VECTORS> sums;
  sums.start(c, ldc, resume);
  Cursor<ROWS> at(a, row);
  for (int64_t k = 0; k < depth; ++k, at.advance(1)) {
    vf w[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) w[v] = load_bf16(b_rows[k] + column + v * cpu::kLanes);
    sums.step(at, row, 0, w);
  }
  sums.store(c, ldc);
}

template <int ROWS, int VECTORS>
inline void dispatch_unpacked(int64_t rows, int64_t depth, const float* a, int64_t row, const uint16_t* const* b_rows,
                              int64_t column, float* c, int64_t ldc, bool resume) {
  if constexpr (ROWS > 0) {
    if (rows != ROWS)
      dispatch_unpacked<ROWS - 1, VECTORS>(rows, depth, a, row, b_rows, column, c, ldc, resume);
    else
      block_unpacked<ROWS, VECTORS>(depth, a, row, b_rows, column, c, ldc, resume);
  }
}

void tile_unpacked(int64_t rows, int vectors, int64_t depth, const float* a, int64_t row, const uint16_t* const* b_rows,
                   float* c, int64_t ldc, bool resume) {
  constexpr int most = block_rows(kMaxVectors);
  for (int v = 0; v < vectors;) {
    const bool wide = vectors - v >= kMaxVectors;
    for (int64_t r = 0; r < rows; r += most) {
      const int64_t n = rows - r < most ? rows - r : most;
      if (wide)
        dispatch_unpacked<most, kMaxVectors>(n, depth, a + r * row, row, b_rows, v * cpu::kLanes,
                                             c + r * ldc + v * cpu::kLanes, ldc, resume);
      else
        dispatch_unpacked<most, 1>(n, depth, a + r * row, row, b_rows, v * cpu::kLanes, c + r * ldc + v * cpu::kLanes,
                                   ldc, resume);
    }
    v += wide ? kMaxVectors : 1;
  }
}

template <int ROWS, int VECTORS>
inline void dispatch(int64_t rows, const cpu::Tile& t) {
  if constexpr (ROWS > 0) {
    if (rows != ROWS)
      dispatch<ROWS - 1, VECTORS>(rows, t);
    else if (t.step == 1)
      block<ROWS, VECTORS, true>(t);
    else
      block<ROWS, VECTORS, false>(t);
  }
}

template <int VECTORS>
void rows_of(int64_t rows, cpu::Tile t) {
  // Blocks as equal as can be: 9 rows run as 5 and 4, not as 8 and a lonely 1.
  for (int64_t blocks = (rows + block_rows(VECTORS) - 1) / block_rows(VECTORS); blocks > 0; --blocks) {
    const int64_t n = (rows + blocks - 1) / blocks;
    dispatch<block_rows(VECTORS), VECTORS>(n, t);
    t.a += n * t.row, t.c += n * t.ldc, rows -= n;
  }
}

void tile(int64_t rows, int vectors, const cpu::Tile& whole) {
  for (cpu::Tile t = whole; vectors > 0;) {
    const int now = vectors < kMaxVectors ? vectors : kMaxVectors;
    if constexpr (kMaxVectors >= 4) {
      if (now == 4) rows_of<4>(rows, t);
      if (now == 3) rows_of<3>(rows, t);
      if (now == 2) rows_of<2>(rows, t);
    }
    if (now == 1) rows_of<1>(rows, t);
    vectors -= now, t.b += now * cpu::kLanes, t.c += now * cpu::kLanes;
    if (t.next) t.next += now * cpu::kLanes;
  }
}

}  // namespace
