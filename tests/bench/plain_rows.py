"""The plainest kernel that moves given bytes: what memory allows a launch of that size, whatever it computes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from rl_kernel.ops.triton_hopper import HOPPER, PLAIN, begin

Op = Callable[..., object]
SHAPES = ((1024, 4), (2048, 8), (4096, 8))  # elements and warps of a program


@dataclass(frozen=True, slots=True)
class Streams:
    """How many bf16 arrays of `count` values an op reads and writes; tables and gains are left out."""

    reads: int
    writes: int
    count: int

    @property
    def moved(self) -> int:
        """Bytes."""
        return 2 * (self.reads + self.writes) * self.count


@triton.jit
def move_kernel(y, x, n, READS: tl.constexpr, WRITES: tl.constexpr, BLOCK: tl.constexpr, HOPPER: tl.constexpr):  # type: ignore[no-untyped-def]
    """y[WRITES,n] from x[READS,n]: -x, where nothing else is asked for. HOPPER: as a dependent launch."""
    begin(HOPPER)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = i < n
    first = tl.load(x + i, mask=here)
    second = tl.load(x + n + i, mask=here) if READS == 2 else first
    tl.store(y + i, -first if WRITES == 2 or READS == 1 else first + second, mask=here)
    if WRITES == 2:
        tl.store(y + n + i, -second, mask=here)


def plain(streams: Streams) -> list[Op]:
    """Ways to move the same bytes, of x[reads,count]; the fastest of them is the plainest kernel."""

    def moved(block: int, warps: int, how: dict[str, Any]) -> Op:
        def op(x: torch.Tensor) -> None:
            y = torch.empty((streams.writes, streams.count), dtype=x.dtype, device=x.device)
            move_kernel[(-(-streams.count // block),)](
                y, x, streams.count, READS=streams.reads, WRITES=streams.writes, BLOCK=block, num_warps=warps, **how
            )

        return op

    ways = [moved(block, warps, how) for block, warps in SHAPES for how in (PLAIN, HOPPER)]
    if streams.reads == streams.writes:
        ways.append(torch.neg)
    return ways
