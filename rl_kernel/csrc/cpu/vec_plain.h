// Sixteen fp32 lanes in plain C++, for any CPU. Included once, by isa_plain.cpp.
#pragma once
#include <cstdint>
#include <cstring>

namespace {

struct vf {
  float v[16];
};

inline uint32_t bits1(float x) {
  uint32_t b;
  std::memcpy(&b, &x, sizeof b);
  return b;
}
inline float from_bits1(uint32_t b) {
  float x;
  std::memcpy(&x, &b, sizeof x);
  return x;
}

// fma without the instruction. The product of two fp32 is exact in fp64; the sum is rounded to odd there (TwoSum
// gives its error), so that the one rounding to fp32 that follows is correct (Boldo and Melquiond, 2008).
inline float fma1(float a, float b, float c) {
#if defined(__FP_FAST_FMAF)
  return __builtin_fmaf(a, b, c);
#else
  double p = double(a) * double(b), z = double(c), s = p + z;
  double t = s - p, error = (p - (s - t)) + (z - t);
  if (error != 0.0 && s - s == 0.0) {  // an infinite or NaN sum has no error to mend
    int64_t i;
    std::memcpy(&i, &s, sizeof i);
    if ((i & 1) == 0) i += (error > 0.0) == (s > 0.0) ? 1 : -1;
    std::memcpy(&s, &i, sizeof s);
  }
  return float(s);
#endif
}

template <class F>
inline vf each(F f) {
  vf r;
  for (int i = 0; i < 16; ++i) r.v[i] = f(i);
  return r;
}

inline vf set1(float x) {
  return each([=](int) { return x; });
}
inline vf load(const float* p) {
  return each([=](int i) { return p[i]; });
}
inline vf load(const float* p, int n) {
  return each([=](int i) { return i < n ? p[i] : 0.0f; });
}
inline void store(float* p, vf a) { std::memcpy(p, a.v, sizeof a.v); }
inline void store(float* p, vf a, int n) { std::memcpy(p, a.v, size_t(n) * sizeof *p); }
inline vf load_bf16(const uint16_t* p) {
  return each([=](int i) { return from_bits1(uint32_t(p[i]) << 16); });
}
inline vf load_bf16(const uint16_t* p, int n) {
  return each([=](int i) { return i < n ? from_bits1(uint32_t(p[i]) << 16) : 0.0f; });
}
// The two k of a packed word.
inline vf load_even(const uint32_t* p) {
  return each([=](int i) { return from_bits1(p[i] << 16); });
}
inline vf load_odd(const uint32_t* p) {
  return each([=](int i) { return from_bits1(p[i] & 0xffff0000u); });
}

inline vf fma(const vf& a, const vf& b, const vf& c) {
  return each([&](int i) { return fma1(a.v[i], b.v[i], c.v[i]); });
}
inline void fma_into(vf& acc, const vf& a, const vf& b) { acc = fma(a, b, acc); }
inline vf add(const vf& a, const vf& b) {
  return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline vf sub(const vf& a, const vf& b) {
  return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline vf mul(const vf& a, const vf& b) {
  return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline vf div(const vf& a, const vf& b) {
  return each([&](int i) { return a.v[i] / b.v[i]; });
}
inline vf neg(const vf& a) {
  return each([&](int i) { return from_bits1(bits1(a.v[i]) ^ 0x80000000u); });
}
inline vf neg_abs(const vf& a) {
  return each([&](int i) { return from_bits1(bits1(a.v[i]) | 0x80000000u); });
}
inline vf if_less(const vf& a, const vf& b, const vf& x, const vf& y) {
  return each([&](int i) { return a.v[i] < b.v[i] ? x.v[i] : y.v[i]; });
}
inline vf max_num(const vf& a, const vf& b) { return if_less(a, b, b, a); }
inline vf keep_first(const vf& a, const vf& otherwise, int n) {
  return each([&](int i) { return i < n ? a.v[i] : otherwise.v[i]; });
}
inline vf canonical(const vf& a) {
  return each([&](int i) { return a.v[i] != a.v[i] ? from_bits1(0x7fc00000u) : a.v[i]; });
}
inline vf exponent_of(const vf& a) {
  return each([&](int i) { return from_bits1((bits1(a.v[i]) << 23) + 0x3f800000u); });
}
inline uint32_t rounded_high_half(float x) {
  uint32_t b = bits1(x);
  return x != x ? 0x7fc00000u : (b + 0x7fffu + ((b >> 16) & 1u)) & 0xffff0000u;
}
inline vf round_bf16(const vf& a) {
  return each([&](int i) { return from_bits1(rounded_high_half(a.v[i])); });
}
inline void store_bf16(uint16_t* p, const vf& a, int n = 16) {
  for (int i = 0; i < n; ++i) p[i] = uint16_t(rounded_high_half(a.v[i]) >> 16);
}

inline vf swap1(const vf& a) {
  return each([&](int i) { return a.v[i ^ 1]; });
}
inline vf swap2(const vf& a) {
  return each([&](int i) { return a.v[i ^ 2]; });
}
inline vf swap4(const vf& a) {
  return each([&](int i) { return a.v[i ^ 4]; });
}
inline vf swap8(const vf& a) {
  return each([&](int i) { return a.v[i ^ 8]; });
}
inline vf evens(const vf& a, const vf& b) {
  return each([&](int i) { return (i & 2 ? b : a).v[(i & ~3) + (i & 1) * 2]; });
}
inline vf odds(const vf& a, const vf& b) {
  return each([&](int i) { return (i & 2 ? b : a).v[(i & ~3) + (i & 1) * 2 + 1]; });
}
inline vf interleaved(const vf& even, const vf& odd) {
  return each([&](int i) { return from_bits1(bits1(odd.v[i]) | bits1(even.v[i]) >> 16); });
}
inline void transpose(vf* r) {
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < i; ++j) {
      float t = r[i].v[j];
      r[i].v[j] = r[j].v[i], r[j].v[i] = t;
    }
}
inline float lane0(const vf& a) { return a.v[0]; }
inline void prefetch(const void*) {}

constexpr int kMaxVectors = 1;
constexpr int block_rows(int) { return 2; }

}  // namespace
