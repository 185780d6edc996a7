// MMA model `fma32`: acc' = fma(a, b, acc). Outputs are independent, so lanes may run side by side; a chain may not be cut.
#include <cmath>
#include <cstring>
#include <immintrin.h>

#include "mma.h"

namespace ref {
namespace {

// The law.
__attribute__((target_clones("avx2,fma", "default"))) void plain(float* c, int64_t ldc, const float* a, int64_t lda,
                                                                   const float* b, int64_t ldb, int64_t m, int64_t n,
                                                                   int64_t k) {
  for (int64_t i = 0; i < m; ++i)
    for (int64_t p = 0; p < k; ++p)
      for (int64_t j = 0; j < n; ++j) c[i * ldc + j] = std::fma(a[i * lda + p], b[p * ldb + j], c[i * ldc + j]);
}

#if defined(__x86_64__)
// The same chains, ROWS × 16·VECS of them at a time in registers.
template <int ROWS, int VECS>
__attribute__((target("avx512f"))) void tile(float* c, int64_t ldc, const float* a, int64_t lda, const float* b,
                                             int64_t ldb, int64_t k, __mmask16 last) {
  __m512 acc[ROWS][VECS];
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECS; ++v)
      acc[r][v] = _mm512_maskz_loadu_ps(v == VECS - 1 ? last : __mmask16(0xffff), c + r * ldc + 16 * v);
  for (int64_t p = 0; p < k; ++p) {
    __m512 w[VECS];
    for (int v = 0; v < VECS; ++v)
      w[v] = _mm512_maskz_loadu_ps(v == VECS - 1 ? last : __mmask16(0xffff), b + p * ldb + 16 * v);
    for (int r = 0; r < ROWS; ++r) {
      __m512 x = _mm512_set1_ps(a[r * lda + p]);
      for (int v = 0; v < VECS; ++v) acc[r][v] = _mm512_fmadd_ps(x, w[v], acc[r][v]);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECS; ++v)
      _mm512_mask_storeu_ps(c + r * ldc + 16 * v, v == VECS - 1 ? last : __mmask16(0xffff), acc[r][v]);
}

template <int VECS>
__attribute__((target("avx512f"))) void columns(float* c, int64_t ldc, const float* a, int64_t lda, const float* b,
                                                int64_t ldb, int64_t m, int64_t k, __mmask16 last) {
  int64_t i = 0;
  for (; i + 6 <= m; i += 6) tile<6, VECS>(c + i * ldc, ldc, a + i * lda, lda, b, ldb, k, last);
  for (; i < m; ++i) tile<1, VECS>(c + i * ldc, ldc, a + i * lda, lda, b, ldb, k, last);
}

__attribute__((target("avx512f"))) void avx512(float* c, int64_t ldc, const float* a, int64_t lda, const float* b,
                                               int64_t ldb, int64_t m, int64_t n, int64_t k) {
  int64_t j = 0;
  for (; j + 64 <= n; j += 64) columns<4>(c + j, ldc, a, lda, b + j, ldb, m, k, 0xffff);
  for (; j < n; j += 16)
    columns<1>(c + j, ldc, a, lda, b + j, ldb, m, k, __mmask16(n - j >= 16 ? 0xffff : (1u << (n - j)) - 1));
}
#endif

}  // namespace

void accumulate_fma32(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t m,
                      int64_t n, int64_t k) {
#if defined(__x86_64__)
  static const bool has_avx512 = __builtin_cpu_supports("avx512f");
  if (has_avx512 && !force_plain_mma) return avx512(c, ldc, a, lda, b, ldb, m, n, k);
#endif
  plain(c, ldc, a, lda, b, ldb, m, n, k);
}

}  // namespace ref
