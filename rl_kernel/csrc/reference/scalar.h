// Scalar arithmetic of the contract: storage rounding, exp2, ln, and the two summation orders.
// Every line here is law; it is written for reading, not for speed. Built with -ffp-contract=off:
// an operation is fused only where `std::fma` stands.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

namespace ref {

using bf16 = uint16_t;  // bit pattern

constexpr float kLog2e = 0x1.715476p+0f;  // log2(e), rounded to fp32

inline float widen(bf16 x) { return std::bit_cast<float>(uint32_t(x) << 16); }

// The one NaN that an op may store, whatever payload its arithmetic produced.
inline float canonical(float x) { return x != x ? std::bit_cast<float>(0x7fc00000u) : x; }

// Round to nearest even; NaN becomes 0x7fc0.
inline bf16 narrow(float x) {
  if (x != x) return 0x7fc0;
  uint32_t bits = std::bit_cast<uint32_t>(x);
  return bf16((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
inline float round_bf16(float x) { return widen(narrow(x)); }

// exp2 model `poly`, for x <= 0: n = rint(x), f = x - n in [-1/2, 1/2], p(f) by Horner, times 2^n.
// The constant coefficient is exactly 1, so exp2(0) == 1. Below -126 the result is +0; NaN stays NaN.
inline float exp2_poly(float x) {
  if (x != x) return x;
  if (x < -126.0f) return 0.0f;
  float n = (x + 12582912.0f) - 12582912.0f;
  float f = x - n;
  float p = 0x1.41fbbcp-13f;
  p = std::fma(p, f, 0x1.5f3e54p-10f);
  p = std::fma(p, f, 0x1.3b2d4cp-7f);
  p = std::fma(p, f, 0x1.c6aee8p-5f);
  p = std::fma(p, f, 0x1.ebfbdcp-3f);
  p = std::fma(p, f, 0x1.62e430p-1f);
  p = std::fma(p, f, 1.0f);
  return p * std::bit_cast<float>(uint32_t(int32_t(n) + 127) << 23);
}

// Natural logarithm of a positive normal number: x = 2^e (1+f), sqrt(1/2) <= 1+f < sqrt(2);
// the polynomial is that of Cephes logf (Moshier), with the fused operations written out.
inline float ln(float x) {
  if (x != x || x == INFINITY) return x;
  int32_t i = std::bit_cast<int32_t>(x) - 0x3f3504f3;
  float e = float(i >> 23);
  float f = std::bit_cast<float>((i & 0x7fffff) + 0x3f3504f3) - 1.0f;
  float s = f * f;
  float q = 7.0376836292e-2f;
  q = std::fma(q, f, -1.1514610310e-1f);
  q = std::fma(q, f, 1.1676998740e-1f);
  q = std::fma(q, f, -1.2420140846e-1f);
  q = std::fma(q, f, 1.4249322787e-1f);
  q = std::fma(q, f, -1.6668057665e-1f);
  q = std::fma(q, f, 2.0000714765e-1f);
  q = std::fma(q, f, -2.4999993993e-1f);
  q = std::fma(q, f, 3.3333331174e-1f);
  float y = (f * s) * q;
  y = std::fma(e, -2.12194440e-4f, y);
  y = std::fma(-0.5f, s, y);
  return std::fma(e, 0.693359375f, f + y);
}

// Neighbour-pair tree ((v0+v1)+(v2+v3))+...; an odd last value moves up unchanged. Empty sums to +0.
inline float tree_sum(std::vector<float> v) {
  if (v.empty()) return 0.0f;
  while (v.size() > 1) {
    size_t half = v.size() / 2;
    for (size_t i = 0; i < half; ++i) v[i] = v[2 * i] + v[2 * i + 1];
    if (v.size() % 2) v[half++] = v.back();
    v.resize(half);
  }
  return v[0];
}

// Sum of a[i]*b[i]: lane j of 128 takes i = j, j+128, ... ascending by fma; the lanes meet in the tree.
inline float lane_dot(const float* a, const float* b, int64_t n) {
  std::vector<float> lanes(128, 0.0f);
  for (int64_t i = 0; i < n; ++i) lanes[i % 128] = std::fma(a[i], b[i], lanes[i % 128]);
  return tree_sum(std::move(lanes));
}

// The maximum of IEEE 754-2008 maxNum: a NaN is left out. Order-free.
inline float max_num(float a, float b) { return (b > a || a != a) ? b : a; }

struct Sigmoid {
  float sigmoid, silu;
};
template <class Exp2>
inline Sigmoid sigmoid(float x, Exp2 exp2) {
  float e = exp2(-std::fabs(x) * kLog2e);
  float s = x >= 0.0f ? 1.0f / (1.0f + e) : e / (1.0f + e);
  return {s, x * s};
}

}  // namespace ref
