// RMSNorm, its gradients, and the residual sum.
#include "arrays.h"

namespace ref {
namespace {

struct Normed {
  std::vector<float> t;  // x * r
  float r;
};

Normed normed(const bf16* x, int64_t n, float eps) {
  std::vector<float> wide = widened(x, n);
  float r = 1.0f / std::sqrt(lane_dot(wide.data(), wide.data(), n) / float(n) + eps);
  for (float& v : wide) v = v * r;
  return {std::move(wide), r};
}

void rms_norm(Out<bf16, 2> y, In<bf16, 2> x, In<bf16, 1> w, float eps) {
  int64_t rows = x.shape(0), n = x.shape(1);
  for (int64_t i = 0; i < rows; ++i) {
    Normed row = normed(x.data() + i * n, n, eps);
    for (int64_t j = 0; j < n; ++j) y.data()[i * n + j] = narrow(round_bf16(row.t[j]) * widen(w.data()[j]));
  }
}

// Row i adds to dw[i % groups]; the caller merges the groups (heads) in the tree.
void rms_norm_backward(Out<bf16, 2> dx, Out<float, 2> dw, In<bf16, 2> dy, In<bf16, 2> x, In<bf16, 1> w, float eps) {
  int64_t rows = x.shape(0), n = x.shape(1), groups = dw.shape(0);
  for (int64_t i = 0; i < rows; ++i) {
    Normed row = normed(x.data() + i * n, n, eps);
    std::vector<float> dy_row = widened(dy.data() + i * n, n), g(n);
    for (int64_t j = 0; j < n; ++j) g[j] = dy_row[j] * widen(w.data()[j]);
    float c = lane_dot(g.data(), row.t.data(), n) / float(n);
    for (int64_t j = 0; j < n; ++j) {
      dx.data()[i * n + j] = narrow(row.r * std::fma(-row.t[j], c, g[j]));
      float& sum = dw.data()[(i % groups) * n + j];
      sum = canonical(std::fma(dy_row[j], round_bf16(row.t[j]), sum));
    }
  }
}

void residual_add(Out<bf16, 1> y, In<bf16, 1> a, In<bf16, 1> b) {
  for (size_t i = 0; i < a.shape(0); ++i) y.data()[i] = narrow(widen(a.data()[i]) + widen(b.data()[i]));
}

}  // namespace

void bind_norm(nb::module_& module) {
  module.def("rms_norm", &rms_norm);
  module.def("rms_norm_backward", &rms_norm_backward);
  module.def("residual_add", &residual_add);
}

}  // namespace ref
