// clang-format off: the kernels are written on the vector type, which comes first.
#include "vec_avx2.h"
#include "kernel_table.h"

namespace cpu {
const Kernels kAvx2 = RL_KERNEL_TABLE("avx2");
}
