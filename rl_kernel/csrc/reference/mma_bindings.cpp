// The MMA models on their own, for the tests of their arithmetic.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "arrays.h"

namespace ref {
namespace {

float widen_fp16(uint16_t x) {
  int exponent = (x >> 10) & 31, fraction = x & 1023;
  float magnitude = exponent == 31 ? (fraction ? NAN : INFINITY)
                    : exponent    ? std::ldexp(float(1024 + fraction), exponent - 25)
                                  : std::ldexp(float(fraction), -24);
  return std::copysign(magnitude, x >> 15 ? -1.0f : 1.0f);
}

// c[M,N] <- chains from c over a[M,K]*b[K,N]; a and b are bit patterns of bf16, or of fp16.
void accumulate_bits(Out<float, 2> c, In<uint16_t, 2> a, In<uint16_t, 2> b, const std::string& model, bool fp16) {
  int64_t m = c.shape(0), n = c.shape(1), k = a.shape(1);
  require(int64_t(a.shape(0)) == m && int64_t(b.shape(0)) == k && int64_t(b.shape(1)) == n,
          "accumulate: c[M,N], a[M,K], b[K,N]");
  auto wide = [=](const uint16_t* x, int64_t count) {
    std::vector<float> out(count);
    for (int64_t i = 0; i < count; ++i) out[i] = fp16 ? widen_fp16(x[i]) : widen(x[i]);
    return out;
  };
  std::vector<float> wide_a = wide(a.data(), m * k), wide_b = wide(b.data(), k * n);
  accumulate(mma_model(model, fp16 ? Operand::fp16 : Operand::bf16), c.data(), n, wide_a.data(), k, wide_b.data(), n,
             m, n, k);
}

}  // namespace

void bind_mma(nb::module_& module) {
  module.def("accumulate", &accumulate_bits);
  module.def("mma_models", [] {
    std::vector<std::tuple<std::string, int, int, int>> models;
    for (const Mma& model : mma_models()) models.emplace_back(model.name, model.group, model.fraction, model.lowest);
    return models;
  }, "(name, group, fraction bits, lowest exponent) of every MMA model; `rl_kernel.contract.MMA_MODELS` must say the same.");
}

}  // namespace ref
