"""What Triton kernels of rows do on Hopper only: launches that overlap, and values held two a register.

A kernel launched with `**HOPPER` is a dependent launch (`dependent_launch`). Kernels of many short programs lose by it,
since each of them waits anew: they take `**PLAIN`.
"""

from typing import Any

import triton
import triton.language as tl

from rl_kernel.ops.accelerator import EX2
from rl_kernel.ops.dependent_launch import DEPENDENT, announce, await_before

PLAIN: dict[str, Any] = {"HOPPER": False}
HOPPER: dict[str, Any] = {"HOPPER": EX2, **DEPENDENT}


@triton.jit
def begin(HOPPER: tl.constexpr):  # type: ignore[no-untyped-def]
    """First of all, before anything touches memory."""
    if HOPPER:
        announce()
        await_before()


@triton.jit
def held(x, HOPPER: tl.constexpr):  # type: ignore[no-untyped-def]
    """x, bf16, itself; the compiler forgets its fp32 form, which would hold a register for each value until later."""
    if HOPPER:
        two = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x.to(tl.int16, bitcast=True)], dtype=tl.int16, is_pure=False, pack=2
        )
        return two.to(tl.bfloat16, bitcast=True)
    else:
        return x
