"""Equal bits at the shapes of Qwen3-8B, where the reference is slow: sampled rows and columns, whole chains."""

import numpy as np
import pytest
import torch

from tests.contracts.subjects import to_numpy
from tests.gpu.tensors import REFERENCE, ids, normal, offsets, same_as_reference

HIDDEN, FFN, HEADS, KV_HEADS, DIM, VOCAB = 4096, 12288, 32, 8, 128, 151936
LINEARS = {"qkv": (6144, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * FFN, HIDDEN), "down": (HIDDEN, FFN)}

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("segments", [1, 2, 4, 8])
@pytest.mark.parametrize("m", [1, 8, 31, 32, 64, 256, 2048])
@pytest.mark.parametrize("layer", LINEARS)
def test_linear_forward(layer: str, m: int, segments: int) -> None:
    from rl_kernel.ops.gemm.cublaslt import gemm

    n, k = LINEARS[layer]
    x, w = normal(m, k, seed=1), normal(n, k, seed=2, scale=0.02)
    rows, columns = ids(4, m, 3), ids(256, n, 4)
    expected = REFERENCE.gemm_fp32(to_numpy(x[rows]), to_numpy(w[columns]), segments=segments)
    wide = gemm(x, w, segments=segments, out_dtype=torch.float32)
    same_as_reference(wide[rows][:, columns], expected, "fp32")
    expected = REFERENCE.gemm(to_numpy(x[rows]), to_numpy(w[columns]), segments=segments)
    same_as_reference(gemm(x, w, segments=segments)[rows][:, columns], expected, "bf16")


@pytest.mark.parametrize(("m", "segments"), [(1, 1), (64, 1), (2048, 1), (8, 8), (2048, 4), (2048, 8)])
@pytest.mark.parametrize("layer", LINEARS)
def test_linear_gradients(layer: str, m: int, segments: int) -> None:
    from rl_kernel.ops.gemm.cublaslt import gemm_dw_, gemm_dx

    n, k = LINEARS[layer]
    dy, x, w = normal(m, n, seed=1), normal(m, k, seed=2), normal(n, k, seed=3, scale=0.02)
    rows, columns, features = ids(4, m, 3), ids(256, k, 4), ids(8, n, 5)
    expected = REFERENCE.gemm_dx(to_numpy(dy[rows]), to_numpy(w[:, columns]), segments=segments)
    same_as_reference(gemm_dx(dy, w, segments=segments)[rows][:, columns], expected, "dx")
    if segments == 1:
        start = normal(n, k, seed=6, dtype=torch.float32)
        main_grad = gemm_dw_(start.clone(), dy, x)
        chosen = start[features][:, columns]
        expected = REFERENCE.gemm_dw(to_numpy(chosen), to_numpy(dy[:, features]), to_numpy(x[:, columns]))
        same_as_reference(main_grad[features][:, columns], expected, "dw")


