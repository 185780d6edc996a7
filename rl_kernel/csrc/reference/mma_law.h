// One step of the MMA models that fuse a group of products: acc' = mma(acc, a[group], b[group]), in integers.
// Every line here is law; it is written for reading, not for speed.
#pragma once
#include <algorithm>
#include <bit>
#include <climits>
#include <cmath>
#include <cstdint>

#include "mma.h"

namespace ref {

inline const float kMmaNan = std::bit_cast<float>(0x7fffffffu);  // the one NaN inside a chain

// A finite number as significand * 2^(exponent - 46): a product of two 24-bit significands has 46 fractional bits.
struct Term {
  int64_t significand;
  int exponent;
};

// The 24-bit significand of x when its exponent is not taken below min_exponent.
inline Term decode(float x, int min_exponent) {
  if (x == 0.0f) return {0, min_exponent};
  int exponent = std::max(std::ilogb(x), min_exponent);
  return {int64_t(std::ldexp(double(x), 23 - exponent)), exponent};
}

// The product is not renormalised: its exponent is the sum of its operands' exponents.
inline Term product(float a, float b, int min_exponent) {
  Term x = decode(a, min_exponent), y = decode(b, min_exponent);
  return {x.significand * y.significand, x.exponent + y.exponent};
}

inline Term accumulator(float acc) {
  Term x = decode(acc, -126);
  return {x.significand << 23, x.exponent};
}

inline int64_t shift_floor(int64_t x, int bits) { return x >> std::min(bits, 63); }
inline int64_t shift_truncate(int64_t x, int bits) { return x < 0 ? -shift_floor(-x, bits) : shift_floor(x, bits); }

// The term in units of 2^(exponent - fraction), cut toward zero.
inline int64_t align_truncate(Term t, int exponent, int fraction) {
  return shift_truncate(t.significand, 46 - fraction + exponent - t.exponent);
}

// sum * 2^unit, cut toward zero to fp32, subnormals kept. What is cut to nothing is +0, also from below.
inline float truncate_to_fp32(int64_t sum, int unit) {
  uint64_t magnitude = sum < 0 ? -uint64_t(sum) : uint64_t(sum);
  if (magnitude == 0) return 0.0f;
  int exponent = unit + int(std::bit_width(magnitude)) - 1;
  if (exponent > 127) return sum < 0 ? -INFINITY : INFINITY;
  int last = std::max(exponent - 23, -149);  // weight of the result's last bit
  uint64_t kept = last > unit ? (last - unit > 63 ? 0 : magnitude >> (last - unit)) : magnitude;
  double value = std::ldexp(double(kept), std::max(last, unit));
  return kept == 0 ? 0.0f : float(sum < 0 ? -value : value);
}

// NaN or an infinity among the operands decides alone, by IEEE 754; in double no finite operands overflow.
inline double ieee_sum(float acc, const float* a, const float* b, int64_t stride, int64_t count) {
  double sum = acc;
  for (int64_t p = 0; p < count; ++p) sum += double(a[p]) * double(b[p * stride]);
  return sum;
}

// sm80, sm90, sm100: align all terms to the largest exponent, cut each, add, cut. A zero takes no part in the maximum,
// which is never below `lowest`.
inline float step_truncated(const Mma& model, float acc, const float* a, const float* b, int64_t stride,
                            int64_t count) {
  double special = ieee_sum(acc, a, b, stride, count);
  if (std::isnan(special)) return kMmaNan;
  if (std::isinf(special)) return float(special);
  int top = model.lowest;
  Term start = accumulator(acc);
  if (start.significand != 0) top = std::max(top, start.exponent);
  for (int64_t p = 0; p < count; ++p) {
    Term t = product(a[p], b[p * stride], model.min_exponent);
    if (t.significand != 0) top = std::max(top, t.exponent);
  }
  int64_t sum = align_truncate(start, top, model.fraction);
  for (int64_t p = 0; p < count; ++p)
    sum += align_truncate(product(a[p], b[p * stride], model.min_exponent), top, model.fraction);
  return truncate_to_fp32(sum, top - model.fraction);
}

// cdna3: the products meet first, cut at 24 fractional bits; their sum and acc (cut at 24 too) meet at 32, rounded
// down; the sum keeps 31 fractional bits, rounded down, and rounds to nearest even.
inline float step_cdna3(const Mma& model, float acc, const float* a, const float* b, int64_t stride, int64_t count) {
  double special = acc;
  int top = INT_MIN;
  for (int64_t p = 0; p < count; ++p) {
    double exact = double(a[p]) * double(b[p * stride]);
    special += std::fabs(exact) >= 0x1p128 ? std::copysign(INFINITY, exact) : exact;  // a product past fp32
    Term t = product(std::isfinite(a[p]) ? a[p] : 0.0f, std::isfinite(b[p * stride]) ? b[p * stride] : 0.0f,
                     model.min_exponent);
    if (t.significand != 0) top = std::max(top, t.exponent);
  }
  if (std::isnan(special)) return kMmaNan;
  if (std::isinf(special)) return float(special);
  int64_t dot = 0;
  for (int64_t p = 0; p < count && top != INT_MIN; ++p)
    dot += align_truncate(product(a[p], b[p * stride], model.min_exponent), top, model.fraction);
  Term start = accumulator(acc);
  int both = std::max({top, start.exponent, model.lowest});
  int64_t sum = top == INT_MIN ? 0 : shift_floor(dot << 8, both - top);
  sum += shift_floor(start.significand, 46 - 24 + both - start.exponent) << 8;
  if (sum == 0) return 0.0f;
  int unit = both - 32;
  uint64_t magnitude = sum < 0 ? -uint64_t(sum) : uint64_t(sum);
  int exponent = std::max(unit + int(std::bit_width(magnitude)) - 1, -126);
  int drop = std::max(exponent - 31 - unit, 0);
  return float(std::ldexp(double(shift_floor(sum, drop)), unit + drop));
}

inline float step(const Mma& model, float acc, const float* a, const float* b, int64_t stride, int64_t count) {
  return model.rule == Mma::Rule::cdna3 ? step_cdna3(model, acc, a, b, stride, count)
                                        : step_truncated(model, acc, a, b, stride, count);
}

}  // namespace ref
