"""Attention's gradients on Hopper: the warp-specialised kernels have the bits of the plain ones, held by the laws."""

from pathlib import Path

import pytest
import torch

from rl_kernel.ops.attention import gluon_backward
from rl_kernel.ops.attention.triton_backward import attention_backward, launch_for
from rl_kernel.ops.attention.triton_kernel import attention
from tests.gpu.mutated import mutated
from tests.gpu.tensors import normal, offsets, same_bits

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS = 6, 2
Tensors = tuple[torch.Tensor, ...]
LENGTHS = [
    (1,),
    (63, 64, 65),
    (127, 128, 129, 1),
    (1000, 3, 200),
    (1537,),
    (0, 70, 0, 0, 65, 1, 0),
    (9,) * 21 + (0, 80),
]
# What the kernels must not do, as changes of their text: each makes a comparison below fail.
MUTANTS: dict[str, tuple[str, str, str]] = {
    "keys of another sequence": ("dq", "            clear(keys, length - block * BLOCK)", "            pass"),
    "a query that does not see its own key": ("dq", "key[None, :] <= query[:, None]", "key[None, :] < query[:, None]"),
    "the last block left out": ("dq", "    if blocks > 0:", "    if blocks < 0:"),
    "sums of a block that are multiplied with the next": ("dq", "max(block - 1, 0) % STAGES", "block % STAGES"),
    "queries of another sequence": ("dkdv", "            clear(q_in, length - block * BLOCK)\n", ""),
    "gradients of another sequence": ("dkdv", "            clear(do, length - block * BLOCK)\n", ""),
    "a key that its own query does not see": ("dkdv", "[:, None] <= query[None, :]", "[:, None] < query[None, :]"),
    "a last block that is taken for whole": ("dkdv", ", length // BLOCK\n", ", gl.cdiv(length, BLOCK)\n"),
}


def random(tokens: int, dim: int) -> Tensors:
    """dout, q, k, v."""
    heads = (HEADS, HEADS, KV_HEADS, KV_HEADS)
    return tuple(normal(tokens, count, dim, seed=seed) for seed, count in enumerate(heads))


def gradients(tensors: Tensors, cu: torch.Tensor, plain: bool = False) -> Tensors:
    dout, *qkv = tensors
    assert gluon_backward.serves((dout, qkv[0], qkv[1], qkv[2]))
    launch = launch_for(dout.shape[2]) if plain else None
    return attention_backward(dout, *qkv, *attention(*qkv, cu, cu), cu, launch=launch)


def compare(lengths: tuple[int, ...], dim: int) -> None:
    """Both ways have the same bits, also where the last sequence but one holds no number."""
    tensors, cu = random(sum(lengths), dim), offsets(*lengths)
    expected = gradients(tensors, cu, plain=True)
    for one, other, name in zip(gradients(tensors, cu), expected, ("dq", "dk", "dv"), strict=True):
        same_bits(one, other, name)
    if len(lengths) < 3:
        return
    start = sum(lengths[:-2])
    rows = slice(start, start + lengths[-2])
    for x in tensors:
        x[rows] = float("nan")
    for one, other, name in zip(gradients(tensors, cu), expected, ("dq", "dk", "dv"), strict=True):
        same_bits(one[:start], other[:start], f"{name} before it")
        if lengths[-1]:
            same_bits(one[rows.stop :], other[rows.stop :], f"{name} behind it")


@pytest.mark.parametrize("dim", gluon_backward.HEAD_DIMS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_every_length_has_the_bits_of_the_plain_kernels(dim: int, lengths: tuple[int, ...]) -> None:
    compare(lengths, dim)


def test_a_call_that_is_repeated_and_one_in_a_graph_have_the_same_bits() -> None:
    tensors, cu = random(3000, 128), offsets(1000, 2000)
    first = gradients(tensors, cu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(tensors, cu)
    for _ in range(20):
        graph.replay()
        for one, other, name in zip(found, first, ("dq", "dk", "dv"), strict=True):
            same_bits(one, other, name)


def test_what_the_copy_engine_cannot_read_goes_the_plain_way() -> None:
    dout, q, k, v = random(200, 64)
    apart = torch.empty(200, KV_HEADS * 64 + 4, dtype=torch.bfloat16, device="cuda")[:, :-4].unflatten(1, (-1, 64))
    apart.copy_(k)
    assert not gluon_backward.serves((dout, q, apart, v))
    cu, forward = offsets(200), attention(q, k, v, offsets(200), offsets(200))
    for one, other, name in zip(
        attention_backward(dout, q, apart, v, *forward, cu), attention_backward(dout, q, k, v, *forward, cu),
        ("dq", "dk", "dv"), strict=True,
    ):  # fmt: skip
        same_bits(one, other, name)


def test_what_lies_over_itself_and_one_token_of_any_stride_have_the_bits_of_a_copy() -> None:
    """Rows of an expanded tensor lie over one another, which no matrix of the copy engine's does."""
    dout, q, k, v = random(130, 128)
    same, cu = k[:1].expand(130, -1, -1), offsets(130)
    assert not gluon_backward.serves((dout, q, same, v))
    forward = attention(q, same, v, cu, cu)
    for one, other, name in zip(forward, attention(q, same.contiguous(), v, cu, cu), ("out", "m", "l"), strict=True):
        same_bits(one, other, name)
    alone = tuple(x[:1].as_strided((1, *x.shape[1:]), (3, x.stride(1), 1)) for x in (dout, q, k, v))
    assert gluon_backward.serves((alone[0], alone[1], alone[2], alone[3]))
    for tensors, of in (((dout, q, same, v), cu), (alone, offsets(1))):
        packed = tuple(x.clone(memory_format=torch.contiguous_format) for x in tensors)
        found = attention_backward(*tensors, *attention(*tensors[1:], of, of), of)
        for one, other, name in zip(found, gradients(packed, of, plain=True), ("dq", "dk", "dv"), strict=True):
            same_bits(one, other, name)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    which, old, new = MUTANTS[name]
    source = Path(str(gluon_backward.__file__)).with_name(f"gluon_{which}.py")
    kernel = getattr(mutated(tmp_path, source, old, new), f"{which}_kernel")
    monkeypatch.setattr(gluon_backward, f"{which}_kernel", kernel)
    with pytest.raises(AssertionError, match="values differ"):
        compare((200, 70, 130), 128)
