// clang-format off: the kernels are written on the vector type, which comes first.
#include "vec_avx512.h"
#include "kernel_table.h"

namespace cpu {
const Kernels kAvx512 = RL_KERNEL_TABLE("avx512");
}
