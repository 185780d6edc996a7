// GEMM and its two gradients. `segments` cuts the summed index in equal parts whose fp32 sums meet in the tree.
#include "arrays.h"

namespace ref {
namespace {

constexpr int64_t kPanel = 64;  // output columns at a time; changes no bit

// Sum over the summed index of x[m][s]*b(s, j), in `segments` chains and their tree, for one panel of columns.
// x: [m][total] fp32; b: [total][kPanel] fp32; y: [m][kPanel] fp32.
void segmented(Mma mma, std::vector<float>& y, const float* x, const float* b, int64_t m, int64_t total,
               int64_t segments) {
  int64_t length = total / segments;
  std::vector<std::vector<float>> parts(segments, std::vector<float>(m * kPanel, 0.0f));
  for (int64_t s = 0; s < segments; ++s)
    accumulate(mma, parts[s].data(), kPanel, x + s * length, total, b + s * length * kPanel, kPanel, m, kPanel, length);
  if (segments == 1) {
    y = std::move(parts[0]);
    return;
  }
  std::vector<float> values(segments);
  for (int64_t i = 0; i < m * kPanel; ++i) {
    for (int64_t s = 0; s < segments; ++s) values[s] = parts[s][i];
    y[i] = tree_sum(values);
  }
}

// y[m][n] for all columns; `load(panel, j0, columns)` fills the panel b[s][j] for columns j0.. (absent columns: 0).
template <class Load, class Store>
void product(Mma mma, const bf16* x, int64_t m, int64_t n, int64_t total, int64_t segments, Load load, Store store) {
  require(segments > 0 && total % segments == 0, "the summed dimension must be divisible by segments");
  std::vector<float> wide = widened(x, m * total), panel(total * kPanel), y(m * kPanel);
  for (int64_t j0 = 0; j0 < n; j0 += kPanel) {
    int64_t columns = std::min(kPanel, n - j0);
    if (columns < kPanel) std::fill(panel.begin(), panel.end(), 0.0f);
    load(panel.data(), j0, columns);
    segmented(mma, y, wide.data(), panel.data(), m, total, segments);
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < columns; ++j) store(i * n + j0 + j, canonical(y[i * kPanel + j]));
  }
}

template <class Store>
void forward(const std::string& mma, In<bf16, 2> x, In<bf16, 2> w, int64_t segments, Store store) {
  int64_t m = x.shape(0), n = w.shape(0), k = x.shape(1);
  require(int64_t(w.shape(1)) == k, "gemm: x[M,K] and w[N,K] must share K");
  const bf16* weights = w.data();
  auto load = [=](float* panel, int64_t j0, int64_t columns) {
    for (int64_t j = 0; j < columns; ++j)
      for (int64_t s = 0; s < k; ++s) panel[s * kPanel + j] = widen(weights[(j0 + j) * k + s]);
  };
  product(mma_model(mma), x.data(), m, n, k, segments, load, store);
}

template <class Store>
void input_gradient(const std::string& mma, In<bf16, 2> dy, In<bf16, 2> w, int64_t segments, Store store) {
  int64_t m = dy.shape(0), n = dy.shape(1), k = w.shape(1);
  require(int64_t(w.shape(0)) == n, "gemm_dx: dy[M,N] and w[N,K] must share N");
  const bf16* weights = w.data();
  auto load = [=](float* panel, int64_t j0, int64_t columns) {
    for (int64_t s = 0; s < n; ++s)
      for (int64_t j = 0; j < columns; ++j) panel[s * kPanel + j] = widen(weights[s * k + j0 + j]);
  };
  product(mma_model(mma), dy.data(), m, k, n, segments, load, store);
}

// main_grad[n][k] <- chain over rows t of dy[t][n]*x[t][k], from the value already there.
void weight_gradient(const std::string& mma, Out<float, 2> main_grad, In<bf16, 2> dy, In<bf16, 2> x) {
  int64_t t = dy.shape(0), n = dy.shape(1), k = x.shape(1);
  require(int64_t(x.shape(0)) == t && int64_t(main_grad.shape(0)) == n && int64_t(main_grad.shape(1)) == k,
          "gemm_dw: main_grad[N,K], dy[T,N], x[T,K]");
  std::vector<float> a(n * t), b = widened(x.data(), t * k);
  for (int64_t i = 0; i < t; ++i)
    for (int64_t j = 0; j < n; ++j) a[j * t + i] = widen(dy.data()[i * n + j]);
  accumulate(mma_model(mma), main_grad.data(), k, a.data(), t, b.data(), k, n, k, t);
  for (int64_t i = 0; i < n * k; ++i) main_grad.data()[i] = canonical(main_grad.data()[i]);
}

}  // namespace

void bind_gemm(nb::module_& module) {
  module.def("gemm", [](Out<bf16, 2> y, In<bf16, 2> x, In<bf16, 2> w, int64_t segments, const std::string& mma) {
    forward(mma, x, w, segments, [out = y.data()](int64_t i, float v) { out[i] = narrow(v); });
  });
  module.def("gemm_fp32", [](Out<float, 2> y, In<bf16, 2> x, In<bf16, 2> w, int64_t segments, const std::string& mma) {
    forward(mma, x, w, segments, [out = y.data()](int64_t i, float v) { out[i] = v; });
  });
  module.def("gemm_dx", [](Out<bf16, 2> dx, In<bf16, 2> dy, In<bf16, 2> w, int64_t segments, const std::string& mma) {
    input_gradient(mma, dy, w, segments, [out = dx.data()](int64_t i, float v) { out[i] = narrow(v); });
  });
  module.def("gemm_dx_fp32",
             [](Out<float, 2> dx, In<bf16, 2> dy, In<bf16, 2> w, int64_t segments, const std::string& mma) {
               input_gradient(mma, dy, w, segments, [out = dx.data()](int64_t i, float v) { out[i] = v; });
             });
  module.def("gemm_dw", [](Out<float, 2> main_grad, In<bf16, 2> dy, In<bf16, 2> x, const std::string& mma) {
    weight_gradient(mma, main_grad, dy, x);
  });
}

}  // namespace ref
