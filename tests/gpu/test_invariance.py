"""What may not change a bit on a GPU: launch shapes, batch, decode or prefill, strides, a second run, graph replay."""

from collections.abc import Callable

import pytest
import torch

from rl_kernel.contracts.v1 import KV_PARTIAL
from tests.gpu.tensors import ids, normal, offsets, same_bits

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, DIM = 32, 8, 128


@pytest.mark.parametrize("segments", [1, 2, 8])
def test_the_launch_shape_of_a_product_changes_no_bit(segments: int) -> None:
    from rl_kernel.ops.triton_matmul import Launch, product

    a, b = normal(200, 1024, seed=1), normal(328, 1024, seed=2).t()
    expected = None
    for shape in (
        (16, 32, 256, 4, 3),
        (16, 64, 128, 4, 4),
        (64, 64, 64, 4, 3),
        (128, 64, 64, 8, 3),
        (64, 128, 32, 4, 2),
    ):
        y = torch.empty((200, 328), device="cuda")
        product(y, a, b, segments=segments, launch=Launch(*shape))
        expected = y if expected is None else expected
        same_bits(y, expected, f"launch {shape}")


def test_the_batch_of_a_product_changes_no_bit() -> None:
    from rl_kernel.ops.gemm.cublaslt import gemm

    x, w = normal(512, 4096, seed=1), normal(4096, 4096, seed=2)
    whole = gemm(x, w)
    for rows in (1, 7, 16, 17, 32, 33, 64, 100, 256):
        same_bits(gemm(x[:rows], w), whole[:rows], f"{rows} rows")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_few_rows_of_a_large_weight_have_the_bits_of_the_plain_kernel(dtype: torch.dtype) -> None:
    from rl_kernel.ops import gluon_few
    from rl_kernel.ops.triton_matmul import product

    fused = normal(16, 2048, seed=1) * torch.exp2(normal(16, 2048, seed=2, scale=15.0)).bfloat16()
    w = normal(17000, 1024, seed=3) * torch.exp2(normal(17000, 1024, seed=4, scale=15.0)).bfloat16()
    special = torch.tensor(
        [0.0, -0.0, 2.0**-130, -(2.0**-133), float("inf"), float("nan")], dtype=w.dtype, device="cuda"
    )
    for tensor, kinds in ((fused, 4), (w, 6)):
        places = ids(600, tensor.numel(), seed=5)
        tensor.view(-1)[places] = special[places % kinds]
    fused[3, 1030] = float("inf")
    for rows in (1, 7, 8, 9, 16):
        x = fused[:rows, 1024:]
        found, expected = (torch.empty((rows, 17000), dtype=dtype, device="cuda") for _ in range(2))
        assert gluon_few.serves(found, x, w.t(), 1)
        gluon_few.few_product(found, x, w.t())
        same_bits(found, product(expected, x, w.t(), segments=1), f"{rows} rows")


