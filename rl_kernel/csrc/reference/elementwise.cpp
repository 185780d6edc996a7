// RoPE, SwiGLU, embedding, the tree over ranks, and the logarithm on its own.
#include "arrays.h"

namespace ref {
namespace {

// sign = +1 forward, -1 backward (the inverse rotation).
void rope(Out<bf16, 3> y, In<bf16, 3> x, In<float, 2> cos, In<float, 2> sin, In<int64_t, 1> positions, float sign) {
  int64_t tokens = x.shape(0), heads = x.shape(1), dim = x.shape(2), half = dim / 2;
  for (int64_t t = 0; t < tokens; ++t) {
    int64_t position = positions.data()[t];
    require(position >= 0 && position < int64_t(cos.shape(0)), "rope: a position lies outside the table");
    for (int64_t h = 0; h < heads; ++h) {
      const bf16* in = x.data() + (t * heads + h) * dim;
      bf16* out = y.data() + (t * heads + h) * dim;
      for (int64_t i = 0; i < half; ++i) {
        float c = cos.data()[position * half + i], s = sign * sin.data()[position * half + i];
        float x1 = widen(in[i]), x2 = widen(in[half + i]);
        out[i] = narrow(std::fma(x1, c, -(x2 * s)));
        out[half + i] = narrow(std::fma(x2, c, x1 * s));
      }
    }
  }
}

// x[T, 2I] holds gate, then up.
void swiglu(Out<bf16, 2> y, In<bf16, 2> x, const std::string& exp2_name) {
  Exp2 model = exp2_model(exp2_name);
  int64_t rows = y.shape(0), n = y.shape(1);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < n; ++j) {
      float gate = widen(x.data()[i * 2 * n + j]), up = widen(x.data()[i * 2 * n + n + j]);
      y.data()[i * n + j] = narrow(sigmoid(gate, [=](float v) { return exp2(model, v); }).silu * up);
    }
}

void swiglu_backward(Out<bf16, 2> dx, In<bf16, 2> dy, In<bf16, 2> x, const std::string& exp2_name) {
  Exp2 model = exp2_model(exp2_name);
  int64_t rows = dy.shape(0), n = dy.shape(1);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < n; ++j) {
      float gate = widen(x.data()[i * 2 * n + j]), up = widen(x.data()[i * 2 * n + n + j]);
      float d = widen(dy.data()[i * n + j]);
      Sigmoid s = sigmoid(gate, [=](float v) { return exp2(model, v); });
      float slope = s.sigmoid * std::fma(gate, 1.0f - s.sigmoid, 1.0f);
      dx.data()[i * 2 * n + j] = narrow((d * up) * slope);
      dx.data()[i * 2 * n + n + j] = narrow(d * s.silu);
    }
}

void embedding(Out<bf16, 2> y, In<int64_t, 1> ids, In<bf16, 2> w) {
  int64_t k = w.shape(1);
  for (size_t t = 0; t < ids.shape(0); ++t) {
    int64_t id = ids.data()[t];
    require(id >= 0 && id < int64_t(w.shape(0)), "embedding: a token id lies outside the table");
    for (int64_t i = 0; i < k; ++i) y.data()[t * k + i] = narrow(widen(w.data()[id * k + i]) + 0.0f);
  }
}

void embedding_dw(Out<float, 2> main_grad, In<bf16, 2> dy, In<int64_t, 1> ids) {
  int64_t k = main_grad.shape(1);
  for (size_t t = 0; t < ids.shape(0); ++t) {
    int64_t id = ids.data()[t];
    require(id >= 0 && id < int64_t(main_grad.shape(0)), "embedding_dw: a token id lies outside the table");
    for (int64_t i = 0; i < k; ++i) {
      float& sum = main_grad.data()[id * k + i];
      sum = canonical(sum + widen(dy.data()[t * k + i]));
    }
  }
}

// parts[R, n] -> y[n]
void tree_over_ranks(Out<float, 1> y, In<float, 2> parts) {
  int64_t ranks = parts.shape(0), n = parts.shape(1);
  std::vector<float> values(ranks);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t r = 0; r < ranks; ++r) values[r] = parts.data()[r * n + i];
    y.data()[i] = canonical(tree_sum(values));
  }
}

}  // namespace

void bind_elementwise(nb::module_& module) {
  module.def("rope", &rope);
  module.def("swiglu", &swiglu);
  module.def("swiglu_backward", &swiglu_backward);
  module.def("embedding", &embedding);
  module.def("embedding_dw", &embedding_dw);
  module.def("tree_sum", &tree_over_ranks);
  module.def("ln", [](Out<float, 1> y, In<float, 1> x) {
    for (size_t i = 0; i < x.shape(0); ++i) y.data()[i] = canonical(ln(x.data()[i]));
  });
}

}  // namespace ref
