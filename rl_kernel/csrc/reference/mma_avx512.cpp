// The grouped MMA models with the law's bits, 32 output columns at a time.
//
// A product of two bf16 or fp16 numbers is one exact fp32 multiplication, and cutting it at the group's exponent is
// one conversion to int32, as long as exponents stay inside [kLow, kHigh]. A lane outside that range, or one whose
// integer sum overflows, is worked out again by the law itself.
#include "mma_law.h"

#if defined(__x86_64__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false in GCC 12's own intrinsics (GCC bug 105593)
#include <immintrin.h>
#endif

namespace ref {

#if defined(__x86_64__)
namespace {

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))

constexpr int64_t kColumns = 32, kDepth = 128;  // of a panel; they change no bit
constexpr int kLow = -90, kHigh = 120;
constexpr int kZero = -4000, kSpecial = 8000;  // stand-ins for the exponent of 0, and of an infinity or NaN

// kDepth rows (zero-filled) of 32 columns of b, and kDepth columns of some rows of a, with their exponents.
struct Panel {
  alignas(64) float value[kDepth * kColumns];
  alignas(64) int16_t exponent[kDepth * kColumns];
};
struct Rows {
  alignas(64) float value[4 * kDepth];
  alignas(64) int32_t exponent[4 * kDepth];  // in both halves of the int32
};
struct Columns {
  __mmask16 mask[2];  // which of the 32 exist
};

AVX512 inline __m512i exponents(__m512 x, int min_exponent) {
  __m512i bits = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
  __m512i e = _mm512_sub_epi32(_mm512_srli_epi32(bits, 23), _mm512_set1_epi32(127));
  __mmask16 special = _mm512_cmpeq_epi32_mask(e, _mm512_set1_epi32(128));
  e = _mm512_max_epi32(e, _mm512_set1_epi32(min_exponent));
  e = _mm512_mask_mov_epi32(e, special, _mm512_set1_epi32(kSpecial));
  return _mm512_mask_mov_epi32(e, _mm512_testn_epi32_mask(bits, bits), _mm512_set1_epi32(kZero));
}

AVX512 void load_panel(Panel& panel, const float* b, int64_t ldb, int64_t depth, int64_t padded, Columns columns,
                       int min_exponent) {
  for (int64_t p = 0; p < padded; ++p)
    for (int v = 0; v < 2; ++v) {
      __m512 x = p < depth ? _mm512_maskz_loadu_ps(columns.mask[v], b + p * ldb + 16 * v) : _mm512_setzero_ps();
      _mm512_store_ps(panel.value + p * kColumns + 16 * v, x);
      _mm256_store_si256(reinterpret_cast<__m256i*>(panel.exponent + p * kColumns + 16 * v),
                         _mm512_cvtepi32_epi16(exponents(x, min_exponent)));
    }
}

AVX512 void load_rows(Rows& rows, const float* a, int64_t lda, int64_t count, int64_t depth, int64_t padded,
                      int min_exponent) {
  for (int64_t r = 0; r < count; ++r)
    for (int64_t p = 0; p < padded; p += 16) {
      int64_t left = std::clamp<int64_t>(depth - p, 0, 16);
      __m512 x = _mm512_maskz_loadu_ps(__mmask16((1u << left) - 1), a + r * lda + p);
      __m512i e = _mm512_and_si512(exponents(x, min_exponent), _mm512_set1_epi32(0xffff));
      _mm512_store_ps(rows.value + r * kDepth + p, x);
      _mm512_store_si512(rows.exponent + r * kDepth + p, _mm512_or_si512(e, _mm512_slli_epi32(e, 16)));
    }
}

AVX512 inline __m512 power_of_two(__m512i e) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(e, _mm512_set1_epi32(127)), 23));
}

AVX512 inline __m512i clamp_exponent(__m512i e) {
  return _mm512_min_epi32(_mm512_max_epi32(e, _mm512_set1_epi32(kLow)), _mm512_set1_epi32(kHigh));
}

