// Bindings of the CPU backend. Tensors arrive as addresses: rl_kernel/ops/<op>/cpu.py has checked shape, dtype and
// layout, and a capsule for each tensor would cost more than a decode step's small ops. What only the values can
// show (ids, positions, offsets) is checked here.
#pragma once
#include <nanobind/nanobind.h>

#include <stdexcept>
#include <string>

#include "kernels.h"

namespace cpu {

namespace nb = nanobind;
using Address = uintptr_t;
using Release = nb::call_guard<nb::gil_scoped_release>;

template <class T>
T* at(Address a) {
  return reinterpret_cast<T*>(a);
}

struct BadArgument : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void require_range(const int64_t* values, int64_t n, int64_t end, const char* what) {
  for (int64_t i = 0; i < n; ++i)
    if (values[i] < 0 || values[i] >= end)
      throw BadArgument(std::string(what) + "[" + std::to_string(i) + "] is " + std::to_string(values[i]) +
                        "; it must lie in [0, " + std::to_string(end) + ")");
}

inline void require_offsets(const int32_t* cu, int64_t sequences, int64_t total, const char* what) {
  if (cu[0] != 0 || cu[sequences] != total)
    throw BadArgument(std::string(what) + " must run from 0 to " + std::to_string(total) + "; it runs from " +
                      std::to_string(cu[0]) + " to " + std::to_string(cu[sequences]));
  for (int64_t r = 0; r < sequences; ++r)
    if (cu[r + 1] < cu[r]) throw BadArgument(std::string(what) + " decreases at sequence " + std::to_string(r));
}

inline void require_lengths(int64_t r, int64_t queries, int64_t keys) {
  if (queries > keys)
    throw BadArgument("sequence " + std::to_string(r) + " has " + std::to_string(queries) + " queries but only " +
                      std::to_string(keys) + " keys");
}

void bind_gemm(nb::module_& m);
void bind_rows(nb::module_& m);
void bind_attention(nb::module_& m);
void bind_vocab(nb::module_& m);

}  // namespace cpu
