"""Tensor parallelism by hand and through torch.distributed: the bits of one rank, whatever the degree."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rl_kernel.ops.linear_logp import cpu as linear_logp
from rl_kernel.ops.tree_all_reduce import cpu as tree
from tests.rl_kernel.cpu_draws import draw, same_bits

_RANKS = 3


def test_vocabulary_shards_give_the_logp_and_the_gradients_of_one_rank() -> None:
    h, w, target = draw(1, 9, 64), draw(2, 512, 64), torch.arange(9) * 50
    how, dlogp = {"temperature": 0.7, "vocab": 500}, torch.linspace(-1, 1, 9)
    logp, lse = linear_logp.linear_logp(h, w, target, **how)
    grad = torch.zeros(512, 64)
    dh = linear_logp.linear_logp_backward(dlogp, h, w, target, lse, main_grad=grad, segments=2, **how)

    shards = [w[:256].contiguous(), w[256:].contiguous()]
    stats = [linear_logp.linear_vocab_stats(h, s, target, vocab_start=256 * r, **how) for r, s in enumerate(shards)]
    m, s = (torch.cat([part[i] for part in stats], dim=1) for i in (0, 1))
    z = torch.maximum(stats[0][2], stats[1][2])
    assert same_bits((linear_logp.merge_vocab_stats(m, s), z - lse), (lse, logp))
    grads = [torch.zeros(256, 64), torch.zeros(256, 64)]
    parts = [
        linear_logp.linear_logp_backward(
            dlogp, h, shard, target, lse, main_grad=grads[r], vocab_start=256 * r, out_dtype=torch.float32, **how
        )
        for r, shard in enumerate(shards)
    ]
    assert same_bits((tree.tree_sum(torch.stack(parts)), torch.cat(grads)), (dh, grad))


def _rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=_RANKS)
    partial = torch.randn(7, 33, generator=torch.Generator().manual_seed(rank)) * 10.0**rank
    torch.save((partial, tree.tree_all_reduce(partial, None, torch.float32)), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_every_rank_gets_the_tree_by_logical_index(tmp_path: Path) -> None:
    mp.spawn(_rank, args=(str(tmp_path),), nprocs=_RANKS)
    saved = [torch.load(tmp_path / f"{rank}.pt") for rank in range(_RANKS)]
    p0, p1, p2 = (partial for partial, _ in saved)
    expected, another_order = (p0 + p1) + p2, p0 + (p1 + p2)
    assert all(same_bits((total,), (expected,)) for _, total in saved)
    assert not same_bits((expected,), (another_order,)), "the order would not show"
