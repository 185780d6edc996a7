// Element-wise loops and row norms. A tail shorter than a vector is loaded and stored under a mask.
#pragma once
#include "lane_math.h"

namespace {

using cpu::bf16;
constexpr int64_t L = cpu::kLanes;

// Calls f(i, n) for each vector: n == 16 but for the tail.
template <class F>
inline void vectors_of(int64_t n, F f) {
  int64_t i = 0;
  for (; i + L <= n; i += L) f(i, int(L));
  if (i < n) f(i, int(n - i));
}
inline vf load16(const bf16* p, int n) { return n == L ? load_bf16(p) : load_bf16(p, n); }
inline vf load32(const float* p, int n) { return n == L ? load(p) : load(p, n); }
inline void store16(bf16* p, vf a, int n) { n == L ? store_bf16(p, a) : store_bf16(p, a, n); }
inline void store32(float* p, vf a, int n) { n == L ? store(p, a) : store(p, a, n); }

void widen(float* out, const bf16* x, int64_t n) {
  vectors_of(n, [=](int64_t i, int w) { store32(out + i, load16(x + i, w), w); });
}
void narrow(bf16* out, const float* x, int64_t n) {
  vectors_of(n, [=](int64_t i, int w) { store16(out + i, load32(x + i, w), w); });
}
void canonical_row(float* out, const float* x, int64_t n) {
  vectors_of(n, [=](int64_t i, int w) { store32(out + i, canonical(load32(x + i, w)), w); });
}
void add_row(float* out, const float* a, const float* b, int64_t n) {
  vectors_of(n, [=](int64_t i, int w) { store32(out + i, add(load32(a + i, w), load32(b + i, w)), w); });
}
void add_bf16(bf16* out, const bf16* a, const bf16* b, int64_t n) {
  vectors_of(n, [=](int64_t i, int w) { store16(out + i, add(load16(a + i, w), load16(b + i, w)), w); });
}
void add_zero(bf16* out, const bf16* x, int64_t n) {
  vectors_of(n, [=](int64_t i, int w) { store16(out + i, add(load16(x + i, w), set1(0.0f)), w); });
}
void accumulate_bf16(float* sum, const bf16* x, int64_t n) {
  vectors_of(n, [=](int64_t i, int w) { store32(sum + i, canonical(add(load32(sum + i, w), load16(x + i, w))), w); });
}
void add_zero_scale(bf16* out, const float* x, float scale, int64_t n) {
  vectors_of(n, [=](int64_t i, int w) { store16(out + i, mul(add(load32(x + i, w), set1(0.0f)), set1(scale)), w); });
}
void scale_row(float* x, float by, int64_t n) {
  vectors_of(n, [=](int64_t i, int w) { store32(x + i, mul(load32(x + i, w), set1(by)), w); });
}
void merge_row(float* acc1, const float* acc2, float a, float b, int64_t n) {
  vectors_of(n, [=](int64_t i, int w) {
    store32(acc1 + i, add(mul(load32(acc1 + i, w), set1(a)), mul(load32(acc2 + i, w), set1(b))), w);
  });
}
void divide_row(bf16* out, const float* acc, float l, int64_t n) {
  vectors_of(n, [=](int64_t i, int w) { store16(out + i, div(add(load32(acc + i, w), set1(0.0f)), set1(l)), w); });
}

// lane_dot of the contract: 128 lanes are eight vectors; f(i, n) returns the two factors at i.
struct factors {
  vf a, b;
};
template <class F>
inline float lane_dot_of(int64_t n, F f) {
  vf lanes[8];
  for (vf& v : lanes) v = set1(0.0f);
  int64_t i = 0;
  for (; i + 8 * L <= n; i += 8 * L) {
#pragma GCC unroll 8
    for (int v = 0; v < 8; ++v) {
      factors x = f(i + v * L, int(L));
      lanes[v] = fma(x.a, x.b, lanes[v]);
    }
  }
  for (int v = 0; i < n; ++v, i += L) {
    int w = n - i < L ? int(n - i) : int(L);
    factors x = f(i, w);
    lanes[v] = keep_first(fma(x.a, x.b, lanes[v]), lanes[v], w);
  }
  return lane0(tree(lanes, 8));
}

float lane_dot(const bf16* a, const bf16* b, int64_t n) {
  return lane_dot_of(n, [=](int64_t i, int w) { return factors{load16(a + i, w), load16(b + i, w)}; });
}
inline float inverse_rms(float sum, int64_t n, float eps) { return 1.0f / __builtin_sqrtf(sum / float(n) + eps); }

void rms_norm(bf16* y, const bf16* x, const bf16* residual, bf16* sum, const bf16* w, int64_t n, float eps) {
  if (residual) {
    add_bf16(sum, x, residual, n);
    x = sum;
  }
  const vf r = set1(inverse_rms(lane_dot(x, x, n), n, eps));
  vectors_of(n,
             [=](int64_t i, int k) { store16(y + i, mul(round_bf16(mul(load16(x + i, k), r)), load16(w + i, k)), k); });
}

float rms_norm_dx(bf16* dx, const bf16* dy, const bf16* x, const bf16* w, int64_t n, float eps) {
  const float r = inverse_rms(lane_dot(x, x, n), n, eps);
  const vf rv = set1(r);
  const float sum = lane_dot_of(n, [=](int64_t i, int k) {
    return factors{mul(load16(dy + i, k), load16(w + i, k)), mul(load16(x + i, k), rv)};
  });
  const vf c = set1(sum / float(n));
  vectors_of(n, [=](int64_t i, int k) {
    vf g = mul(load16(dy + i, k), load16(w + i, k)), t = mul(load16(x + i, k), rv);
    store16(dx + i, mul(rv, fma(neg(t), c, g)), k);
  });
  return r;
}

void rms_norm_dw(float* dw, const bf16* dy, const bf16* x, float r, int64_t n) {
  const vf rv = set1(r);
  vectors_of(n, [=](int64_t i, int k) {
    vf t = round_bf16(mul(load16(x + i, k), rv));
    store32(dw + i, canonical(fma(load16(dy + i, k), t, load32(dw + i, k))), k);
  });
}

void rope(const cpu::RopeRow& row, float sign) {
  const int64_t half = row.dim / 2;
  for (int64_t h = 0; h < row.heads; ++h) {
    const bf16* x = row.x + h * row.dim;
    bf16* out = row.out + h * row.dim;
    vectors_of(half, [=, &row](int64_t i, int w) {
      vf c = load32(row.cos + i, w), s = mul(set1(sign), load32(row.sin + i, w));
      vf x1 = load16(x + i, w), x2 = load16(x + half + i, w);
      store16(out + i, fma(x1, c, neg(mul(x2, s))), w);
      store16(out + half + i, fma(x2, c, mul(x1, s)), w);
    });
  }
}

inline vf sigmoid(vf x) {
  const vf one = set1(1.0f);
  vf e = exp2(mul(neg_abs(x), set1(kLog2e)));
  return div(if_less(x, set1(0.0f), e, one), add(one, e));
}
void swiglu(bf16* y, const bf16* gate, const bf16* up, int64_t n) {
  vectors_of(n, [=](int64_t i, int w) {
    vf g = load16(gate + i, w);
    store16(y + i, mul(mul(g, sigmoid(g)), load16(up + i, w)), w);
  });
}
void swiglu_backward(bf16* dgate, bf16* dup, const bf16* dy, const bf16* gate, const bf16* up, int64_t n) {
  vectors_of(n, [=](int64_t i, int w) {
    vf g = load16(gate + i, w), d = load16(dy + i, w), s = sigmoid(g), one = set1(1.0f);
    vf slope = mul(s, fma(g, sub(one, s), one));
    store16(dgate + i, mul(mul(d, load16(up + i, w)), slope), w);
    store16(dup + i, mul(d, mul(g, s)), w);
  });
}

}  // namespace
