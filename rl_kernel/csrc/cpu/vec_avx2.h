// Sixteen fp32 lanes as two AVX registers, with AVX2 and FMA. Included once, by isa_avx2.cpp.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

struct vf {
  __m256 lo, hi;
};

inline __m256i low_bits(vf a) { return _mm256_castps_si256(a.lo); }
inline __m256i high_bits(vf a) { return _mm256_castps_si256(a.hi); }
inline vf from_bits(__m256i lo, __m256i hi) { return {_mm256_castsi256_ps(lo), _mm256_castsi256_ps(hi)}; }
// All ones in the lanes below n.
inline vf first(int n) {
  const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return from_bits(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), index),
                   _mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), index));
}

inline vf set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline vf load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline vf load(const float* p, int n) {
  vf m = first(n);
  return {_mm256_maskload_ps(p, low_bits(m)), _mm256_maskload_ps(p + 8, high_bits(m))};
}
inline void store(float* p, vf a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline void store(float* p, vf a, int n) {
  vf m = first(n);
  _mm256_maskstore_ps(p, low_bits(m), a.lo);
  _mm256_maskstore_ps(p + 8, high_bits(m), a.hi);
}

inline __m256i widened(const uint16_t* p) {
  return _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
}
inline vf load_bf16(const uint16_t* p) { return from_bits(widened(p), widened(p + 8)); }
inline vf load_bf16(const uint16_t* p, int n) {
  uint16_t x[16] = {};
  std::memcpy(x, p, size_t(n) * sizeof *x);
  return load_bf16(x);
}
// The two k of a packed word.
inline vf load_even(const uint32_t* p) {
  return from_bits(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i*)p), 16),
                   _mm256_slli_epi32(_mm256_loadu_si256((const __m256i*)(p + 8)), 16));
}
inline vf load_odd(const uint32_t* p) {
  const __m256i high = _mm256_set1_epi32(int(0xffff0000u));
  return from_bits(_mm256_and_si256(_mm256_loadu_si256((const __m256i*)p), high),
                   _mm256_and_si256(_mm256_loadu_si256((const __m256i*)(p + 8)), high));
}

