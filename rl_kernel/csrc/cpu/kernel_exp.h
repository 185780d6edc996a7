// The loops around exp2: attention's softmax and its gradient, and the statistics of vocabulary tiles.
#pragma once
#include "kernel_rows.h"

namespace {

constexpr int kVectors = cpu::kBlock / cpu::kLanes;

// Lanes of vector v that lie below `count`.
inline int lanes_below(int count, int v) {
  int n = count - v * int(L);
  return n < 0 ? 0 : n > int(L) ? int(L) : n;
}

float softmax_block(float* s, int visible, float scale, float* m) {
  vf z[kVectors], top = set1(kMinusInf);
  for (int v = 0; v < kVectors; ++v) {
    z[v] = mul(load(s + v * L), set1(scale));
    top = max_num(top, keep_first(z[v], set1(kMinusInf), lanes_below(visible, v)));
  }
  const float old = *m, seen = max_lane(top);
  float now = old < seen ? seen : old;
  if (seen == 0.0f && old < 0.0f) {
    for (int v = 0; v < kVectors; ++v) store(s + v * L, z[v]);
    now = first_zero(s, visible);
  }
  for (int v = 0; v < kVectors; ++v) {
    vf p = round_bf16(exp2(sub(z[v], set1(now))));
    store(s + v * L, keep_first(p, set1(0.0f), lanes_below(visible, v)));
  }
  *m = now;
  return exp2(old - now);
}

// Rows side by side: one row alone would wait for each addition before the next.
template <int ROWS>
inline void row_sums_of(float* l, const float* alpha, const float* p) {
  float sum[ROWS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) sum[r] = l[r] * alpha[r];
  for (int j = 0; j < cpu::kBlock; ++j) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) sum[r] += p[r * cpu::kBlock + j];
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) l[r] = sum[r];
}
void row_sums(float* l, const float* alpha, const float* p, int64_t rows) {
  int64_t r = 0;
  for (; r + 8 <= rows; r += 8) row_sums_of<8>(l + r, alpha + r, p + r * cpu::kBlock);
  for (; r + 3 <= rows; r += 3) row_sums_of<3>(l + r, alpha + r, p + r * cpu::kBlock);
  for (; r < rows; ++r) row_sums_of<1>(l + r, alpha + r, p + r * cpu::kBlock);
}

void attention_gradient(float* s, float* dp, int visible, float scale, float m, float r, float delta) {
  for (int v = 0; v < kVectors; ++v) {
    const int n = lanes_below(visible, v);
    vf p = mul(exp2(sub(mul(load(s + v * L), set1(scale)), set1(m))), set1(r));
    vf ds = mul(p, sub(load(dp + v * L), set1(delta)));
    store(s + v * L, keep_first(round_bf16(p), set1(0.0f), n));
    store(dp + v * L, keep_first(round_bf16(ds), set1(0.0f), n));
  }
}

// What to subtract in an exponent: a sampler may have set a whole tile to -inf, and -inf - -inf is NaN.
inline float shift(float top) { return top == kMinusInf ? 0.0f : top; }

struct statistics {
  float m, s;
};
// FULL: all 64 ids count. HOT: the temperature is not 1 (dividing by 1 changes no bit but takes time).
template <bool FULL, bool HOT>
inline statistics vocab_tile(const float* logits, int present, float temperature) {
  vf z[kVectors], top = set1(kMinusInf);
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const int n = FULL ? int(L) : lanes_below(present, v);
    z[v] = n == 0 ? set1(kMinusInf) : load32(logits + v * L, n);
    if (HOT) z[v] = div(z[v], set1(temperature));
    if (!FULL) z[v] = keep_first(z[v], set1(kMinusInf), n);
    top = max_num(top, z[v]);
  }
  float m = max_lane(top);
  if (m == 0.0f) {
    float flat[cpu::kBlock];
    for (int v = 0; v < kVectors; ++v) store(flat + v * L, z[v]);
    m = first_zero(flat, present);
  }
  const vf by = set1(shift(m)), log2e = set1(kLog2e);
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    z[v] = exp2(mul(sub(z[v], by), log2e));
    if (!FULL) z[v] = keep_first(z[v], set1(0.0f), lanes_below(present, v));
  }
  return {m, lane0(tree(z, kVectors))};
}

template <bool HOT>
void tiles_of(float* m, float* s, const float* logits, int64_t tiles, int64_t present, float temperature) {
  for (int64_t i = 0; i < tiles; ++i, logits += cpu::kBlock, present -= cpu::kBlock) {
    const statistics tile = present >= cpu::kBlock
                                ? vocab_tile<true, HOT>(logits, cpu::kBlock, temperature)
                                : vocab_tile<false, HOT>(logits, present < 0 ? 0 : int(present), temperature);
    m[i] = tile.m, s[i] = tile.s;
  }
}
void vocab_tiles(float* m, float* s, const float* logits, int64_t tiles, int64_t present, float temperature) {
  if (temperature == 1.0f)
    tiles_of<false>(m, s, logits, tiles, present, temperature);
  else
    tiles_of<true>(m, s, logits, tiles, present, temperature);
}

// One merge is a chain of two exp2, but both depend on maxima only: take the running maxima first, the exponentials
// sixteen at a time, and leave one multiplication and one addition in the chain.
void merge_tiles(const float* m, const float* s, int64_t count, float* top, float* sum) {
  float before[L], after[L], a[L], b[L];
  for (int64_t i = 0; i < count; i += L) {
    const int n = int(count - i < L ? count - i : L);
    for (int j = 0; j < n; ++j) {
      before[j] = *top;
      *top = (m[i + j] > *top || *top != *top) ? m[i + j] : *top;
      after[j] = shift(*top);
    }
    const vf by = load32(after, n), log2e = set1(kLog2e);
    store(a, exp2(mul(sub(load32(before, n), by), log2e)));
    store(b, mul(load32(s + i, n), exp2(mul(sub(load32(m + i, n), by), log2e))));
    for (int j = 0; j < n; ++j) *sum = *sum * a[j] + b[j];
  }
}

void logit_gradient(bf16* d, const float* logits, int64_t n, int64_t target, float temperature, float lse, float c) {
  const vf heat = set1(temperature), by = set1(lse), log2e = set1(kLog2e), cv = set1(c);
  vectors_of(n, [=](int64_t i, int w) {
    vf p = exp2(mul(sub(div(load32(logits + i, w), heat), by), log2e));
    float hot[L] = {};
    if (target >= i && target < i + w) hot[target - i] = 1.0f;
    store16(d + i, mul(sub(load(hot), p), cv), w);
  });
}

float exp2_one(float x) { return exp2(x); }
float ln_one(float x) { return ln(x); }

}  // namespace
