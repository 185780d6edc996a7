"""The temperature that each row of a step is sampled at: one launch a step, where torch takes three."""

import torch
import triton
import triton.language as tl

from rl_kernel.ops.accelerator import cdiv

BLOCK = 128


@triton.jit(do_not_specialize=["rows"])
def row_temperatures_kernel(out, asked, request, rows, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """BLOCK rows a program."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    temperature = tl.load(asked + tl.load(request + row, mask=row < rows, other=0))
    tl.store(out + row, tl.where(temperature == 0.0, 1.0, temperature), mask=row < rows)


def row_temperatures(asked: torch.Tensor, request: torch.Tensor) -> torch.Tensor:
    """asked[requests] fp32, request[R] int32: whose each row is → fp32 [R], 1 where a request is greedy."""
    rows = request.shape[0]
    found = torch.empty(rows, dtype=torch.float32, device=request.device)
    if rows:
        row_temperatures_kernel[(cdiv(rows, BLOCK),)](found, asked, request, rows, BLOCK=BLOCK, num_warps=4)
    return found
