// clang-format off: the kernels are written on the vector type, which comes first.
#include "vec_plain.h"
#include "kernel_table.h"

namespace cpu {
const Kernels kPlain = RL_KERNEL_TABLE("plain");
}