// Exponent of acc; for a zero or subnormal, whose exponent is below kLow either way, -127.
AVX512 inline __m512i accumulator_exponent(__m512 acc) {
  __m512i biased = _mm512_and_si512(_mm512_srli_epi32(_mm512_castps_si512(acc), 23), _mm512_set1_epi32(0xff));
  return _mm512_sub_epi32(biased, _mm512_set1_epi32(127));
}

// Every product of the lane is zero.
AVX512 inline __mmask16 no_product(__m512i top) {
  return _mm512_cmplt_epi32_mask(top, _mm512_set1_epi32(kZero / 2));
}

// What a rule does with 16 lanes. `top`: the largest exponent of the lane's products, far below kLow if all are zero.
// alignment: the exponent that the products are cut at; finish: their integer sum and acc become the next acc.
// `outside` collects the lanes that the law must work out.
template <int FRACTION>
struct Truncated {
  static constexpr int fraction = FRACTION;

  AVX512 static __m512i alignment(__m512i top, __m512 acc, __mmask16& outside) {
    __m512i e = _mm512_max_epi32(top, accumulator_exponent(acc)), inside = clamp_exponent(e);
    __mmask16 nothing = no_product(top) & _mm512_cmpeq_ps_mask(acc, _mm512_setzero_ps());
    outside = _mm512_cmpneq_epi32_mask(e, inside) & ~nothing;
    return inside;
  }

  AVX512 static __m512 finish(__m512i sum, __m512i aligned, __m512 acc, __mmask16& outside) {
    __m512 scale = power_of_two(_mm512_sub_epi32(_mm512_set1_epi32(FRACTION), aligned));
    __m512i start = _mm512_cvttps_epi32(_mm512_mul_ps(acc, scale)), total = _mm512_add_epi32(sum, start);
    // Overflow: both terms of one sign and the total of the other.
    outside |= _mm512_movepi32_mask(_mm512_ternarylogic_epi32(sum, start, total, 0x42));
    __m512 kept = _mm512_cvt_roundepi32_ps(total, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
    return _mm512_mul_ps(kept, power_of_two(_mm512_sub_epi32(aligned, _mm512_set1_epi32(FRACTION))));
  }
};

struct Cdna3 {
  static constexpr int fraction = 24;

  AVX512 static __m512i alignment(__m512i top, __m512 acc, __mmask16& outside) {
    __m512i e = accumulator_exponent(acc), inside = clamp_exponent(top);
    __mmask16 none = no_product(top), tiny = _mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(kLow));
    outside = _mm512_cmpneq_epi32_mask(top, inside) & ~none;
    outside |= _mm512_cmpgt_epi32_mask(e, _mm512_set1_epi32(kHigh));
    outside |= none & tiny & _mm512_cmpneq_ps_mask(acc, _mm512_setzero_ps());
    return inside;
  }

  // The sum of products and acc meet as T + low/256 in units of 2^(both - 24), floored: T int32, low in [0, 255].
  AVX512 static __m512 finish(__m512i sum, __m512i aligned, __m512 acc, __mmask16&) {
    const __m512i zero = _mm512_setzero_si512(), eight = _mm512_set1_epi32(8);
    __m512i both = _mm512_max_epi32(aligned, accumulator_exponent(acc)), shift = _mm512_sub_epi32(both, aligned);
    __m512i up = _mm512_max_epi32(_mm512_sub_epi32(eight, shift), zero);
    __m512i down = _mm512_max_epi32(_mm512_sub_epi32(shift, eight), zero);
    __m512i low = _mm512_and_si512(_mm512_sllv_epi32(_mm512_srav_epi32(sum, down), up), _mm512_set1_epi32(255));
    __m512i t = _mm512_add_epi32(_mm512_srav_epi32(sum, shift), floor_of(acc, both));
    // 256 * (high + rest/256) is their sum in units of 2^(both - 32); both parts are exact in fp32.
    __m512 high = _mm512_cvtepi32_ps(_mm512_and_si512(t, _mm512_set1_epi32(~0xfff)));
    __m512i rest = _mm512_or_si512(_mm512_and_si512(_mm512_slli_epi32(t, 8), _mm512_set1_epi32(0xfff00)), low);
    rest = _mm512_and_si512(rest, _mm512_sllv_epi32(_mm512_set1_epi32(-1), dropped(high, rest)));
    __m512 rounded = _mm512_fmadd_ps(high, _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(rest));
    return _mm512_mul_ps(rounded, power_of_two(_mm512_sub_epi32(both, _mm512_set1_epi32(32))));
  }

