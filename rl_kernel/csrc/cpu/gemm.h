// One matrix product for y, dx and dw: they differ only in how the operands lie in memory.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels.h"

namespace cpu {

// out[m][n] = tree over segments of (chain over k of a(m,k)*b(k,n)); the chain of a single segment may start from
// `out32` itself (`resume`), which is how a gradient is accumulated.
struct Product {
  int64_t m, n, k;
  int64_t segments = 1;
  const bf16* a;
  int64_t lda;
  bool a_is_k_major = false;  // a(m,k) at a[k*lda + m] instead of a[m*lda + k]
  const uint32_t* panels;     // packed b, see pack.h
  float* out32 = nullptr;     // exactly one of the two outputs
  bf16* out16 = nullptr;
  int64_t ldo;
  bool resume = false;
};

void multiply(const Product& product, int threads);

// A tree whose leaves arrive one by one: at most log2(leaves) + 1 buffers are alive.
class TreeStack {
 public:
  // The buffer to fill with the next leaf.
  float* leaf(float* base, int64_t n) { return base + int64_t(levels_.size()) * n; }
  void push(float* base, int64_t n);
  // Merges what is left, an odd last value moving up; the sum ends at `base`.
  void finish(float* base, int64_t n);
  static int64_t buffers(int64_t leaves);

 private:
  void merge_last(float* base, int64_t n);
  std::vector<int> levels_;
};

}  // namespace cpu
