// exp2, ln and the neighbour-pair tree on sixteen lanes. Included by the isa_*.cpp files after their vec_*.h.
// Only headers without templates of the standard library may come in here: a template instantiated with AVX-512
// flags could be the copy that the linker keeps for every CPU.
#pragma once
#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace {

constexpr float kLog2e = 0x1.715476p+0f;
constexpr float kMinusInf = -__builtin_inff();

// exp2 model `poly` for x <= 0 (contract): nearest integer by adding and subtracting 1.5 * 2^23, Horner on
// [-1/2, 1/2], scale through the exponent bits. NaN comes out of p as NaN.
inline vf exp2(vf x) {
  const vf shift = set1(12582912.0f);
  vf t = add(x, shift), f = sub(x, sub(t, shift));
  vf p = fma(set1(0x1.41fbbcp-13f), f, set1(0x1.5f3e54p-10f));
  p = fma(p, f, set1(0x1.3b2d4cp-7f));
  p = fma(p, f, set1(0x1.c6aee8p-5f));
  p = fma(p, f, set1(0x1.ebfbdcp-3f));
  p = fma(p, f, set1(0x1.62e430p-1f));
  p = fma(p, f, set1(1.0f));
  return if_less(x, set1(-126.0f), set1(0.0f), mul(p, exponent_of(t)));
}
inline float exp2(float x) { return lane0(exp2(set1(x))); }

// Once a row, so scalar. Cephes logf (Moshier) with the fused operations of the contract.
inline float ln(float x) {
  if (x != x || x == __builtin_inff()) return x;
  int32_t i;
  std::memcpy(&i, &x, sizeof i);
  i -= 0x3f3504f3;
  float e = float(i >> 23), f;
  i = (i & 0x7fffff) + 0x3f3504f3;
  std::memcpy(&f, &i, sizeof f);
  f -= 1.0f;
  const float tail[] = {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
                        -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f};
  float square = f * f, q = 7.0376836292e-2f;
  for (float c : tail) q = fma1(q, f, c);
  float y = (f * square) * q;
  y = fma1(e, -2.12194440e-4f, y);
  y = fma1(-0.5f, square, y);
  return fma1(e, 0.693359375f, f + y);
}

// The tree over one vector's lanes, in every lane: an addition does not care which neighbour comes first.
inline vf tree(vf a) {
  a = add(a, swap1(a));
  a = add(a, swap2(a));
  a = add(a, swap4(a));
  return add(a, swap8(a));
}
// The tree over four vectors, in every lane. evens + odds adds the neighbours of two vectors at once and leaves
// them in order, so that after two such levels the lanes of each group of four belong to a, b, c and d.
inline vf tree(vf a, vf b, vf c, vf d) {
  vf ab = add(evens(a, b), odds(a, b)), cd = add(evens(c, d), odds(c, d));
  vf x = add(evens(ab, cd), odds(ab, cd));
  x = add(x, swap4(x));
  x = add(x, swap8(x));
  x = add(x, swap1(x));
  return add(x, swap2(x));
}
inline vf tree(const vf* a, int vectors) {
  if (vectors == 4) return tree(a[0], a[1], a[2], a[3]);
  if (vectors == 1) return tree(a[0]);
  return add(tree(a, vectors / 2), tree(a + vectors / 2, vectors / 2));
}

// max_num(a, b) leaves out a NaN in `b`, as maxNum does, provided that `a` never holds one: start from -inf.
inline float max_lane(vf a) {
  a = max_num(a, swap1(a));
  a = max_num(a, swap2(a));
  a = max_num(a, swap4(a));
  return lane0(max_num(a, swap8(a)));
}
// The lanes found a maximum of zero; the sign is that of the first zero in order, which the lanes do not know.
inline float first_zero(const float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    if (x[i] == 0.0f) return x[i];
  return 0.0f;
}

}  // namespace
