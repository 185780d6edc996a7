#include "vec_plain.h"
// vec_plain.h comes first: the kernels are written on its type.
#include "kernel_exp.h"
#include "kernel_tile.h"

namespace cpu {
const Kernels kPlain = RL_KERNEL_TABLE("plain");
}