inline vf fma(vf a, vf b, vf c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
// acc <- fma(a, b, acc), in place; see vec_avx512.h.
inline void fma_into(vf& acc, vf a, vf b) {
  asm("vfmadd231ps %2, %1, %0" : "+x"(acc.lo) : "x"(a.lo), "x"(b.lo));
  asm("vfmadd231ps %2, %1, %0" : "+x"(acc.hi) : "x"(a.hi), "x"(b.hi));
}
inline vf add(vf a, vf b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline vf sub(vf a, vf b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline vf mul(vf a, vf b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline vf div(vf a, vf b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline vf neg(vf a) { return {_mm256_xor_ps(a.lo, _mm256_set1_ps(-0.0f)), _mm256_xor_ps(a.hi, _mm256_set1_ps(-0.0f))}; }
inline vf neg_abs(vf a) {
  return {_mm256_or_ps(a.lo, _mm256_set1_ps(-0.0f)), _mm256_or_ps(a.hi, _mm256_set1_ps(-0.0f))};
}
inline vf if_less(vf a, vf b, vf x, vf y) {
  return {_mm256_blendv_ps(y.lo, x.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(y.hi, x.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}
inline vf max_num(vf a, vf b) { return {_mm256_max_ps(b.lo, a.lo), _mm256_max_ps(b.hi, a.hi)}; }
inline vf keep_first(vf a, vf otherwise, int n) {
  vf m = first(n);
  return {_mm256_blendv_ps(otherwise.lo, a.lo, m.lo), _mm256_blendv_ps(otherwise.hi, a.hi, m.hi)};
}
inline __m256 canonical(__m256 a) {
  return _mm256_blendv_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}
inline vf canonical(vf a) { return {canonical(a.lo), canonical(a.hi)}; }
inline vf exponent_of(vf a) {
  const __m256i one = _mm256_set1_epi32(0x3f800000);
  return from_bits(_mm256_add_epi32(_mm256_slli_epi32(low_bits(a), 23), one),
                   _mm256_add_epi32(_mm256_slli_epi32(high_bits(a), 23), one));
}

inline __m256i rounded_high_half(__m256 a) {
  __m256i x = _mm256_castps_si256(a);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(x, 16), _mm256_set1_epi32(1));
  __m256i sum = _mm256_add_epi32(_mm256_add_epi32(x, _mm256_set1_epi32(0x7fff)), odd);
  return _mm256_blendv_epi8(sum, _mm256_set1_epi32(0x7fc00000), _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)));
}
inline vf round_bf16(vf a) {
  const __m256i high = _mm256_set1_epi32(int(0xffff0000u));
  return from_bits(_mm256_and_si256(rounded_high_half(a.lo), high), _mm256_and_si256(rounded_high_half(a.hi), high));
}
inline void store_bf16(uint16_t* p, vf a) {
  __m256i lo = _mm256_srli_epi32(rounded_high_half(a.lo), 16), hi = _mm256_srli_epi32(rounded_high_half(a.hi), 16);
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(_mm256_packus_epi32(lo, hi), 0xd8));
}
inline void store_bf16(uint16_t* p, vf a, int n) {
  uint16_t x[16];
  store_bf16(x, a);
  std::memcpy(p, x, size_t(n) * sizeof *x);
}

inline vf swap1(vf a) { return {_mm256_permute_ps(a.lo, 0xb1), _mm256_permute_ps(a.hi, 0xb1)}; }
inline vf swap2(vf a) { return {_mm256_permute_ps(a.lo, 0x4e), _mm256_permute_ps(a.hi, 0x4e)}; }
inline vf swap4(vf a) { return {_mm256_permute2f128_ps(a.lo, a.lo, 1), _mm256_permute2f128_ps(a.hi, a.hi, 1)}; }
inline vf swap8(vf a) { return {a.hi, a.lo}; }
inline vf evens(vf a, vf b) { return {_mm256_shuffle_ps(a.lo, b.lo, 0x88), _mm256_shuffle_ps(a.hi, b.hi, 0x88)}; }
inline vf odds(vf a, vf b) { return {_mm256_shuffle_ps(a.lo, b.lo, 0xdd), _mm256_shuffle_ps(a.hi, b.hi, 0xdd)}; }
inline float lane0(vf a) { return _mm256_cvtss_f32(a.lo); }

inline vf interleaved(vf even, vf odd) {
  return from_bits(_mm256_or_si256(low_bits(odd), _mm256_srli_epi32(low_bits(even), 16)),
                   _mm256_or_si256(high_bits(odd), _mm256_srli_epi32(high_bits(even), 16)));
}

inline void transpose8(__m256* r) {
  __m256 t[8];
  for (int i = 0; i < 8; i += 4) {
    __m256 a = _mm256_unpacklo_ps(r[i], r[i + 1]), b = _mm256_unpackhi_ps(r[i], r[i + 1]);
    __m256 c = _mm256_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm256_unpackhi_ps(r[i + 2], r[i + 3]);
    t[i] = _mm256_shuffle_ps(a, c, 0x44), t[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
    t[i + 2] = _mm256_shuffle_ps(b, d, 0x44), t[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
  }
}
// 16 x 16 words: the four quarters are transposed, and the off-diagonal two change places.
inline void transpose(vf* r) {
  __m256 quarter[4][8];
  for (int i = 0; i < 8; ++i)
    quarter[0][i] = r[i].lo, quarter[1][i] = r[i + 8].lo, quarter[2][i] = r[i].hi, quarter[3][i] = r[i + 8].hi;
  for (__m256* q : quarter) transpose8(q);
  for (int i = 0; i < 8; ++i) r[i] = {quarter[0][i], quarter[1][i]}, r[i + 8] = {quarter[2][i], quarter[3][i]};
}

inline float fma1(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }

constexpr int kMaxVectors = 1;
constexpr int block_rows(int) { return 6; }

}  // namespace
