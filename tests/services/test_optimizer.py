"""AdamW to the bit, its schedule, and a gradient norm that rounds once."""

import math

import numpy as np
import pytest
import torch

from rl_kernel.integrations.megatron.weights import Piece
from rl_kernel.torch_autograd import TensorParallel
from services.trainer import optimizer
from services.trainer.optimizer import AdamW, AdamWOptions, Schedule, gradient_norm

F = np.float32


def parameter(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    p = torch.nn.Parameter(torch.randn(*shape, generator=generator).to(torch.bfloat16))
    p.main_grad = torch.randn(*shape, generator=generator)
    return p


def by_hand(master, gradients, options, rate, scale):
    """AdamW one operation at a time in NumPy, which rounds each."""
    beta1, beta2 = options.betas
    first, second = np.zeros_like(master), np.zeros_like(master)
    for update, gradient in enumerate(gradients, 1):
        g = gradient * F(scale)
        first = first * F(beta1) + g * F(1.0 - beta1)
        second = second * F(beta2) + (g * g) * F(1.0 - beta2)
        denominator = np.sqrt(second * F(1.0 / (1.0 - beta2**update))) + F(options.epsilon)
        change = first * F(1.0 / (1.0 - beta1**update)) / denominator * F(rate)
        if options.weight_decay and master.ndim > 1:
            master = master * F(1.0 - rate * options.weight_decay)
        master = master - change
    return master, first, second


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(5, 7), (129,), (3, 1000)])
def test_three_updates_have_the_bits_of_the_formula_one_operation_at_a_time(shape, decay):
    p, options = parameter(shape, 1), AdamWOptions(betas=(0.9, 0.98), weight_decay=decay)
    start = p.detach().float().numpy().copy()
    adamw, gradients = AdamW({"w": p}, options), []
    for update in (1, 2, 3):
        p.main_grad = parameter(shape, 10 + update).main_grad
        gradients.append(p.main_grad.numpy().copy())
        adamw.step(update, 1e-2, 0.37)
    for found, wanted in zip(
        (adamw.masters["w"], adamw.first["w"], adamw.second["w"]),
        by_hand(start, gradients, options, 1e-2, 0.37),
        strict=True,
    ):
        assert np.array_equal(found.numpy().view(np.uint32), wanted.view(np.uint32))
    assert torch.equal(p, adamw.masters["w"].to(torch.bfloat16))


def test_it_is_the_adamw_of_torch_up_to_rounding():
    p = parameter((40, 30), 2)
    theirs = torch.nn.Parameter(p.detach().double())
    torch_adamw = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.98), weight_decay=0.1, eps=1e-8)
    ours = AdamW({"w": p}, AdamWOptions(betas=(0.9, 0.98), weight_decay=0.1))
    for update in range(1, 6):
        p.main_grad = parameter((40, 30), 20 + update).main_grad
        theirs.grad = p.main_grad.double()
        ours.step(update, 1e-2, 1.0)
        torch_adamw.step()
    moved = (theirs - p.detach().double()).abs().max()
    assert moved > 0
    # Some 12 fp32 roundings an update of numbers below 4, five updates: 60 * 4 * 2^-24.
    assert (theirs - ours.masters["w"].double()).abs().max() < 60 * 4 * 2.0**-24


def test_neither_chunks_nor_threads_change_a_bit(monkeypatch):
    found, threads = [], torch.get_num_threads()
    for chunk, count in ((1 << 17, 1), (1 << 17, 2), (97, 2)):
        monkeypatch.setattr(optimizer, "_CHUNK", chunk)
        torch.set_num_threads(count)
        p = parameter((700, 300), 3)
        adamw = AdamW({"w": p}, AdamWOptions())
        adamw.step(1, 1e-3, 0.5)
        norm = gradient_norm(iter([Piece("w", (700, 300), p.main_grad, 0)]), 1, TensorParallel())
        found.append((adamw.masters["w"].numpy().view(np.uint32).copy(), norm))
    torch.set_num_threads(threads)
    for master, norm in found[1:]:
        assert np.array_equal(master, found[0][0])
        assert norm == found[0][1]


def test_a_rate_of_zero_changes_no_weight():
    p = parameter((6, 6), 4)
    before = p.detach().clone()
    AdamW({"w": p}, AdamWOptions(weight_decay=0.1)).step(1, 0.0, 1.0)
    assert torch.equal(p, before)


def test_the_norm_is_that_of_all_gradients_together():
    pieces = [
        Piece("a", (2, 2), torch.tensor([[1.0, 2.0], [4.0, 2.0]]), 0),
        Piece("b", (2,), torch.tensor([6.0, 8.0]), None),
    ]
    assert gradient_norm(iter(pieces), 1, TensorParallel()) == math.sqrt(125.0)


def test_the_norm_does_not_depend_on_the_cut_over_ranks():
    whole = torch.randn(33, 640, generator=torch.Generator().manual_seed(6))
    rows = optimizer._row_sums
    for axis in (0, 1):
        one = rows(whole.reshape(-1, 320 if axis else 640)).tolist()
        two = [x for part in whole.chunk(2, axis) for x in rows(part.reshape(-1, 320 if axis else 640)).tolist()]
        assert math.fsum(one) == math.fsum(two)


def test_the_rate_rises_stays_and_falls():
    schedule = Schedule(peak=4.0, warmup=4, decay=0)
    assert [schedule.rate(u) for u in (1, 2, 4, 5, 900)] == [1.0, 2.0, 4.0, 4.0, 4.0]
    falling = Schedule(peak=4.0, warmup=0, decay=4)
    assert [falling.rate(u) for u in (1, 2, 3, 5, 6)] == [4.0, 3.0, 2.0, 0.0, 0.0]
