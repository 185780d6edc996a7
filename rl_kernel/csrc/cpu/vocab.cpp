#include "vocab.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "threads.h"

namespace cpu {
namespace {

constexpr int64_t kTilesPerTask = 128;

float merged(const float* m, const float* s, int64_t tiles) {
  float top = m[0], sum = s[0];
  kernels().merge_tiles(m + 1, s + 1, tiles - 1, &top, &sum);
  return canonical(top + kernels().ln(sum));
}

}  // namespace

float canonical(float x) { return x != x ? std::bit_cast<float>(0x7fc00000u) : x; }

void vocab_stats(float* m, float* s, int64_t ld_stats, const float* logits, int64_t ld, const float* temperature,
                 int64_t rows, int64_t width, int64_t vocab_start, int64_t vocab, int threads) {
  const int64_t present = std::min(width, vocab - vocab_start);
  const int64_t tiles = tiles_of(width), tasks = (tiles + kTilesPerTask - 1) / kTilesPerTask;
  parallel_for(rows * tasks, threads, [=](int64_t i) {
    const int64_t row = i / tasks, first = i % tasks * kTilesPerTask, last = std::min(tiles, first + kTilesPerTask);
    float *m_at = m + row * ld_stats + first, *s_at = s + row * ld_stats + first;
    kernels().vocab_tiles(m_at, s_at, logits + row * ld + first * kBlock, last - first, present - first * kBlock,
                          temperature[row]);
    kernels().canonical(s_at, s_at, last - first);
  });
}

void merge_vocab_stats(float* lse, const float* m, const float* s, int64_t rows, int64_t tiles, int threads) {
  parallel_for(rows, threads, [=](int64_t r) { lse[r] = merged(m + r * tiles, s + r * tiles, tiles); });
}

void logp_from_logits(float* logp, float* lse, const float* logits, int64_t width, const int64_t* ids,
                      int64_t ids_per_row, const float* temperature, int64_t rows, int64_t vocab, int threads) {
  const int64_t tiles = tiles_of(width);
  parallel_for(rows, threads, [=](int64_t r) {
    const float* row = logits + r * width;
    float *m = scratch_of<float>(0, tiles), *s = scratch_of<float>(1, tiles);
    kernels().vocab_tiles(m, s, row, tiles, std::min(width, vocab), temperature[r]);
    lse[r] = merged(m, s, tiles);
    for (int64_t j = 0; j < ids_per_row; ++j)
      logp[r * ids_per_row + j] = canonical(row[ids[r * ids_per_row + j]] / temperature[r] - lse[r]);
  });
}

}  // namespace cpu
