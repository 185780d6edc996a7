#include "vocab.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "threads.h"

namespace cpu {
namespace {

constexpr int64_t kTilesPerTask = 128;

int present(int64_t tile, int64_t width, int64_t vocab_start, int64_t vocab) {
  const int64_t left = std::min(width, vocab - vocab_start) - tile * kBlock;
  return int(std::clamp<int64_t>(left, 0, kBlock));
}

float merged(const float* m, const float* s, int64_t tiles) {
  float top = m[0], sum = s[0];
  kernels().merge_tiles(m + 1, s + 1, tiles - 1, &top, &sum);
  return canonical(top + kernels().ln(sum));
}

}  // namespace

float canonical(float x) { return x != x ? std::bit_cast<float>(0x7fc00000u) : x; }

void vocab_stats(float* m, float* s, int64_t ld_stats, const float* logits, int64_t ld, const float* temperature,
                 int64_t rows, int64_t width, int64_t vocab_start, int64_t vocab, int threads) {
  const int64_t tiles = tiles_of(width), tasks = (tiles + kTilesPerTask - 1) / kTilesPerTask;
  parallel_for(rows * tasks, threads, [=](int64_t i) {
    const int64_t row = i / tasks, first = i % tasks * kTilesPerTask, last = std::min(tiles, first + kTilesPerTask);
    for (int64_t t = first; t < last; ++t) {
      const VocabTile tile = kernels().vocab_tile(logits + row * ld + t * kBlock,
                                                  present(t, width, vocab_start, vocab), temperature[row]);
      m[row * ld_stats + t] = tile.m;
      s[row * ld_stats + t] = canonical(tile.s);
    }
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
    for (int64_t t = 0; t < tiles; ++t) {
      const VocabTile tile = kernels().vocab_tile(row + t * kBlock, present(t, width, 0, vocab), temperature[r]);
      m[t] = tile.m, s[t] = tile.s;
    }
    lse[r] = merged(m, s, tiles);
    for (int64_t j = 0; j < ids_per_row; ++j)
      logp[r * ids_per_row + j] = canonical(row[ids[r * ids_per_row + j]] / temperature[r] - lse[r]);
  });
}

}  // namespace cpu
