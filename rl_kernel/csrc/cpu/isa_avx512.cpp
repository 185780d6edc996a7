#include "vec_avx512.h"
// vec_avx512.h comes first: the kernels are written on its type.
#include "kernel_exp.h"
#include "kernel_tile.h"

namespace cpu {
const Kernels kAvx512 = RL_KERNEL_TABLE("avx512");
}
