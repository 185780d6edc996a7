#include "vec_avx2.h"
// vec_avx2.h comes first: the kernels are written on its type.
#include "kernel_exp.h"
#include "kernel_tile.h"

namespace cpu {
const Kernels kAvx2 = RL_KERNEL_TABLE("avx2");
}
