"""Prefill on Hopper: the warp-specialised kernel has the bits of the plain one, and leaves to it what it cannot do."""

import pytest
import torch

from rl_kernel.ops.attention import gluon_kernel
from rl_kernel.ops.attention.triton_kernel import Launch, attention, paged_attention
from rl_kernel.reference.ops import attention_scale
from tests.gpu.tensors import normal, offsets, same_bits

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS = 8, 2
PLAIN = Launch(128, 1, 8, 3)
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def random(tokens: int, keys: int, dim: int) -> Tensors:
    return normal(tokens, HEADS, dim, seed=1), normal(keys, KV_HEADS, dim, seed=2), normal(keys, KV_HEADS, dim, seed=3)


def flagged(tensors: Tensors, cu_q: torch.Tensor, cu_k: torch.Tensor) -> int:
    """Assert that both ways have the same bits; return how many half tiles the first left to the second."""
    q, k, v = tensors
    found = attention(q, k, v, cu_q, cu_k)
    for one, other, what in zip(found, attention(q, k, v, cu_q, cu_k, launch=PLAIN), ("out", "m", "l"), strict=True):
        same_bits(one, other, what)
    strides = (q.stride(0), k.stride(0), v.stride(0))
    out, m, l = (torch.empty_like(x) for x in found)
    redo = gluon_kernel.attention(out, m, l, q, k, v, cu_q, cu_k, strides, float(attention_scale(q.shape[2])))
    return int(redo.sum())


@pytest.mark.parametrize("dim", gluon_kernel.HEAD_DIMS)
@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        ((1,), (128,)),
        ((64, 65, 1), (64, 65, 1)),
        ((1, 2, 127, 128, 129), (127, 129, 255, 1024, 1025)),
        ((1023, 1024, 1025), (1023, 1024, 1025)),
        ((130, 1500), (1154, 3100)),
    ],
    ids=str,
)
def test_every_length_and_prefix_has_the_bits_of_the_plain_kernel(
    dim: int, queries: tuple[int, ...], keys: tuple[int, ...]
) -> None:
    assert flagged(random(sum(queries), sum(keys), dim), offsets(*queries), offsets(*keys)) == 0


def test_a_value_that_is_not_finite_is_hidden_where_the_mask_says_so() -> None:
    q, k, v = random(700, 700, 128)
    for at, value in ((40, float("inf")), (300, float("-inf")), (333, float("nan"))):
        v[at, 0, 5] = value
    cu = offsets(200, 500)
    out = attention(q, k, v, cu, cu)[0]
    assert torch.isfinite(out[:40].float()).all(), "rows before the infinity"
    assert flagged((q, k, v), cu, cu) > 0


@pytest.mark.parametrize(("power", "left"), [(-120, True), (-100, True), (-60, False), (110, False)])
def test_quotients_too_small_for_the_fast_division_are_left_to_the_other(power: int, left: bool) -> None:
    q, k, v = random(300, 300, 128)
    v = (v.float() * 2.0**power).to(torch.bfloat16)
    assert (flagged((q, k, v), offsets(300), offsets(300)) > 0) == left


def paged(
    queries: tuple[int, ...], keys: tuple[int, ...], dim: int, page: int, beyond: float
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """What `paged_attention` takes, pages in no order; `beyond` stands behind each last key and in a page of its own.

    Also out as `attention` has it of the same keys and values one after another.
    """
    q, k, v = random(sum(queries), sum(keys), dim)
    lengths, pages = torch.tensor(keys), [-(-n // page) for n in keys]
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(4)) + 1
    cache = torch.full((sum(pages) + 1, 2, page, KV_HEADS, dim), beyond, dtype=torch.bfloat16, device=q.device)
    table = torch.zeros((len(keys), max(pages) + 3), dtype=torch.int32)
    for r, (count, mine) in enumerate(zip(keys, order.split(pages), strict=True)):
        table[r, : len(mine)] = mine
        begin = sum(keys[:r])
        for j, number in enumerate(mine.tolist()):
            held = slice(begin + j * page, begin + min((j + 1) * page, count))
            for half, x in enumerate((k, v)):
                cache[number, half, : held.stop - held.start] = x[held]
    arguments = (q, cache[:, 0], cache[:, 1], table.to(q.device), offsets(*queries), lengths.int().to(q.device))
    return arguments, attention(q, k, v, offsets(*queries), offsets(*keys), launch=PLAIN)[0]


@pytest.mark.parametrize(("dim", "page"), [(128, 16), (64, 16), (128, 32), (128, 64), (128, 128), (64, 256), (128, 48)])
@pytest.mark.parametrize("beyond", [0.0, float("nan")], ids=("zeros beyond", "nan beyond"))
def test_a_cache_in_pages_has_the_bits_of_keys_one_after_another(dim: int, page: int, beyond: float) -> None:
    arguments, expected = paged((40, 300, 1, 129), (40, 1324, 700, 129), dim, page, beyond)
    same_bits(paged_attention(*arguments, launch=PLAIN), expected, "the plain kernel")
    same_bits(paged_attention(*arguments), expected, "the kernel of this device")


def test_pages_are_left_to_the_plain_kernel_only_where_what_is_hidden_is_not_finite() -> None:
    for beyond, left in ((0.0, False), (float("nan"), True)):
        (q, k, v, table, cu_q, lens), _ = paged((300, 129), (1324, 129), 128, 16, beyond)
        out, m, l = torch.empty_like(q), *(torch.empty(q.shape[:2], device=q.device) for _ in range(2))
        strides = (q.stride(0), k.stride(1), v.stride(1))
        scale = float(attention_scale(128))
        redo = gluon_kernel.paged_attention(out, m, l, q, k, v, table, cu_q, lens, strides, scale)
        assert (int(redo.sum()) > 0) == left