@pytest.mark.parametrize("length", [1023, 2048, 5000])
def test_attention_forward(length: int) -> None:
    from rl_kernel.ops.attention.triton_kernel import attention

    q = normal(length, HEADS, DIM, seed=1)
    k, v = (normal(length, KV_HEADS, DIM, seed=s) for s in (2, 3))
    cu = offsets(length)
    out, m, l = attention(q, k, v, cu, cu)
    head = 3
    group = slice(head * 4, head * 4 + 4)
    for i in (0, 64, length // 2, length - 1):
        keys, values = (to_numpy(x[: i + 1, head : head + 1]) for x in (k, v))
        one = np.array([0, 1], np.int32), np.array([0, i + 1], np.int32)
        expected = REFERENCE.attention(to_numpy(q[i : i + 1, group]), keys, values, *one)
        for found, want, name in zip((out, m, l), expected, ("out", "m", "l"), strict=True):
            same_as_reference(found[i : i + 1, group], want, f"{name} of query {i}")


@pytest.mark.parametrize("lengths", [(600,), (129, 1, 300)])
def test_attention_backward(lengths: tuple[int, ...]) -> None:
    from rl_kernel.ops.attention.triton_kernel import attention, attention_backward

    tokens, cu = sum(lengths), offsets(*lengths)
    q, dout = normal(tokens, HEADS, DIM, seed=1), normal(tokens, HEADS, DIM, seed=4)
    k, v = (normal(tokens, KV_HEADS, DIM, seed=s) for s in (2, 3))
    out, m, l = attention(q, k, v, cu, cu)
    found = attention_backward(dout, q, k, v, out, m, l, cu)
    head, group = slice(5, 6), slice(20, 24)
    parts = (dout[:, group], q[:, group], k[:, head], v[:, head], out[:, group], m[:, group], l[:, group], cu)
    expected = REFERENCE.attention_backward(*map(to_numpy, parts))
    for x, want, name, heads in zip(found, expected, ("dq", "dk", "dv"), (group, head, head), strict=True):
        same_as_reference(x[:, heads], want, name)


@pytest.mark.parametrize("tokens", [1, 40, 300])
def test_linear_logp_forward(tokens: int) -> None:
    from rl_kernel.ops.linear_logp.triton_kernel import linear_logp

    h, w = normal(tokens, HIDDEN, seed=1), normal(VOCAB, HIDDEN, seed=2, scale=0.02)
    target = torch.arange(tokens, device="cuda") * 7919 % VOCAB
    how = {"temperature": 0.8, "vocab": VOCAB - 267}
    logp, lse = linear_logp(h, w, target, **how)
    row = slice(tokens - 1, tokens)
    expected = REFERENCE.linear_logp(to_numpy(h[row]), to_numpy(w), to_numpy(target[row]), **how)
    same_as_reference(logp[row], expected[0], "logp")
    same_as_reference(lse[row], expected[1], "lse")


@pytest.mark.parametrize("segments", [1, 8])
def test_linear_logp_backward(segments: int) -> None:
    from rl_kernel.ops.linear_logp.triton_kernel import linear_logp, linear_logp_backward

    rows, tokens = 8192, 20
    h, w = normal(tokens, HIDDEN, seed=1), normal(rows, HIDDEN, seed=2, scale=0.02)
    target = torch.arange(tokens, device="cuda") * 401 % 8000
    how = {"temperature": 0.8, "vocab": 8000}
    _, lse = linear_logp(h, w, target, **how)
    dlogp, grad = normal(tokens, seed=3, dtype=torch.float32), normal(rows, HIDDEN, seed=4, dtype=torch.float32)
    arguments = [to_numpy(x) for x in (dlogp, h, w, target, lse, grad)]
    dh = linear_logp_backward(dlogp, h, w, target, lse, main_grad=grad, segments=segments, **how)
    expected = REFERENCE.linear_logp_backward(*arguments, segments=segments, **how)
    same_as_reference(dh, expected[0], "dh")
    same_as_reference(grad, expected[1], "main_grad")


@pytest.mark.parametrize("tokens", [1, 65, 3000])
def test_rows(tokens: int) -> None:
    from rl_kernel.ops.rms_norm.triton_kernel import add_rms_norm, rms_norm, rms_norm_backward
    from rl_kernel.ops.swiglu.triton_kernel import swiglu, swiglu_backward

    sample = ids(20, tokens, 9)
    x, residual, w = normal(tokens, HIDDEN, seed=1), normal(tokens, HIDDEN, seed=2), normal(HIDDEN, seed=3)
    y, total = add_rms_norm(x, residual, w, 1e-6)
    expected = REFERENCE.residual_add(to_numpy(x[sample]), to_numpy(residual[sample]))
    same_as_reference(total[sample], expected, "residual")
    same_as_reference(y[sample], REFERENCE.rms_norm(expected, to_numpy(w), 1e-6), "add_rms_norm")
    dw = normal(1, HIDDEN, seed=5, dtype=torch.float32)
    want = REFERENCE.rms_norm_backward(to_numpy(x), to_numpy(residual), to_numpy(w), 1e-6, to_numpy(dw))
    same_as_reference(rms_norm_backward(x, residual, w, 1e-6, dw), want[0], "dx")
    same_as_reference(dw, want[1], "dw")
    heads, gain = normal(tokens, HEADS, DIM, seed=6), normal(DIM, seed=7)
    same_as_reference(rms_norm(heads, gain, 1e-6), REFERENCE.rms_norm(to_numpy(heads), to_numpy(gain), 1e-6), "q-norm")
    dw = torch.zeros((HEADS, DIM), device="cuda")
    flat = (to_numpy(heads.reshape(-1, DIM)),) * 2
    want = REFERENCE.rms_norm_backward(*flat, to_numpy(gain), 1e-6, to_numpy(dw))
    same_as_reference(rms_norm_backward(heads, heads, gain, 1e-6, dw).reshape(-1, DIM), want[0], "q-norm dx")
    same_as_reference(dw, want[1], "q-norm dw")
    gates, dy = normal(tokens, 2 * FFN, seed=8, scale=3.0), normal(tokens, FFN, seed=9)
    same_as_reference(swiglu(gates)[sample], REFERENCE.swiglu(to_numpy(gates[sample])), "swiglu")
    want = REFERENCE.swiglu_backward(to_numpy(dy[sample]), to_numpy(gates[sample]))
    same_as_reference(swiglu_backward(dy, gates)[sample], want, "swiglu backward")


def test_swiglu_of_every_gate() -> None:
    """All 65,536 of them: what stands for the division has its bits."""
    from rl_kernel.ops.swiglu.triton_kernel import swiglu

    gates = torch.arange(-(1 << 15), 1 << 15, device="cuda").to(torch.int16).view(torch.bfloat16)
    for up in (1.0, -3.0, 2.0**-40, float("inf")):
        x = torch.cat((gates, torch.full_like(gates, up)))[None]
        same_as_reference(swiglu(x), REFERENCE.swiglu(to_numpy(x)), f"up = {up}")
