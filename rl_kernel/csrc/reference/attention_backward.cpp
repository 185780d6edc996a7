// Gradients of causal self-attention (as many queries as keys), one query head at a time, then the tree over the
// query heads that share a kv head.
#include "arrays.h"

namespace ref {
namespace {

constexpr int64_t kBlock = 64;  // a multiple of every MMA model's group

// One query head of one sequence of n tokens; q, k, v, dout: [n][dim] fp32.
struct HeadGradients {
  std::vector<float> dq, dk, dv;  // fp32 chains, [n][dim]
};

std::vector<float> gather(const bf16* x, int64_t n, int64_t stride, int64_t dim) {
  std::vector<float> out(n * dim);
  for (int64_t i = 0; i < n; ++i)
    for (int64_t d = 0; d < dim; ++d) out[i * dim + d] = widen(x[i * stride + d]);
  return out;
}

std::vector<float> transposed(const std::vector<float>& x, int64_t rows, int64_t columns) {
  std::vector<float> out(x.size());
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) out[j * rows + i] = x[i * columns + j];
  return out;
}

// One row's chain through a block of `rows` terms, of which the first `first` are masked. a: [rows]; b: [rows][dim].
void accumulate_from(const Mma& mma, int64_t first, int64_t rows, float* c, const float* a, const float* b,
                     int64_t dim) {
  std::vector<float> seen(rows * dim, 0.0f);
  std::copy(b + first * dim, b + rows * dim, seen.begin() + first * dim);
  accumulate(mma, c, dim, a, rows, seen.data(), dim, 1, dim, rows);
}

HeadGradients head_backward(const Mma& mma, Exp2 model, int64_t n, int64_t dim, float scale, const std::vector<float>& q,
                            const std::vector<float>& k, const std::vector<float>& v, const std::vector<float>& dout,
                            const std::vector<float>& out, const std::vector<float>& m, const std::vector<float>& l) {
  std::vector<float> s(n * n, 0.0f), dp(n * n, 0.0f), p(n * n, 0.0f), ds(n * n, 0.0f);
  accumulate(mma, s.data(), n, q.data(), dim, transposed(k, n, dim).data(), n, n, n, dim);
  accumulate(mma, dp.data(), n, dout.data(), dim, transposed(v, n, dim).data(), n, n, n, dim);
  for (int64_t i = 0; i < n; ++i) {
    float r = 1.0f / l[i], delta = lane_dot(dout.data() + i * dim, out.data() + i * dim, dim);
    for (int64_t j = 0; j <= i; ++j) {
      float weight = exp2(model, s[i * n + j] * scale - m[i]) * r;
      p[i * n + j] = round_bf16(weight);
      ds[i * n + j] = round_bf16(weight * (dp[i * n + j] - delta));
    }
  }
  HeadGradients grad{std::vector<float>(n * dim, 0.0f), std::vector<float>(n * dim, 0.0f),
                     std::vector<float>(n * dim, 0.0f)};
  // Row i of dq sums the keys it saw, row j of dk and dv the queries that saw it, block by block of absolute positions;
  // in the block on the diagonal the terms that the mask takes away are +0 * +0.
  std::vector<float> p_t = transposed(p, n, n), ds_t = transposed(ds, n, n);
  for (int64_t b = 0; b < n; b += kBlock) {
    int64_t rows = std::min(kBlock, n - b), below = b + rows;
    accumulate(mma, grad.dq.data() + b * dim, dim, ds.data() + b * n, n, k.data(), dim, rows, dim, b);
    for (int64_t r = 0; r < rows; ++r) {
      int64_t row = b + r;
      accumulate(mma, grad.dq.data() + row * dim, dim, ds.data() + row * n + b, n, k.data() + b * dim, dim, 1, dim, r + 1);
      accumulate_from(mma, r, rows, grad.dv.data() + row * dim, p_t.data() + row * n + b, dout.data() + b * dim, dim);
      accumulate_from(mma, r, rows, grad.dk.data() + row * dim, ds_t.data() + row * n + b, q.data() + b * dim, dim);
    }
    accumulate(mma, grad.dv.data() + b * dim, dim, p_t.data() + b * n + below, n, dout.data() + below * dim, dim, rows,
               dim, n - below);
    accumulate(mma, grad.dk.data() + b * dim, dim, ds_t.data() + b * n + below, n, q.data() + below * dim, dim, rows,
               dim, n - below);
  }
  return grad;
}

// dq, dout, q, out: [T, H, D]; dk, dv, k, v: [T, G, D]; m, l: [T, H]; cu: [R + 1].
void attention_backward(Out<bf16, 3> dq, Out<bf16, 3> dk, Out<bf16, 3> dv, In<bf16, 3> dout, In<bf16, 3> q,
                        In<bf16, 3> k, In<bf16, 3> v, In<bf16, 3> out, In<float, 2> m, In<float, 2> l,
                        In<int32_t, 1> cu, float score_scale, float scale, const std::string& mma,
                        const std::string& exp2_name) {
  int64_t heads = q.shape(1), kv_heads = k.shape(1), dim = q.shape(2), group = heads / kv_heads;
  for (size_t r = 0; r + 1 < cu.shape(0); ++r)
    for (int64_t g = 0; g < kv_heads; ++g) {
      int64_t t0 = cu.data()[r], n = cu.data()[r + 1] - t0;
      auto kv = [&](const In<bf16, 3>& x) { return gather(x.data() + (t0 * kv_heads + g) * dim, n, kv_heads * dim, dim); };
      std::vector<HeadGradients> grads;
      for (int64_t h = g * group; h < (g + 1) * group; ++h) {
        auto mine = [&](const In<bf16, 3>& x) { return gather(x.data() + (t0 * heads + h) * dim, n, heads * dim, dim); };
        std::vector<float> m_h(n), l_h(n);
        for (int64_t i = 0; i < n; ++i) {
          m_h[i] = m.data()[(t0 + i) * heads + h];
          l_h[i] = l.data()[(t0 + i) * heads + h];
        }
        grads.push_back(head_backward(mma_model(mma), exp2_model(exp2_name), n, dim, score_scale, mine(q), kv(k), kv(v),
                                      mine(dout), mine(out), m_h, l_h));
        for (int64_t i = 0; i < n; ++i)
          for (int64_t d = 0; d < dim; ++d)
            dq.data()[((t0 + i) * heads + h) * dim + d] = narrow((grads.back().dq[i * dim + d] + 0.0f) * scale);
      }
      std::vector<float> values(group);
      for (int64_t i = 0; i < n * dim; ++i) {
        int64_t at = ((t0 + i / dim) * kv_heads + g) * dim + i % dim;
        for (int64_t h = 0; h < group; ++h) values[h] = grads[h].dk[i];
        dk.data()[at] = narrow((tree_sum(values) + 0.0f) * scale);
        for (int64_t h = 0; h < group; ++h) values[h] = grads[h].dv[i];
        dv.data()[at] = narrow(tree_sum(values) + 0.0f);
      }
    }
}

}  // namespace

void bind_attention_backward(nb::module_& module) { module.def("attention_backward", &attention_backward); }

}  // namespace ref
