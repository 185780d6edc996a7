// Moving bf16 into the packed form (pack.h), a block of columns at a time. Bits only: nothing is computed.
#pragma once
#include "kernel_rows.h"

namespace {

inline vf load_words(const bf16* p, int n) {
  float words[L] = {};
  if (n >= L) std::memcpy(words, p, sizeof words);
  if (n < L) std::memcpy(words, p, size_t(n) * sizeof *words);
  return load(words);
}
inline void store_words(uint32_t* p, vf a, int n) {
  float words[L];
  store(words, a);
  std::memcpy(p, words, size_t(n) * sizeof *words);
}

// out[p*ld + j] <- k = 2p, 2p+1 of rows[j]: a transpose of words, 16 columns x 16 pairs at a time.
void pack_rows(uint32_t* out, int64_t ld, const bf16* const* rows, int64_t n, int64_t width, int64_t k) {
  const int64_t full = k / 2;
  for (int64_t j0 = 0; j0 < width; j0 += L) {
    const int columns = n - j0 < 0 ? 0 : n - j0 < L ? int(n - j0) : int(L);
    for (int64_t p0 = 0; p0 < full; p0 += L) {
      const int pairs = full - p0 < L ? int(full - p0) : int(L);
      vf words[L];
      for (int j = 0; j < L; ++j) words[j] = j < columns ? load_words(rows[j0 + j] + 2 * p0, pairs) : set1(0.0f);
      transpose(words);
      for (int p = 0; p < pairs; ++p) store_words(out + (p0 + p) * ld + j0, words[p], int(L));
    }
    if (k % 2)
      for (int j = 0; j < L; ++j) out[full * ld + j0 + j] = j < columns ? rows[j0 + j][k - 1] : 0;
  }
}

// out[p*ld + j] <- element j of rows 2p and 2p+1.
void pack_columns(uint32_t* out, int64_t ld, const bf16* const* rows, int64_t n, int64_t width, int64_t k) {
  for (int64_t p = 0; p < (k + 1) / 2; ++p)
    for (int64_t j = 0; j < width; j += L) {
      const int columns = n - j < 0 ? 0 : n - j < L ? int(n - j) : int(L);
      vf even = columns ? load16(rows[2 * p] + j, columns) : set1(0.0f);
      vf odd = columns && 2 * p + 1 < k ? load16(rows[2 * p + 1] + j, columns) : set1(0.0f);
      store_words(out + p * ld + j, interleaved(even, odd), int(L));
    }
}

}  // namespace
