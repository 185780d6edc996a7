// Causal attention over sequences of any length, forward and backward.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace cpu {

// Rows of keys (or values) of one kv head: contiguous, or in the blocks of a paged cache.
struct KvRows {
  const bf16* base;
  int64_t token;                   // elements between neighbouring tokens
  const int32_t* table = nullptr;  // block numbers of this sequence; null: contiguous
  int64_t block_size = 1;          // tokens of a cache block
  int64_t block = 0;               // elements between cache blocks

  // rows[i] <- token first + i, for i < n. One division for all of them: it costs as much as a row's arithmetic.
  void rows(const bf16** rows, int64_t first, int64_t n) const {
    int64_t number = table ? first / block_size : 0, at = table ? first % block_size : first;
    for (int64_t i = 0; i < n; ++number, at = 0) {
      const bf16* p = base + (table ? table[number] * block : 0) + at * token;
      for (const int64_t end = table ? i + block_size - at : n; i < n && i < end; ++i, p += token) rows[i] = p;
    }
  }
};

// Strides are in elements; the last dimension is contiguous and heads follow each other `dim` apart.
struct Attention {
  int64_t heads, kv_heads, dim, sequences;
  const bf16* q;
  int64_t q_token;
  KvRows k, v;              // of kv head 0; `table` is the table of sequence 0, or null
  int64_t table_row = 0;    // entries between the tables of two sequences
  const int32_t* cu_q;      // [sequences + 1]
  const int32_t* cu_k;      // [sequences + 1] offsets into k and v; null when paged
  const int32_t* seq_lens;  // [sequences] keys of each sequence; null when contiguous
  float scale;              // fp32(log2(e) / sqrt(dim))
  int64_t kv_partial;
  bf16* out;           // [T, heads, dim]
  float* m = nullptr;  // [T, heads], both or neither
  float* l = nullptr;
};

void attention(const Attention& args, int threads);

struct AttentionBackward {
  int64_t heads, kv_heads, dim, sequences;
  const bf16 *dout, *q, *k, *v, *out;  // tokens dout_token, … apart
  int64_t dout_token, q_token, k_token, v_token, out_token;
  const float *m, *l;  // [T, heads]
  const int32_t* cu;   // [sequences + 1]
  float score_scale;   // fp32(log2(e) / sqrt(dim))
  float scale;         // fp32(1 / sqrt(dim))
  bf16 *dq, *dk, *dv;  // contiguous
};

void attention_backward(const AttentionBackward& args, int threads);

// Whether any of n values is infinite or NaN.
bool any_nonfinite(const bf16* x, int64_t n);

}  // namespace cpu
