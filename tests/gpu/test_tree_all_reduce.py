"""The tree over 2, 4 and 8 ranks on one GPU: every rank is a row of programs of one launch, with memory of its own.

It is the protocol that is tested here (who waits for whom, what may be written again), for more ranks than there are
GPUs; test_two_gpus.py has the real thing for two.
"""

import pytest
import torch

from rl_kernel.reference import ops as law
from tests.contracts.subjects import to_numpy
from tests.gpu.tensors import same_as_reference
from tests.gpu.two_gpus import patterns

pytest.importorskip("triton")

import triton
import triton.language as tl

from rl_kernel.ops.tree_all_reduce.symmetric import ONE_SHOT_BLOCK, ONE_SHOT_WARPS, WARPS, Layout
from rl_kernel.ops.tree_all_reduce.triton_symmetric import one_shot_kernel, two_shot_kernel

pytestmark = pytest.mark.gpu

PROGRAMS = 8  # of each rank: those of eight ranks are on the device together


@triton.jit(do_not_specialize=["late"])
def all_ranks_kernel(
    y, partial, bases, counts, n, part, rounds, late, stride,
    RANKS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, SUMS: tl.constexpr, RESULTS: tl.constexpr,
    FLAGS: tl.constexpr, FP32: tl.constexpr, ONE_SHOT: tl.constexpr,
):  # fmt: skip
    """Rank program_id(1) of RANKS, with rows of y[R,n], partial[R,n], counts[R,stride]; `late` dawdles first."""
    rank = tl.program_id(1)
    if rank == late:
        for _ in range(2000):
            tl.atomic_add(counts + RANKS * stride, 1)
    mine = counts + rank * stride
    if ONE_SHOT:
        one_shot_kernel(y + rank * n, partial + rank * n, bases, mine, n, rank, RANKS, CAPACITY, BLOCK, FP32)
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

    def all_reduce(self, partials: torch.Tensor, dtype: torch.dtype, late: int, one_shot: bool) -> torch.Tensor:
        """partials[R,n] → what every rank gets [R,n]."""
        (ranks, n), layout = partials.shape, self.layout
        y = torch.empty((ranks, n), dtype=dtype, device="cuda")
        part = triton.cdiv(n, 16 * ranks) * 16
        programs = triton.cdiv(n, ONE_SHOT_BLOCK) if one_shot else min(PROGRAMS, triton.cdiv(part, layout.block))
        all_ranks_kernel[(programs, ranks)](
            y, partials, self.bases, self.shots if one_shot else self.turns, n, part,
            triton.cdiv(part, programs * layout.block), late, 64,
            RANKS=ranks, CAPACITY=layout.capacity, BLOCK=ONE_SHOT_BLOCK if one_shot else layout.block, SUMS=layout.sums,
            RESULTS=layout.results, FLAGS=layout.flags, FP32=dtype == torch.float32, ONE_SHOT=one_shot,
            num_warps=ONE_SHOT_WARPS if one_shot else WARPS, num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip
        return y


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_every_rank_gets_the_reference_tree(count: int, dtype: torch.dtype) -> None:
    ranks = Ranks(count)
    # One program, several, all; one turn, more turns than a program has slots; ends inside a chunk and a part.
    chunks = count * ranks.layout.block  # one of every part
    sizes = [(1, True), (700, True), (18_000, True), (17, False), (chunks * 5, False)]
    sizes += [(chunks * PROGRAMS * 9 - 5, False)]
    turns = [(n, one_shot, turn) for turn in range(4) for n, one_shot in sizes]
    partials = [torch.stack([patterns(n, r, seed=turn) for r in range(count)]) for n, _, turn in turns]
    found = [
        ranks.all_reduce(p, dtype, late=i % count, one_shot=one_shot)
        for i, (p, (_, one_shot, _)) in enumerate(zip(partials, turns, strict=True))
    ]
    for p, y, (n, one_shot, _) in zip(partials, found, turns, strict=True):
        total = law.tree_sum(to_numpy(p))
        expected = law.narrow(total) if dtype == torch.bfloat16 else law.canonical(total)
        for rank in range(count):
            same_as_reference(y[rank], expected, f"{n} values, rank {rank} of {count}, one shot: {one_shot}")
