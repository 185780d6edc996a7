// Array types of the bindings: C-contiguous CPU arrays; bf16 travels as uint16 bit patterns.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <vector>

#include "exp2.h"
#include "mma.h"
#include "scalar.h"

namespace ref {
namespace nb = nanobind;

template <class T, int N>
using In = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <class T, int N>
using Out = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

inline void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

inline std::vector<float> widened(const bf16* x, int64_t n) {
  std::vector<float> out(n);
  for (int64_t i = 0; i < n; ++i) out[i] = widen(x[i]);
  return out;
}

void bind_mma(nb::module_&);
void bind_exp2(nb::module_&);
void bind_gemm(nb::module_&);
void bind_norm(nb::module_&);
void bind_elementwise(nb::module_&);
void bind_attention(nb::module_&);
void bind_attention_backward(nb::module_&);
void bind_logp(nb::module_&);

}  // namespace ref
