// Sixteen fp32 lanes on AVX-512 (F, BW, DQ, VL). Included once, by isa_avx512.cpp.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace {

struct vf {
  __m512 v;
};

inline __mmask16 first(int n) { return n >= 16 ? __mmask16(0xffff) : __mmask16((1u << n) - 1u); }
inline __m512i bits(vf a) { return _mm512_castps_si512(a.v); }
inline vf from_bits(__m512i a) { return {_mm512_castsi512_ps(a)}; }

inline vf set1(float x) { return {_mm512_set1_ps(x)}; }
inline vf load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline vf load(const float* p, int n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
inline void store(float* p, vf a) { _mm512_storeu_ps(p, a.v); }
inline void store(float* p, vf a, int n) { _mm512_mask_storeu_ps(p, first(n), a.v); }

inline vf load_bf16(const uint16_t* p) {
  return from_bits(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline vf load_bf16(const uint16_t* p, int n) {
  return from_bits(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n), p)), 16));
}
// The two k of a packed word.
inline vf load_even(const uint32_t* p) { return from_bits(_mm512_slli_epi32(_mm512_loadu_si512(p), 16)); }
inline vf load_odd(const uint32_t* p) {
  return from_bits(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(int(0xffff0000u))));
}

inline vf fma(vf a, vf b, vf c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// acc <- fma(a, b, acc), in place: left to itself, GCC 12 overwrites a factor here and there and pays with moves and
// spills in the one loop where every register is taken.
inline void fma_into(vf& acc, vf a, vf b) { asm("vfmadd231ps %2, %1, %0" : "+v"(acc.v) : "v"(a.v), "v"(b.v)); }
inline vf add(vf a, vf b) { return {_mm512_add_ps(a.v, b.v)}; }
inline vf sub(vf a, vf b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline vf mul(vf a, vf b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline vf div(vf a, vf b) { return {_mm512_div_ps(a.v, b.v)}; }
inline vf neg(vf a) { return {_mm512_xor_ps(a.v, _mm512_set1_ps(-0.0f))}; }
inline vf neg_abs(vf a) { return {_mm512_or_ps(a.v, _mm512_set1_ps(-0.0f))}; }
// a < b ? x : y, false where either is NaN.
inline vf if_less(vf a, vf b, vf x, vf y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
// Per lane a < b ? b : a, so `a` where either is NaN: what vmaxps does with its operands in this order.
inline vf max_num(vf a, vf b) { return {_mm512_max_ps(b.v, a.v)}; }
inline vf keep_first(vf a, vf otherwise, int n) { return {_mm512_mask_blend_ps(first(n), otherwise.v, a.v)}; }
inline vf canonical(vf a) {
  return from_bits(_mm512_mask_set1_epi32(bits(a), _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), 0x7fc00000));
}
// 2^n where a = n + 12582912: n sits in the low mantissa bits.
inline vf exponent_of(vf a) {
  return from_bits(_mm512_add_epi32(_mm512_slli_epi32(bits(a), 23), _mm512_set1_epi32(0x3f800000)));
}

inline __m512i rounded_high_half(vf a) {
  __m512i x = bits(a);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
  __m512i sum = _mm512_add_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(0x7fff)), odd);
  return _mm512_mask_set1_epi32(sum, _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), 0x7fc00000);
}
inline vf round_bf16(vf a) {
  return from_bits(_mm512_and_si512(rounded_high_half(a), _mm512_set1_epi32(int(0xffff0000u))));
}
inline void store_bf16(uint16_t* p, vf a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_high_half(a), 16)));
}
inline void store_bf16(uint16_t* p, vf a, int n) {
  _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_high_half(a), 16)));
}

// Lane i of the result is lane i^1, i^2, i^4, i^8.
inline vf swap1(vf a) { return {_mm512_permute_ps(a.v, 0xb1)}; }
inline vf swap2(vf a) { return {_mm512_permute_ps(a.v, 0x4e)}; }
inline vf swap4(vf a) { return {_mm512_shuffle_f32x4(a.v, a.v, 0xb1)}; }
inline vf swap8(vf a) { return {_mm512_shuffle_f32x4(a.v, a.v, 0x4e)}; }
// Per group of four lanes: {a0, a2, b0, b2} and {a1, a3, b1, b3}.
inline vf evens(vf a, vf b) { return {_mm512_shuffle_ps(a.v, b.v, 0x88)}; }
inline vf odds(vf a, vf b) { return {_mm512_shuffle_ps(a.v, b.v, 0xdd)}; }
inline float lane0(vf a) { return _mm512_cvtss_f32(a.v); }

// Low halves of even above the low halves of odd: one packed row out of two widened ones.
inline vf interleaved(vf even, vf odd) {
  return from_bits(_mm512_or_si512(bits(odd), _mm512_srli_epi32(bits(even), 16)));
}

// 16 x 16 words: r[i] lane j <-> r[j] lane i.
inline void transpose(vf* r) {
  __m512 t[16];
  for (int i = 0; i < 16; i += 4) {
    __m512 a = _mm512_unpacklo_ps(r[i].v, r[i + 1].v), b = _mm512_unpackhi_ps(r[i].v, r[i + 1].v);
    __m512 c = _mm512_unpacklo_ps(r[i + 2].v, r[i + 3].v), d = _mm512_unpackhi_ps(r[i + 2].v, r[i + 3].v);
    t[i] = _mm512_shuffle_ps(a, c, 0x44), t[i + 1] = _mm512_shuffle_ps(a, c, 0xee);
    t[i + 2] = _mm512_shuffle_ps(b, d, 0x44), t[i + 3] = _mm512_shuffle_ps(b, d, 0xee);
  }
  // Lane group g of t[4q + i] holds column 4g + i of rows 4q .. 4q + 3.
  for (int i = 0; i < 4; ++i) {
    __m512 a = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88), b = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x88);
    __m512 c = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd), d = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xdd);
    r[i].v = _mm512_shuffle_f32x4(a, b, 0x88), r[i + 8].v = _mm512_shuffle_f32x4(a, b, 0xdd);
    r[i + 4].v = _mm512_shuffle_f32x4(c, d, 0x88), r[i + 12].v = _mm512_shuffle_f32x4(c, d, 0xdd);
  }
}

inline float fma1(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }

// Register block of the tile: vectors -> rows.
constexpr int kMaxVectors = 4;
constexpr int block_rows(int vectors) { return vectors == 4 ? 6 : 8; }

}  // namespace