  // acc in units of 2^(both - 24), rounded down; an acc that underflows in these units still is below zero, or not.
  AVX512 static __m512i floor_of(__m512 acc, __m512i both) {
    constexpr int kDown = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
    __m512 scale = power_of_two(_mm512_sub_epi32(_mm512_set1_epi32(24), both));
    return _mm512_cvt_roundps_epi32(_mm512_mul_round_ps(acc, scale, kDown), kDown);
  }

  // How many last bits of the sum lie beyond its 31 fractional ones. Cut toward zero, it keeps its exponent.
  AVX512 static __m512i dropped(__m512 high, __m512i rest) {
    __m512 sum = _mm512_fmadd_round_ps(high, _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(rest),
                                       _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
    return _mm512_max_epi32(_mm512_sub_epi32(accumulator_exponent(sum), _mm512_set1_epi32(31)), _mm512_setzero_si512());
  }
};

// The lanes of `outside`, by the law. a: one row's group; b: the group's rows of the panel, from the lanes' column on.
AVX512 __attribute__((noinline)) __m512 by_law(const Mma& model, __mmask16 outside, __m512 next, __m512 acc, const float* a, const float* b) {
  alignas(64) float lanes[16], starts[16];
  _mm512_store_ps(lanes, next);
  _mm512_store_ps(starts, acc);
  for (int j = 0; j < 16; ++j)
    if (outside >> j & 1) lanes[j] = step(model, starts[j], a, b + j, kColumns, model.group);
  return _mm512_load_ps(lanes);
}

// ROWS × 32 chains through all groups of a panel.
template <class Rule, int GROUP, int ROWS>
AVX512 void panel_chains(const Mma& model, float* c, int64_t ldc, const Rows& a, const Panel& b, int64_t padded,
                         Columns columns) {
  __m512 acc[ROWS][2];
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < 2; ++v) acc[r][v] = _mm512_maskz_loadu_ps(columns.mask[v], c + r * ldc + 16 * v);
  for (int64_t p0 = 0; p0 < padded; p0 += GROUP) {
    __m512i top[ROWS], aligned[ROWS][2], sum[ROWS][2];
    __m512 scale[ROWS][2];
    __mmask16 outside[ROWS][2];
    for (int r = 0; r < ROWS; ++r) top[r] = _mm512_set1_epi16(3 * kZero);
    for (int p = 0; p < GROUP; ++p) {
      __m512i e = _mm512_load_si512(b.exponent + (p0 + p) * kColumns);
      for (int r = 0; r < ROWS; ++r)
        top[r] = _mm512_max_epi16(top[r], _mm512_add_epi16(e, _mm512_set1_epi32(a.exponent[r * kDepth + p0 + p])));
    }
    for (int r = 0; r < ROWS; ++r)
      for (int v = 0; v < 2; ++v) {
        __m256i half = v ? _mm512_extracti64x4_epi64(top[r], 1) : _mm512_castsi512_si256(top[r]);
        aligned[r][v] = Rule::alignment(_mm512_cvtepi16_epi32(half), acc[r][v], outside[r][v]);
        scale[r][v] = power_of_two(_mm512_sub_epi32(_mm512_set1_epi32(Rule::fraction), aligned[r][v]));
        sum[r][v] = _mm512_setzero_si512();
      }
    for (int p = 0; p < GROUP; ++p)
      for (int v = 0; v < 2; ++v) {
        __m512 y = _mm512_load_ps(b.value + (p0 + p) * kColumns + 16 * v);
        for (int r = 0; r < ROWS; ++r) {
          __m512 exact = _mm512_mul_ps(_mm512_set1_ps(a.value[r * kDepth + p0 + p]), y);
          sum[r][v] = _mm512_add_epi32(sum[r][v], _mm512_cvttps_epi32(_mm512_mul_ps(exact, scale[r][v])));
        }
      }
    for (int r = 0; r < ROWS; ++r)
      for (int v = 0; v < 2; ++v) {
        __m512 next = Rule::finish(sum[r][v], aligned[r][v], acc[r][v], outside[r][v]);
        if (__mmask16 lanes = outside[r][v] & columns.mask[v])
          next = by_law(model, lanes, next, acc[r][v], a.value + r * kDepth + p0, b.value + p0 * kColumns + 16 * v);
        acc[r][v] = next;
      }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < 2; ++v) _mm512_mask_storeu_ps(c + r * ldc + 16 * v, columns.mask[v], acc[r][v]);
}

