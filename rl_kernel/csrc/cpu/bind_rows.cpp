#include "bindings.h"
#include "rows.h"

namespace cpu {

namespace {

void bind_norm_and_rope(nb::module_& m) {
  m.def(
      "rms_norm",
      [](Address y, Address x, int64_t inner, int64_t stride, Address residual, Address sum, Address w, int64_t rows,
         int64_t n, float eps, int threads) {
        rms_norm(at<bf16>(y), {at<const bf16>(x), inner, stride}, at<const bf16>(residual), at<bf16>(sum),
                 at<const bf16>(w), rows, n, eps, threads);
      },
      Release());
  m.def(
      "rms_norm_backward",
      [](Address dx, Address dw, int64_t groups, Address dy, int64_t dy_inner, int64_t dy_stride, Address x,
         int64_t x_inner, int64_t x_stride, Address w, int64_t rows, int64_t n, float eps, int threads) {
        rms_norm_backward(at<bf16>(dx), at<float>(dw), groups, {at<const bf16>(dy), dy_inner, dy_stride},
                          {at<const bf16>(x), x_inner, x_stride}, at<const bf16>(w), rows, n, eps, threads);
      },
      Release());
  m.def(
      "rope",
      [](Address out, Address x, int64_t token, Address cos, Address sin, Address positions, int64_t table_rows,
         int64_t tokens, int64_t heads, int64_t dim, float sign, int threads) {
        require_range(at<const int64_t>(positions), tokens, table_rows, "positions");
        rope(at<bf16>(out), at<const bf16>(x), token, at<const float>(cos), at<const float>(sin),
             at<const int64_t>(positions), tokens, heads, dim, sign, threads);
      },
      Release());
}

void bind_elementwise(nb::module_& m) {
  m.def(
      "swiglu",
      [](Address y, Address x, int64_t rows, int64_t n, int threads) {
        swiglu(at<bf16>(y), at<const bf16>(x), rows, n, threads);
      },
      Release());
  m.def(
      "swiglu_backward",
      [](Address dx, Address dy, Address x, int64_t rows, int64_t n, int threads) {
        swiglu_backward(at<bf16>(dx), at<const bf16>(dy), at<const bf16>(x), rows, n, threads);
      },
      Release());
  m.def(
      "residual_add",
      [](Address y, Address a, Address b, int64_t n, int threads) {
        residual_add(at<bf16>(y), at<const bf16>(a), at<const bf16>(b), n, threads);
      },
      Release());
  m.def(
      "embedding",
      [](Address y, Address ids, Address w, int64_t vocab, int64_t tokens, int64_t k, int threads) {
        require_range(at<const int64_t>(ids), tokens, vocab, "ids");
        embedding(at<bf16>(y), at<const int64_t>(ids), at<const bf16>(w), tokens, k, threads);
      },
      Release());
  m.def(
      "embedding_dw",
      [](Address main_grad, Address dy, Address ids, int64_t vocab, int64_t tokens, int64_t k, int threads) {
        require_range(at<const int64_t>(ids), tokens, vocab, "ids");
        embedding_dw(at<float>(main_grad), at<const bf16>(dy), at<const int64_t>(ids), tokens, k, threads);
      },
      Release());
  m.def(
      "tree_sum",
      [](Address out32, Address out16, Address parts, int64_t ranks, int64_t n, int threads) {
        tree_sum(at<float>(out32), at<bf16>(out16), at<const float>(parts), ranks, n, threads);
      },
      Release());
}

}  // namespace

void bind_rows(nb::module_& m) {
  bind_norm_and_rope(m);
  bind_elementwise(m);
}

}  // namespace cpu
