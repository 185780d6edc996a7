// Log-probabilities over a vocabulary in tiles of 64 ids.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace cpu {

inline int64_t tiles_of(int64_t ids) { return (ids + kBlock - 1) / kBlock; }

// logits[rows][ld] of the ids vocab_start .. vocab_start + width. m, s: [rows][ld_stats].
void vocab_stats(float* m, float* s, int64_t ld_stats, const float* logits, int64_t ld, const float* temperature,
                 int64_t rows, int64_t width, int64_t vocab_start, int64_t vocab, int threads);
void merge_vocab_stats(float* lse, const float* m, const float* s, int64_t rows, int64_t tiles, int threads);
// logp[rows][ids_per_row], lse[rows].
void logp_from_logits(float* logp, float* lse, const float* logits, int64_t width, const int64_t* ids,
                      int64_t ids_per_row, const float* temperature, int64_t rows, int64_t vocab, int threads);

// The head: hidden states h[rows][k] (rows `ldh` apart) against the weights w[width][k] of the ids from vocab_start on.
struct Head {
  const bf16* h;
  int64_t ldh, rows, k;
  const bf16* w;           // natural layout; null if `panels` is given
  const uint32_t* panels;  // pack_rows(w); null: packed here, a stretch at a time
  const int64_t* target;   // [rows] absolute ids
  float temperature;
  int64_t width, vocab_start, vocab;
};

// m, s: [rows][tiles_of(width)]; z[rows] the target's logit / temperature, -inf where another shard owns the target.
void linear_vocab_stats(float* m, float* s, float* z, const Head& head, int threads);
// dh[rows][k] as bf16 or fp32 (the other null); main_grad[width][k] continues, or null.
void linear_logp_backward(bf16* dh16, float* dh32, float* main_grad, const Head& head, const float* dlogp,
                          const float* lse, int64_t segments, int threads);

float canonical(float x);

}  // namespace cpu