template <class Rule, int GROUP>
AVX512 void chains(const Mma& model, float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb,
                   int64_t m, int64_t n, int64_t k) {
  static thread_local Panel panel;
  static thread_local Rows rows;
  for (int64_t j = 0; j < n; j += kColumns) {
    uint32_t present = n - j >= kColumns ? 0xffffffffu : (1u << (n - j)) - 1;
    Columns columns{{__mmask16(present), __mmask16(present >> 16)}};
    for (int64_t p = 0; p < k; p += kDepth) {
      int64_t depth = std::min(kDepth, k - p), padded = (depth + GROUP - 1) / GROUP * GROUP;
      load_panel(panel, b + p * ldb + j, ldb, depth, padded, columns, model.min_exponent);
      for (int64_t i = 0; i < m; i += 4) {
        int64_t count = std::min<int64_t>(4, m - i);
        load_rows(rows, a + i * lda + p, lda, count, depth, padded, model.min_exponent);
        float* out = c + i * ldc + j;
        if (count == 4)
          panel_chains<Rule, GROUP, 4>(model, out, ldc, rows, panel, padded, columns);
        else if (count == 3)
          panel_chains<Rule, GROUP, 3>(model, out, ldc, rows, panel, padded, columns);
        else if (count == 2)
          panel_chains<Rule, GROUP, 2>(model, out, ldc, rows, panel, padded, columns);
        else
          panel_chains<Rule, GROUP, 1>(model, out, ldc, rows, panel, padded, columns);
      }
    }
  }
}

}  // namespace

bool has_avx512_mma() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

void accumulate_avx512(const Mma& model, float* c, int64_t ldc, const float* a, int64_t lda, const float* b,
                       int64_t ldb, int64_t m, int64_t n, int64_t k) {
  auto run = [&](auto kernel) { kernel(model, c, ldc, a, lda, b, ldb, m, n, k); };
  if (model.rule == Mma::Rule::cdna3) return run(chains<Cdna3, 8>);
  if (model.group == 8 && model.fraction == 24) return run(chains<Truncated<24>, 8>);
  if (model.group == 16 && model.fraction == 25) return run(chains<Truncated<25>, 16>);
  accumulate_law(model, c, ldc, a, lda, b, ldb, m, n, k);
}
#else
bool has_avx512_mma() { return false; }

void accumulate_avx512(const Mma& model, float* c, int64_t ldc, const float* a, int64_t lda, const float* b,
                       int64_t ldb, int64_t m, int64_t n, int64_t k) {
  accumulate_law(model, c, ldc, a, lda, b, ldb, m, n, k);
}
#endif

}  // namespace ref
