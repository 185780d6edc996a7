#include "rows.h"

#include <algorithm>
#include <vector>

#include "gemm.h"
#include "threads.h"

namespace cpu {
namespace {

// Elements that are worth waking a second thread for.
constexpr int64_t kGrain = 16384;

// f(first, last) over chunks of [0, n) units of `weight` elements each.
template <class F>
void chunks(int64_t n, int64_t weight, int threads, F f) {
  const int64_t unit = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, weight));
  parallel_for((n + unit - 1) / unit, threads, [&](int64_t i) { f(i * unit, std::min(n, (i + 1) * unit)); });
}

}  // namespace

void rms_norm(bf16* y, RowView x, const bf16* residual, bf16* sum, const bf16* w, int64_t rows, int64_t n, float eps,
              int threads) {
  chunks(rows, n, threads, [&](int64_t r0, int64_t r1) {
    for (int64_t r = r0; r < r1; ++r)
      kernels().rms_norm(y + r * n, x.row(r, n), residual ? residual + r * n : nullptr,
                         residual ? sum + r * n : nullptr, w, n, eps);
  });
}

void rms_norm_backward(bf16* dx, float* dw, int64_t groups, RowView dy, RowView x, const bf16* w, int64_t rows,
                       int64_t n, float eps, int threads) {
  std::vector<float> inverse(rows);
  chunks(rows, n, threads, [&](int64_t r0, int64_t r1) {
    for (int64_t r = r0; r < r1; ++r)
      inverse[r] = kernels().rms_norm_dx(dx + r * n, dy.row(r, n), x.row(r, n), w, n, eps);
  });
  // Rows in order, so columns are what threads may share.
  constexpr int64_t width = 128;
  parallel_for((n + width - 1) / width, rows * n < kGrain ? 1 : threads, [&](int64_t i) {
    const int64_t c = i * width, columns = std::min(width, n - c);
    for (int64_t r = 0; r < rows; ++r)
      kernels().rms_norm_dw(dw + r % groups * n + c, dy.row(r, n) + c, x.row(r, n) + c, inverse[r], columns);
  });
}

void rope(bf16* out, const bf16* x, int64_t token, const float* cos, const float* sin, const int64_t* positions,
          int64_t tokens, int64_t heads, int64_t dim, float sign, int threads) {
  chunks(tokens, heads * dim, threads, [&](int64_t t0, int64_t t1) {
    for (int64_t t = t0; t < t1; ++t) {
      const int64_t at = positions[t] * (dim / 2);
      kernels().rope({x + t * token, out + t * heads * dim, cos + at, sin + at, heads, dim}, sign);
    }
  });
}

void swiglu(bf16* y, const bf16* x, int64_t rows, int64_t n, int threads) {
  chunks(rows, n, threads, [&](int64_t r0, int64_t r1) {
    for (int64_t r = r0; r < r1; ++r) kernels().swiglu(y + r * n, x + r * 2 * n, x + r * 2 * n + n, n);
  });
}

void swiglu_backward(bf16* dx, const bf16* dy, const bf16* x, int64_t rows, int64_t n, int threads) {
  chunks(rows, n, threads, [&](int64_t r0, int64_t r1) {
    for (int64_t r = r0; r < r1; ++r) {
      const int64_t at = r * 2 * n;
      kernels().swiglu_backward(dx + at, dx + at + n, dy + r * n, x + at, x + at + n, n);
    }
  });
}

void residual_add(bf16* y, const bf16* a, const bf16* b, int64_t n, int threads) {
  chunks(n, 1, threads, [&](int64_t i, int64_t end) { kernels().add_bf16(y + i, a + i, b + i, end - i); });
}

void embedding(bf16* y, const int64_t* ids, const bf16* w, int64_t tokens, int64_t k, int threads) {
  chunks(tokens, k, threads, [&](int64_t t0, int64_t t1) {
    for (int64_t t = t0; t < t1; ++t) {
      kernels().add_zero(y + t * k, w + ids[t] * k, k);
    }
  });
}

void embedding_dw(float* main_grad, const bf16* dy, const int64_t* ids, int64_t tokens, int64_t k, int threads) {
  constexpr int64_t width = 128;
  parallel_for((k + width - 1) / width, tokens * k < kGrain ? 1 : threads, [&](int64_t i) {
    const int64_t c = i * width, columns = std::min(width, k - c);
    for (int64_t t = 0; t < tokens; ++t) kernels().accumulate_bf16(main_grad + ids[t] * k + c, dy + t * k + c, columns);
  });
}

void tree_sum(float* out32, bf16* out16, const float* parts, int64_t ranks, int64_t n, int threads) {
  constexpr int64_t width = 4096;
  parallel_for((n + width - 1) / width, n * ranks < kGrain ? 1 : threads, [&](int64_t task) {
    const int64_t i = task * width, columns = std::min(width, n - i);
    float* sums = scratch_of<float>(0, columns * TreeStack::buffers(ranks));
    TreeStack tree;
    for (int64_t r = 0; r < ranks; ++r) {
      std::copy_n(parts + r * n + i, columns, tree.leaf(sums, columns));
      tree.push(sums, columns);
    }
    tree.finish(sums, columns);
    if (out16)
      kernels().narrow(out16 + i, sums, columns);
    else
      kernels().canonical(out32 + i, sums, columns);
  });
}

}  // namespace cpu
