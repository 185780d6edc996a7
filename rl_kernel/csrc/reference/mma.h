// The one matrix primitive of the reference. Every matrix product of every op goes through `accumulate`.
#pragma once
#include <cstdint>
#include <string>

namespace ref {

enum class Mma { fma32 };
Mma mma_model(const std::string& name);  // throws std::invalid_argument

// c[i][j] <- the MMA model's chain that starts from c[i][j] and takes a[i][p]*b[p][j], p ascending.
// fp32 arrays (widened bf16), row strides lda, ldb, ldc; a is m×k, b is k×n.
void accumulate(Mma model, float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t m,
                int64_t n, int64_t k);

}  // namespace ref
