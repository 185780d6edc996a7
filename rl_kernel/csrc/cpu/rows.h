// Drivers of the row-wise ops: they split rows over threads, or columns where rows must be taken in order.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace cpu {

// A [outer, inner, n] view: inner rows are contiguous, outer ones `stride` elements apart.
struct RowView {
  const bf16* data;
  int64_t inner, stride;
  const bf16* row(int64_t r, int64_t n) const { return data + r / inner * stride + r % inner * n; }
};

void rms_norm(bf16* y, RowView x, const bf16* residual, bf16* sum, const bf16* w, int64_t rows, int64_t n, float eps,
              int threads);
void rms_norm_backward(bf16* dx, float* dw, int64_t groups, RowView dy, RowView x, const bf16* w, int64_t rows,
                       int64_t n, float eps, int threads);
void rope(bf16* out, const bf16* x, int64_t token, const float* cos, const float* sin, const int64_t* positions,
          int64_t tokens, int64_t heads, int64_t dim, float sign, int threads);
void swiglu(bf16* y, const bf16* x, int64_t rows, int64_t n, int threads);
void swiglu_backward(bf16* dx, const bf16* dy, const bf16* x, int64_t rows, int64_t n, int threads);
void residual_add(bf16* y, const bf16* a, const bf16* b, int64_t n, int threads);
void embedding(bf16* y, const int64_t* ids, const bf16* w, int64_t tokens, int64_t k, int threads);
void embedding_dw(float* main_grad, const bf16* dy, const int64_t* ids, int64_t tokens, int64_t k, int threads);
// parts[ranks][n] -> the tree, as fp32 or bf16 (the other pointer null).
void tree_sum(float* out32, bf16* out16, const float* parts, int64_t ranks, int64_t n, int threads);

}  // namespace cpu
