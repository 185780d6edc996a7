// The packed form of a right-hand operand b(k, n): panels of 48 columns; in a panel, row p holds k = 2p and 2p+1 of
// each column in one 32-bit word (low half the even k). One load then brings two k of sixteen columns, and widening
// is a shift and a mask. Columns past n are zero and never stored; the odd half of a last lone k is never read.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace cpu {

inline int64_t panels_of(int64_t n) { return (n + kPanel - 1) / kPanel; }
inline int64_t pairs_of(int64_t k) { return (k + 1) / 2; }
inline int64_t packed_words(int64_t n, int64_t k) { return panels_of(n) * pairs_of(k) * kPanel; }

// b(k, n) = w[n*ldw + k]: a weight as it is stored, for the forward product.
void pack_rows(uint32_t* out, const bf16* w, int64_t n, int64_t k, int64_t ldw, int threads);
// b(k, n) = w[k*ldw + n]: the same weight, or activations, for the gradients.
void pack_columns(uint32_t* out, const bf16* w, int64_t n, int64_t k, int64_t ldw, int threads);
// The inverse of pack_rows, for whoever must show what the engine holds.
void unpack_rows(bf16* w, const uint32_t* panels, int64_t n, int64_t k, int threads);

}  // namespace cpu
