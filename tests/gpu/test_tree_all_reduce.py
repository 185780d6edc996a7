"""The tree over 2, 4 and 8 ranks on one GPU: every rank is a row of programs of one launch, with memory of its own.

It is the protocol that is tested here (who waits for whom, what may be written again), for more ranks than there are
GPUs; test_two_gpus.py has the real thing for two.
"""

import pytest
import torch

from rl_kernel.reference import ops as law
from tests.contracts.subjects import to_numpy
from tests.gpu.tensors import normal, same_as_reference
from tests.gpu.two_gpus import patterns

pytest.importorskip("triton")

import triton
import triton.language as tl

from rl_kernel.ops.tree_all_reduce.symmetric import FINER, ONE_SHOT_BLOCK, ONE_SHOT_WARPS, WARPS, Layout
from rl_kernel.ops.tree_all_reduce.triton_symmetric import one_shot_kernel, two_shot_kernel
from rl_kernel.ops.tree_all_reduce.triton_trimmed import trimmed_kernel

pytestmark = pytest.mark.gpu

PROGRAMS = 8  # of each rank: those of eight ranks are on the device together


@triton.jit(do_not_specialize=["late"])
def all_ranks_kernel(
    y, partial, bases, counts, n, part, rounds, late, stride,
    RANKS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, SUMS: tl.constexpr, RESULTS: tl.constexpr,
    WHOLE: tl.constexpr, FLAGS: tl.constexpr, LANES: tl.constexpr, FP32: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Rank program_id(1) of RANKS, with rows of y[R,n], partial[R,n], counts[R,stride]; `late` dawdles first."""
    rank = tl.program_id(1)
    if rank == late:
        for _ in range(2000):
            tl.atomic_add(counts + RANKS * stride, 1)
    mine = counts + rank * stride
    if KIND == "one shot":
        one_shot_kernel(y + rank * n, partial + rank * n, bases, mine, n, rank, RANKS, CAPACITY, BLOCK, FP32)
    elif KIND == "trimmed":
        trimmed_kernel(
            y + rank * n, partial + rank * n, bases, mine, n, part, rounds, rank,
            BLOCK, LANES, SUMS, WHOLE, RESULTS, FLAGS,
        )  # fmt: skip
    else:
        two_shot_kernel(
            y + rank * n, partial + rank * n, bases, mine, n, part, rounds, rank,
            RANKS, BLOCK, SUMS, RESULTS, FLAGS, FP32,
        )  # fmt: skip


class Ranks:
    """`count` ranks on one device, and what each has counted."""

    def __init__(self, count: int) -> None:
        self.layout = Layout(count, PROGRAMS)
        self.memory = [torch.zeros(self.layout.size, dtype=torch.uint8, device="cuda") for _ in range(count)]
        self.bases = torch.tensor([m.data_ptr() for m in self.memory], device="cuda")
        self.shots, self.turns = (torch.zeros(count * 64 + 1, dtype=torch.int32, device="cuda") for _ in range(2))

    def all_reduce(self, partials: torch.Tensor, dtype: torch.dtype, late: int, kind: str) -> torch.Tensor:
        """partials[R,n] → what every rank gets [R,n]."""
        (ranks, n), layout, one_shot = partials.shape, self.layout, kind == "one shot"
        y = torch.empty((ranks, n), dtype=dtype, device="cuda")
        finer = FINER if kind == "trimmed" else 1
        part, block = triton.cdiv(n, 16 * ranks) * 16, layout.block // finer
        programs = triton.cdiv(n, ONE_SHOT_BLOCK) if one_shot else min(finer * PROGRAMS, triton.cdiv(part, block))
        all_ranks_kernel[(programs, ranks)](
            y, partials, self.bases, self.shots if one_shot else self.turns, n, part,
            triton.cdiv(part, programs * block), late, 64,
            RANKS=ranks, CAPACITY=layout.capacity, BLOCK=ONE_SHOT_BLOCK if one_shot else block, SUMS=layout.sums,
            RESULTS=layout.results, WHOLE=layout.whole, FLAGS=layout.flags, LANES=32 * WARPS,
            FP32=dtype == torch.float32, KIND=kind,
            num_warps=ONE_SHOT_WARPS if one_shot else WARPS, num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip
        return y


def spread(n: int, rank: int, seed: int) -> torch.Tensor:
    """fp32 as partials are, of which few are open where 22.5 bits travel; seven octaves apart and more, some."""
    x = normal(n, seed=seed * 64 + rank, dtype=torch.float32)
    return torch.where(x.abs() < 0.2, x * 0.004, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_every_rank_gets_the_reference_tree(count: int, dtype: torch.dtype) -> None:
    ranks, values = Ranks(count), (patterns, spread)
    # One program, several, all; one turn, more turns than a program has slots; ends inside a chunk and a part.
    chunks = count * ranks.layout.block  # one of every part
    sizes = [(1, "one shot"), (700, "one shot"), (18_000, "one shot")]
    for kind in ("two shots", "trimmed") if (count, dtype) == (2, torch.bfloat16) else ("two shots",):
        sizes += [(17, kind), (chunks * 5, kind), (chunks * PROGRAMS * 9 - 5, kind)]
    turns = [(n, kind, turn) for turn in range(4) for n, kind in sizes]
    partials = [torch.stack([values[turn % 2](n, r, turn) for r in range(count)]) for n, _, turn in turns]
    found = [
        ranks.all_reduce(p, dtype, late=i % count, kind=kind)
        for i, (p, (_, kind, _)) in enumerate(zip(partials, turns, strict=True))
    ]
    for p, y, (n, kind, _) in zip(partials, found, turns, strict=True):
        total = law.tree_sum(to_numpy(p))
        expected = law.narrow(total) if dtype == torch.bfloat16 else law.canonical(total)
        for rank in range(count):
            same_as_reference(y[rank], expected, f"{n} values, rank {rank} of {count}, {kind}")
