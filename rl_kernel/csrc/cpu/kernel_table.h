// Everything that an isa_*.cpp compiles for its instruction set, and the table of it.
#pragma once
#include "kernel_exp.h"
#include "kernel_pack.h"
#include "kernel_tile.h"

#define RL_KERNEL_TABLE(NAME)                                                                                         \
  {NAME,                                                                                                              \
   tile, tile_unpacked, pack_rows, pack_columns,                                                                      \
   widen, narrow, canonical_row, add_row, add_bf16, accumulate_bf16, add_zero_scale,                                  \
   rms_norm, rms_norm_dx, rms_norm_dw, rope, swiglu, swiglu_backward,                                                 \
   softmax_block, row_sums, scale_row, merge_row, divide_row, exp2_one, ln_one, lane_dot, attention_gradient,         \
   vocab_tiles, merge_tiles, add_zero, logit_gradient}
