// The table of MMA models, and which kernel serves a call.
#include "mma.h"

#include <stdexcept>

#include "mma_law.h"

namespace ref {

bool force_plain_mma = false;

const std::vector<Mma>& mma_models() {
  using enum Mma::Rule;
  static const std::vector<Mma> models = {
      {"fma32", fma32, 1, 0, 0, -126},
      {"sm80", truncated, 8, 24, -132, -126},
      {"sm90", truncated, 16, 25, -133, -126},
      {"sm100", truncated, 16, 25, -133, -126},
      {"cdna3", cdna3, 8, 24, -126, -126},
  };
  return models;
}

Mma mma_model(const std::string& name, Operand operand) {
  std::string known;
  for (Mma model : mma_models()) {
    if (name == model.name) {
      if (operand == Operand::fp16) model.min_exponent = -14;
      return model;
    }
    known += std::string(known.empty() ? "" : ", ") + model.name;
  }
  throw std::invalid_argument("the reference has no MMA model '" + name + "'; it has: " + known);
}

void accumulate(const Mma& model, float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb,
                int64_t m, int64_t n, int64_t k) {
  if (model.rule == Mma::Rule::fma32) return accumulate_fma32(c, ldc, a, lda, b, ldb, m, n, k);
  static const bool vector = has_avx512_mma();
  (vector && !force_plain_mma ? accumulate_avx512 : accumulate_law)(model, c, ldc, a, lda, b, ldb, m, n, k);
}

void accumulate_law(const Mma& model, float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb,
                    int64_t m, int64_t n, int64_t k) {
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j)
      for (int64_t p = 0; p < k; p += model.group) {
        float& acc = c[i * ldc + j];
        acc = step(model, acc, a + i * lda + p, b + p * ldb + j, ldb, std::min<int64_t>(model.group, k - p));
      }
}

}  // namespace ref
