#include "gemm.h"

namespace cpu {

int64_t TreeStack::buffers(int64_t leaves) {
  int64_t n = 1;
  for (int64_t x = leaves; x > 1; x /= 2) ++n;
  return n + (leaves > 1);
}

void TreeStack::merge_last(float* base, int64_t n) {
  float* right = base + int64_t(levels_.size() - 1) * n;
  kernels().add(right - n, right - n, right, n);
  levels_.pop_back();
  ++levels_.back();
}

void TreeStack::push(float* base, int64_t n) {
  levels_.push_back(0);
  while (levels_.size() > 1 && levels_[levels_.size() - 2] == levels_.back()) merge_last(base, n);
}

void TreeStack::finish(float* base, int64_t n) {
  while (levels_.size() > 1) merge_last(base, n);
}

}  // namespace cpu
