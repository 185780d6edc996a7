#include "pack.h"

#include <algorithm>
#include <cstring>

#include "threads.h"

namespace cpu {
namespace {

uint32_t word(const bf16* p) {
  uint32_t w;
  std::memcpy(&w, p, sizeof w);
  return w;
}

constexpr int64_t kPairsPerStep = 16;  // transpose 48 columns x 16 pairs at a time, inside the L1 cache

}  // namespace

void pack_block_rows(uint32_t* out, const bf16* const* rows, int64_t n, int64_t width, int64_t k) {
  const int64_t full = k / 2;
  for (int64_t p0 = 0; p0 < full; p0 += kPairsPerStep) {
    const int64_t p1 = std::min(full, p0 + kPairsPerStep);
    for (int64_t j = 0; j < n; ++j)
      for (int64_t p = p0; p < p1; ++p) out[p * width + j] = word(rows[j] + 2 * p);
    for (int64_t p = p0; p < p1; ++p) std::fill(out + p * width + n, out + (p + 1) * width, 0u);
  }
  if (k % 2) {
    for (int64_t j = 0; j < n; ++j) out[full * width + j] = rows[j][k - 1];
    std::fill(out + full * width + n, out + (full + 1) * width, 0u);
  }
}

void pack_block_columns(uint32_t* out, const bf16* const* rows, int64_t n, int64_t width, int64_t k) {
  for (int64_t p = 0; p < pairs_of(k); ++p) {
    const bf16* even = rows[2 * p];
    uint32_t* line = out + p * width;
    if (2 * p + 1 < k) {
      const bf16* odd = rows[2 * p + 1];
      for (int64_t j = 0; j < n; ++j) line[j] = uint32_t(even[j]) | uint32_t(odd[j]) << 16;
    } else {
      for (int64_t j = 0; j < n; ++j) line[j] = even[j];
    }
    std::fill(line + n, line + width, 0u);
  }
}

void pack_rows(uint32_t* out, const bf16* w, int64_t n, int64_t k, int64_t ldw, int threads) {
  parallel_for(panels_of(n), threads, [=](int64_t panel) {
    const bf16* rows[kPanel];
    const int64_t columns = std::min<int64_t>(kPanel, n - panel * kPanel);
    for (int64_t j = 0; j < columns; ++j) rows[j] = w + (panel * kPanel + j) * ldw;
    pack_block_rows(out + panel * pairs_of(k) * kPanel, rows, columns, kPanel, k);
  });
}

void pack_columns(uint32_t* out, const bf16* w, int64_t n, int64_t k, int64_t ldw, int threads) {
  // A task takes 64 pairs of rows across all panels: it reads whole cache lines of w once.
  constexpr int64_t step = 64;
  const int64_t pairs = pairs_of(k);
  parallel_for((pairs + step - 1) / step, threads, [=](int64_t task) {
    const int64_t k0 = task * step * 2, k1 = std::min(k, k0 + step * 2);
    for (int64_t panel = 0; panel < panels_of(n); ++panel) {
      const bf16* rows[step * 2];
      for (int64_t i = k0; i < k1; ++i) rows[i - k0] = w + i * ldw + panel * kPanel;
      pack_block_columns(out + (panel * pairs + k0 / 2) * kPanel, rows, std::min<int64_t>(kPanel, n - panel * kPanel),
                         kPanel, k1 - k0);
    }
  });
}

void unpack_rows(bf16* w, const uint32_t* panels, int64_t n, int64_t k, int threads) {
  parallel_for(panels_of(n), threads, [=](int64_t panel) {
    const uint32_t* in = panels + panel * pairs_of(k) * kPanel;
    const int64_t columns = std::min<int64_t>(kPanel, n - panel * kPanel);
    for (int64_t j = 0; j < columns; ++j)
      for (int64_t i = 0; i < k; ++i) w[(panel * kPanel + j) * k + i] = bf16(in[i / 2 * kPanel + j] >> (i % 2 * 16));
  });
}

}  // namespace cpu
