// Everything that an isa_*.cpp compiles for its instruction set, and the table of it.
#pragma once
#include "kernel_exp.h"
#include "kernel_pack.h"
#include "kernel_tile.h"

// clang-format off
#define RL_KERNEL_TABLE(NAME) { \
  .name = NAME, \
  .tile = ::tile, \
  .tile_unpacked = ::tile_unpacked, \
  .pack_rows = ::pack_rows, \
  .pack_columns = ::pack_columns, \
  .widen = ::widen, \
  .narrow = ::narrow, \
  .canonical = ::canonical_row, \
  .add = ::add_row, \
  .add_bf16 = ::add_bf16, \
  .accumulate_bf16 = ::accumulate_bf16, \
  .add_zero_scale = ::add_zero_scale, \
  .rms_norm = ::rms_norm, \
  .rms_norm_dx = ::rms_norm_dx, \
  .rms_norm_dw = ::rms_norm_dw, \
  .rope = ::rope, \
  .swiglu = ::swiglu, \
  .swiglu_backward = ::swiglu_backward, \
  .softmax_block = ::softmax_block, \
  .row_sums = ::row_sums, \
  .scale = ::scale_row, \
  .merge = ::merge_row, \
  .divide = ::divide_row, \
  .exp2 = ::exp2_one, \
  .ln = ::ln_one, \
  .lane_dot = ::lane_dot, \
  .attention_gradient = ::attention_gradient, \
  .vocab_tiles = ::vocab_tiles, \
  .merge_tiles = ::merge_tiles, \
  .add_zero = ::add_zero, \
  .logit_gradient = ::logit_gradient, \
}
