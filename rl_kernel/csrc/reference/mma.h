// The one matrix primitive of the reference. Every matrix product of every op goes through `accumulate`.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace ref {

enum class Operand { bf16, fp16 };

// One MMA model, as data. `rule` names the law of a step: in mma_fma32.cpp, or in mma_law.h.
struct Mma {
  enum class Rule { fma32, truncated, cdna3 };
  const char* name;
  Rule rule;
  int group;         // products that one step adds at once
  int fraction;      // fractional bits at which aligned products are cut; 0 for fma32
  int lowest;        // smallest exponent that products and acc are aligned to together
  int min_exponent;  // smallest normal exponent of the operands' type; a subnormal operand counts with it
};

Mma mma_model(const std::string& name, Operand operand = Operand::bf16);  // throws std::invalid_argument
const std::vector<Mma>& mma_models();                                     // with bf16 operands

// c[i][j] <- the MMA model's chain that starts from c[i][j] and takes a[i][p]*b[p][j], p ascending, in groups of
// `model.group` from p = 0; the last group is filled up with +0 * +0.
// fp32 arrays (widened operands), row strides lda, ldb, ldc; a is m×k, b is k×n.
void accumulate(const Mma& model, float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb,
                int64_t m, int64_t n, int64_t k);

extern bool force_plain_mma;  // the law's own loops everywhere, for tests

// The kernels behind `accumulate`, one file each. `accumulate_law` is the law; the vector ones have its bits.
void accumulate_fma32(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t m,
                      int64_t n, int64_t k);
void accumulate_law(const Mma& model, float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb,
                    int64_t m, int64_t n, int64_t k);
void accumulate_avx512(const Mma& model, float* c, int64_t ldc, const float* a, int64_t lda, const float* b,
                       int64_t ldb, int64_t m, int64_t n, int64_t k);
bool has_avx512_mma();

}  // namespace ref
