#include "pack.h"

#include <algorithm>

#include "threads.h"

namespace cpu {
void pack_rows(uint32_t* out, const bf16* w, int64_t n, int64_t k, int64_t ldw, int threads) {
  parallel_for(panels_of(n), threads, [=](int64_t panel) {
    const bf16* rows[kPanel];
    const int64_t columns = std::min<int64_t>(kPanel, n - panel * kPanel);
    for (int64_t j = 0; j < columns; ++j) rows[j] = w + (panel * kPanel + j) * ldw;
    kernels().pack_rows(out + panel * pairs_of(k) * kPanel, kPanel, rows, columns, kPanel, k);
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
      kernels().pack_columns(out + (panel * pairs + k0 / 2) * kPanel, kPanel, rows,
                             std::min<int64_t>(kPanel, n - panel * kPanel), kPanel, k1 - k0);
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