@pytest.mark.parametrize("rows", [1, 7, 1025])
@pytest.mark.parametrize("n", [1032, 1200, 4096, 5120, 8190, 8192])
def test_a_long_row_has_the_bits_of_the_plain_kernel(n: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_kernel.ops.rms_norm import gluon_kernel
    from rl_kernel.ops.rms_norm.triton_kernel import add_rms_norm, rms_norm

    special = torch.tensor([0.0, -0.0, 2.0**-130, -(2.0**-133), float("inf"), float("nan")], device="cuda").bfloat16()
    x, residual, w = normal(rows, n, seed=1), normal(rows, n, seed=2), normal(n, seed=3)
    x *= torch.exp2(normal(rows, 1, seed=4, scale=25.0)).bfloat16()
    for tensor, kinds in ((x, 4), (residual, 4), (x[rows // 2 :], 6 if rows > 1 else 4), (w, 4)):
        places = ids(40, tensor.numel(), seed=5)
        tensor.view(-1)[places] = special[places % kinds]
    wide = torch.cat((x, residual), 1)

    def found() -> tuple[torch.Tensor, ...]:
        return rms_norm(x, w, 1e-6), rms_norm(wide[:, n:], w, 1e-6), *add_rms_norm(x, residual, w, 1e-6)

    with monkeypatch.context() as patch:
        assert gluon_kernel.serves(n)
        patch.setattr(gluon_kernel, "serves", lambda n: False)
        expected = found()
    for a, b, what in zip(found(), expected, ("alone", "of a slice", "of a sum", "the sum"), strict=True):
        same_bits(a, b, f"{what}, {rows} rows")


@pytest.mark.parametrize("tokens", [64, 301])
def test_many_heads_have_the_bits_of_the_plain_kernel(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_kernel.ops.rms_norm import gluon_kernel
    from rl_kernel.ops.rms_norm.triton_kernel import rms_norm

    special = torch.tensor([0.0, -0.0, 2.0**-130, -(2.0**-133), float("inf"), float("nan")], device="cuda").bfloat16()
    fused = normal(tokens, (HEADS + KV_HEADS) * DIM, seed=1)
    fused *= torch.exp2(normal(tokens, (HEADS + KV_HEADS) * DIM, seed=4, scale=20.0)).bfloat16()
    places = ids(400, fused.numel(), seed=5)
    fused.view(-1)[places] = special[places % 6]
    q, w = fused[:, : HEADS * DIM].unflatten(1, (HEADS, DIM)), normal(DIM, seed=3)

    def found() -> list[torch.Tensor]:
        return [rms_norm(x, w, 1e-6) for x in (q, q.contiguous(), q.reshape(-1, DIM)[: tokens * HEADS - 5])]

    with monkeypatch.context() as patch:
        assert gluon_kernel.serves_heads(tokens * HEADS, DIM)
        patch.setattr(gluon_kernel, "serves_heads", lambda rows, n: False)
        expected = found()
    for a, b, what in zip(found(), expected, ("of a slice", "lying together", "of any number"), strict=True):
        same_bits(a, b, what)


def test_row_parallel_partials_of_any_tp_degree_meet_in_the_same_bits() -> None:
    from rl_kernel.ops.gemm.cublaslt import gemm
    from rl_kernel.ops.tree_all_reduce.triton_kernel import tree_sum

    x, w = normal(300, 4096, seed=1), normal(1024, 4096, seed=2)
    whole = gemm(x, w, segments=8)
    for ranks in (2, 4, 8):
        cuts = zip(x.chunk(ranks, 1), w.chunk(ranks, 1), strict=True)
        parts = [gemm(a, b.contiguous(), segments=8 // ranks, out_dtype=torch.float32) for a, b in cuts]
        same_bits(tree_sum(torch.stack(parts)), whole, f"TP={ranks}")


@pytest.mark.parametrize("rows", [16, 64, 128])
def test_the_launch_shape_of_attention_changes_no_bit(rows: int) -> None:
    from rl_kernel.ops.attention.triton_kernel import Launch, attention

    q, k, v = normal(1500, HEADS, DIM, seed=1), normal(1500, KV_HEADS, DIM, seed=2), normal(1500, KV_HEADS, DIM, seed=3)
    cu = offsets(300, 1200)
    expected = attention(q, k, v, cu, cu)
    for pack, warps in ((1, 4), (4, 4)):
        found = attention(q, k, v, cu, cu, launch=Launch(rows, pack, warps, 2))
        for a, b, name in zip(found, expected, ("out", "m", "l"), strict=True):
            same_bits(a, b, f"{name}, {rows} rows, {pack} heads a tile")


def _paged(k: torch.Tensor, v: torch.Tensor, lengths: list[int], page: int) -> tuple[torch.Tensor, ...]:
    """Scatter k and v[T,G,D] into pages in random order; what is not written is NaN."""
    counts = [-(-n // page) for n in lengths]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(page)).int()
    caches = [torch.full((len(order), page, *k.shape[1:]), float("nan"), dtype=k.dtype, device="cuda") for _ in "kv"]
    table = torch.zeros((len(lengths), max(counts)), dtype=torch.int32)
    start = used = 0
    for r, (n, count) in enumerate(zip(lengths, counts, strict=True)):
        table[r, :count] = order[used : used + count]
        for j in range(count):
            stop = min((j + 1) * page, n)
            for cache, x in zip(caches, (k, v), strict=True):
                cache[table[r, j], : stop - j * page] = x[start + j * page : start + stop]
        start, used = start + n, used + count
    return *caches, table.cuda()


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("queries", [1, 3, 200])
def test_paged_decode_and_chunks_are_the_prefill(page: int, queries: int) -> None:
    from rl_kernel.ops.attention.triton_decode import Launch as Decode
    from rl_kernel.ops.attention.triton_kernel import attention, paged_attention

    lengths = [200, KV_PARTIAL, KV_PARTIAL + 1, 3000]
    total, cu = sum(lengths), offsets(*lengths)
    q = normal(total, HEADS, DIM, seed=1)
    k, v = (normal(total, KV_HEADS, DIM, seed=s) for s in (2, 3))
    whole = attention(q, k, v, cu, cu)[0]
    last = torch.cat([torch.arange(end - queries, end) for end in cu[1:].tolist()]).cuda()
    k_cache, v_cache, table = _paged(k, v, lengths, page)
    lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    found = paged_attention(q[last], k_cache, v_cache, table, offsets(*[queries] * len(lengths)), lens)
    same_bits(found, whole[last], f"{queries} queries a sequence, pages of {page}")
    half = paged_attention(q[last], k_cache[:, :], v_cache, table, offsets(*[queries] * len(lengths)), lens)
    same_bits(half, found, "second run")
    if queries == 1:
        for shape in (Decode(4, 5, 1), Decode(4, 3, 2), Decode(8, 3, 2), Decode(8, 2, 4), Decode(2, 3, 1)):
            other = paged_attention(q[last], k_cache, v_cache, table, offsets(*[1] * 4), lens, decode=shape)
            same_bits(other, found, f"{shape}")
    given = torch.full_like(found, float("nan"))
    into = paged_attention(q[last], k_cache, v_cache, table, offsets(*[queries] * len(lengths)), lens, out=given)
    assert into is given
    same_bits(given, found, "stored where the caller wants it")


@pytest.mark.parametrize("tokens", [1, 2047, 2048, 2051])
def test_rope_of_a_pair_has_the_bits_of_each_tensor_token_by_token(tokens: int) -> None:
    """Launches differ with the number of tokens and of tensors."""
    from rl_kernel.ops.rope.triton_kernel import rope, rope_pair

    fused = normal(tokens, (HEADS + KV_HEADS) * DIM, seed=1)
    pair = [x.unflatten(1, (-1, DIM)) for x in fused.split([HEADS * DIM, KV_HEADS * DIM], 1)]
    cos, sin = (normal(tokens, DIM // 2, seed=s, dtype=torch.float32) for s in (4, 5))
    positions = torch.arange(tokens, device="cuda").flip(0)
    for rotated, x in zip(rope_pair(*pair, cos, sin, positions), pair, strict=True):
        parts = [rope(a, cos, sin, p) for a, p in zip(x.split(600), positions.split(600), strict=True)]
        same_bits(rotated, torch.cat(parts), "rope of a pair, in parts")
        same_bits(rope(x, cos, sin, positions), rotated, "rope of one tensor")


def test_slices_of_a_fused_projection_give_the_bits_of_copies() -> None:
    from rl_kernel.ops.attention.triton_kernel import attention, attention_backward
    from rl_kernel.ops.rms_norm.triton_kernel import rms_norm, rms_norm_backward
    from rl_kernel.ops.rope.triton_kernel import rope, rope_pair

    fused, cu = normal(150, (HEADS + 2 * KV_HEADS) * DIM, seed=1), offsets(100, 50)
    q, k, v = (x.unflatten(1, (-1, DIM)) for x in fused.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], 1))
    dense = [x.contiguous() for x in (q, k, v)]
    out, m, l = attention(q, k, v, cu, cu)
    for a, b in zip((out, m, l), attention(*dense, cu, cu), strict=True):
        same_bits(a, b, "attention")
    dout = normal(150, HEADS, DIM, seed=2)
    for a, b in zip(
        attention_backward(dout, q, k, v, out, m, l, cu), attention_backward(dout, *dense, out, m, l, cu), strict=True
    ):
        same_bits(a, b, "attention_backward")
    gain, positions = normal(DIM, seed=3), torch.arange(150, device="cuda")
    cos, sin = (normal(200, DIM // 2, seed=s, dtype=torch.float32) for s in (4, 5))
    same_bits(rms_norm(k, gain, 1e-6), rms_norm(dense[1], gain, 1e-6), "rms_norm")
    same_bits(rope(q, cos, sin, positions), rope(dense[0], cos, sin, positions), "rope")
    for pair, x, name in zip(rope_pair(q, k, cos, sin, positions), dense, ("queries", "keys"), strict=False):
        same_bits(pair, rope(x, cos, sin, positions), f"rope of a pair, {name}")
    dw = [torch.zeros((KV_HEADS, DIM), device="cuda") for _ in range(2)]
    same_bits(
        rms_norm_backward(v, k, gain, 1e-6, dw[0]), rms_norm_backward(dense[2], dense[1], gain, 1e-6, dw[1]), "dx"
    )
    same_bits(dw[0], dw[1], "dw")


def test_graph_replay_gives_the_bits_of_eager_calls() -> None:
    from rl_kernel.ops.attention.triton_kernel import paged_attention
    from rl_kernel.ops.gemm.cublaslt import gemm
    from rl_kernel.ops.linear_logp.triton_kernel import linear_logp
    from rl_kernel.ops.rms_norm.triton_kernel import rms_norm

    x, w, gain = normal(8, 4096, seed=1), normal(4096, 4096, seed=2, scale=0.02), normal(4096, seed=3)
    caches = [normal(600, 16, KV_HEADS, DIM, seed=s) for s in (4, 5)]
    table = torch.randperm(600, device="cuda").int()[:560].reshape(8, 70)
    lens = torch.tensor([1, 64, 65, 1000, 1024, 1025, 1100, 16], dtype=torch.int32, device="cuda")
    cu, target = offsets(*[1] * 8), torch.arange(8, device="cuda")

    def step() -> tuple[torch.Tensor, ...]:
        y = gemm(rms_norm(x, gain, 1e-6), w, segments=8)
        out = paged_attention(y.view(8, HEADS, DIM), *caches, table, cu, lens)
        return out, *linear_logp(out.view(8, 4096), w, target, temperature=1.0, vocab=4000)

    eager = [t.clone() for t in step()]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = step()
    for _ in range(2):
        for tensor in held:
            tensor.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for a, b, name in zip(held, eager, ("attention", "logp", "lse"), strict=True):
            same_bits(a, b, name)


def test_calls_in_a_row_do_not_meet() -> None:
    """A kernel is on the device before the one ahead of it is over, and partials, flags and counters are used again.

    Calls of other inputs in a row, eager and as a graph: their outputs are those of calls far apart.
    """
    from rl_kernel.ops.attention.triton_kernel import attention, paged_attention
    from rl_kernel.ops.gemm.cublaslt import gemm

    cu, many, table = offsets(1), offsets(700), torch.randperm(512, device="cuda").int()[None]
    lens = torch.tensor([8000], dtype=torch.int32, device="cuda")

    def calls(seed: int) -> list[Callable[[], torch.Tensor]]:
        query, w = normal(1, HEADS, DIM, seed=seed), normal(4096, 4096, seed=seed, scale=0.02)
        caches = [normal(512, 16, KV_HEADS, DIM, seed=seed + half) for half in (10, 20)]
        q, k, v = (normal(700, h, DIM, seed=seed + h) for h in (HEADS, KV_HEADS, KV_HEADS))
        v[600, 3, 5] = float("inf")  # hidden from some rows: half tiles that are computed again
        rows = [normal(n, 4096, seed=seed) for n in (64, 256, 300)]
        return [
            lambda: paged_attention(query, *caches, table, cu, lens),
            lambda: attention(q, k, v, many, many)[0],
            *(lambda x=x: gemm(x, w, segments=8) for x in rows),
        ]

    of_seed = [calls(seed) for seed in range(6)]
    row = [call for same in zip(*of_seed, strict=True) for call in same]
    apart = []
    for call in row:
        apart.append(call())
        torch.cuda.synchronize()
    close = [[call() for call in row] for _ in range(3)]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        row[0]()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        held = [call() for call in row]
    for tensor in held:
        tensor.fill_(float("nan"))
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    for found, how in (*((c, "eager") for c in close), (held, "replayed")):
        for a, b in zip(found, apart, strict=True):
            same_bits(a, b, how)


def test_the_logp_of_stored_logits_of_shards_and_of_the_fused_head_agree() -> None:
    from rl_kernel.ops.gemm.cublaslt import gemm
    from rl_kernel.ops.linear_logp import triton_kernel as op

    h, w = normal(70, 512, seed=1), normal(9000, 512, seed=2, scale=0.05)
    target = torch.arange(70, device="cuda") * 113 % 8900
    logp, lse = op.linear_logp(h, w, target, temperature=0.7, vocab=8900)
    logits = gemm(h, w, out_dtype=torch.float32)
    heat = torch.full((70,), 0.7, device="cuda")
    stored = op.logp_from_logits(logits, target[:, None], heat, vocab=8900)
    same_bits(stored[0][:, 0], logp, "logp of stored logits")
    same_bits(stored[1], lse, "lse of stored logits")
    shards = [
        op.linear_vocab_stats(h, part, target, temperature=0.7, vocab_start=start, vocab=8900)
        for start, part in ((0, w[:4096]), (4096, w[4096:]))
    ]
    merged = op.merge_vocab_stats(torch.cat([s[0] for s in shards], 1), torch.cat([s[1] for s in shards], 1))
    same_bits(merged, lse, "lse of two shards")
    same_bits(torch.maximum(shards[0][2], shards[1][2]) - merged, logp, "logp of two shards")


def test_cublaslt_keeps_the_settings_of_the_process() -> None:
    from rl_kernel.ops.gemm.cublaslt import gemm

    matmul = torch.backends.cuda.matmul
    before = (torch.backends.cuda.preferred_blas_library(), matmul.allow_bf16_reduced_precision_reduction)
    gemm(normal(64, 512, seed=1), normal(512, 512, seed=2))
    assert (torch.backends.cuda.preferred_blas_library(), matmul.allow_bf16_reduced_precision_reduction) == before


def test_a_nan_of_cublaslt_is_a_nan_and_the_next_op_stores_the_one_nan() -> None:
    from rl_kernel.ops.gemm.cublaslt import gemm
    from rl_kernel.ops.rms_norm.triton_kernel import rms_norm

    x, w = normal(64, 512, seed=1), normal(512, 512, seed=2)
    x[5, 7] = float("nan")
    y = gemm(x, w)
    assert y[5].isnan().all()
    assert not y[:5].isnan().any()
    z = rms_norm(y, normal(512, seed=3), 1e-6)
    assert (z[5].view(torch.int16) == 0x7FC0).all()
