"""Each differentiable op: backward has the reference's bits, and the reference's formula is the derivative.

The derivative is float64 autograd of the plain formula. Between it and a strict gradient lie at most four roundings
to bf16, each at most 2^-9 of a term, and fp32 roundings that are small beside them; so an element may be off by
2^-7 of its majorant: the same sum with every term positive.
"""

import pytest
import torch

from rl_kernel.contracts import model_contract
from rl_kernel.integrations.evidence import CountingPlan
from rl_kernel.integrations.megatron.logp import LinearLogp
from rl_kernel.ops import strict_plan
from rl_kernel.reference.rope_table import rope_table
from rl_kernel.torch_autograd import StrictOps, TensorParallel, split_qkv
from tests.integrations.megatron.reference_backend import reference_plan

SLACK = 2.0**-7
EPS = 1e-5


def ops_of(plan):
    find = CountingPlan(plan, engine="test").function
    return StrictOps(find, 1, TensorParallel()), find


@pytest.fixture(params=["cpu", "reference"])
def bound(request):
    contract = model_contract()
    return ops_of(strict_plan(contract, "cpu") if request.param == "cpu" else reference_plan(contract))


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(11)
    return lambda *shape: torch.randn(*shape, generator=generator).to(torch.bfloat16)


def weight(x):
    x = torch.nn.Parameter(x)
    x.main_grad = torch.zeros(x.shape)
    return x


def within(found, derivative, majorant):
    error = (found.double() - derivative).abs()
    assert majorant.min() >= 0
    return bool((error <= SLACK * majorant).all())


def derivative(function, *inputs, along):
    """Float64 gradients of <function(inputs), along>."""
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    (function(*leaves) * along.double()).sum().backward()
    return [leaf.grad for leaf in leaves]


def test_linear(bound, draw):
    ops, _ = bound
    for linear in (ops.column_linear, ops.row_linear):
        x, w, dy = draw(9, 40).requires_grad_(), weight(draw(24, 40)), draw(9, 24)
        linear(x, w).backward(dy)
        dx, dw = derivative(lambda x, w: x @ w.T, x, w, along=dy)
        assert within(x.grad, dx, dy.double().abs() @ w.detach().double().abs())
        assert within(w.main_grad, dw, dy.double().abs().T @ x.detach().double().abs())


@pytest.mark.parametrize("heads", [0, 3])
def test_rms_norm(bound, draw, heads):
    ops, _ = bound
    x, w, dy = draw(12, 200).requires_grad_(), weight(draw(200)), draw(12, 200)
    dw = torch.zeros(max(heads, 1), 200)
    ops.norm(x, w, EPS, dw).backward(dy)

    def formula(x, w):
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * w

    true_dx, true_dw = derivative(formula, x, w, along=dy)
    x64 = x.detach().double()
    r = (x64.square().mean(-1, keepdim=True) + EPS).rsqrt()
    t, g = (x64 * r).abs(), (dy.double() * w.detach().double()).abs()
    assert within(x.grad, true_dx, r * (g + t * (g * t).mean(-1, keepdim=True)))
    assert within(dw.sum(0), true_dw, (dy.double().abs() * t).sum(0))


def test_rope(bound, draw):
    ops, _ = bound
    cos, sin = (torch.from_numpy(a) for a in rope_table(1e4, 32, 64))
    x, positions, dy = draw(7, 3, 32).requires_grad_(), torch.tensor([0, 1, 2, 63, 0, 1, 5]), draw(7, 3, 32)
    ops.rotate(x, cos, sin, positions).backward(dy)

    c, s = (table[positions][:, None].double() for table in (cos, sin))

    def formula(x):
        a, b = x.chunk(2, -1)
        return torch.cat([a * c - b * s, b * c + a * s], -1)

    (true,) = derivative(formula, x, along=dy)
    first, second = dy.double().abs().chunk(2, -1)
    assert within(x.grad, true, torch.cat([first * c.abs() + second * s.abs(), second * c.abs() + first * s.abs()], -1))


def test_swiglu(bound, draw):
    ops, _ = bound
    x, dy = (4 * draw(11, 96)).requires_grad_(), draw(11, 48)
    ops.swiglu_activation(x).backward(dy)
    (true,) = derivative(lambda x: torch.nn.functional.silu(x[:, :48]) * x[:, 48:], x, along=dy)
    gate, up = x.detach().double().chunk(2, -1)
    sigmoid, size = torch.sigmoid(gate), dy.double().abs()
    d_gate = size * up.abs() * sigmoid * (1 + gate.abs() * (1 - sigmoid))
    assert within(x.grad, true, torch.cat([d_gate, size * gate.abs() * sigmoid], -1))


def test_attention(bound, draw):
    ops, _ = bound
    cu = torch.tensor([0, 1, 70, 90], dtype=torch.int32)
    q, k, v, dy = (draw(90, h, 32).requires_grad_() for h in (4, 2, 2, 4))
    ops.self_attention(q, k, v, cu).backward(dy.detach())
    visible = torch.block_diag(*(torch.ones(n, n) for n in cu.diff())).tril().bool()

    def formula(q, k, v):
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * 32**-0.5
        return torch.einsum("hij,jhd->ihd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)

    true = derivative(formula, q, k, v, along=dy)
    for found, wanted, majorant in zip((q, k, v), true, attention_majorants(q, k, v, dy, visible), strict=True):
        assert within(found.grad, wanted, majorant)


def attention_majorants(q, k, v, dy, visible):
    q, k, v, dy = (x.detach().double() for x in (q, k, v, dy))
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * 32**-0.5
    p = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    out = torch.einsum("hij,jhd->ihd", p, v.abs())
    dp, delta = torch.einsum("ihd,jhd->hij", dy.abs(), v.abs()), (dy.abs() * out).sum(-1).T[:, :, None]
    ds = p * (dp + delta) * 32**-0.5
    dk = torch.einsum("hij,ihd->jhd", ds, q.abs())
    dv = torch.einsum("hij,ihd->jhd", p, dy.abs())
    pairs = (x.view(len(x), 2, 2, -1).sum(2) for x in (dk, dv))
    return torch.einsum("hij,jhd->ihd", ds, k.abs()), *pairs


def test_linear_logp(bound, draw):
    ops, find = bound
    vocab, heat = 150, 0.8
    logp = LinearLogp(ops, find, 0, vocab)
    h, w, target = (
        draw(10, 24),
        weight(torch.cat([draw(vocab, 24), torch.zeros(42, 24).bfloat16()])),
        torch.arange(10) * 13,
    )
    _, lse = logp.forward(h, w.detach(), target, heat)
    along = torch.randn(10, generator=torch.Generator().manual_seed(2))
    dh = logp.backward(along, h, w.detach(), target, lse, heat, w.main_grad)

    def formula(h, w):
        return torch.log_softmax(h @ w[:vocab].T / heat, -1).gather(1, target[:, None])[:, 0]

    true_dh, true_dw = derivative(formula, h, w, along=along)
    p = torch.softmax(h.double() @ w.detach().double()[:vocab].T / heat, -1)
    p = p.scatter_add(1, target[:, None], torch.ones(10, 1, dtype=torch.float64))
    d = torch.nn.functional.pad(p * along.double().abs()[:, None] / heat, (0, 42))
    assert within(dh, true_dh, d @ w.detach().double().abs())
    assert within(w.main_grad, true_dw, d.T @ h.double().abs())
    assert not w.main_grad[vocab:].any()


def test_residual_branches_meet_in_one_bf16_addition(bound, draw):
    ops, _ = bound
    x, w, dy = draw(6, 64).requires_grad_(), weight(draw(64)), draw(6, 64)
    (ops.add(ops.norm(x, w, EPS, torch.zeros(1, 64)), x)).backward(dy)
    branch = ops.rms_norm_backward(dy, x.detach(), w.detach(), EPS, torch.zeros(1, 64))
    assert torch.equal(x.grad.view(torch.int16), ops.residual_add(branch, dy).view(torch.int16))


def test_split_qkv_is_undone_by_its_backward(draw):
    qkv = draw(5, 2 * (3 + 2) * 8).requires_grad_()
    q, k, v = split_qkv(qkv, 2, 8)
    assert (q.shape, k.shape, v.shape) == ((5, 6, 8), (5, 2, 8), (5, 2, 8))
    (q, k, v) = (x.detach() for x in (q, k, v))
    torch.autograd.backward(split_qkv(qkv, 2, 8), (q, k, v))
    assert torch.equal(qkv.grad, qkv)


@pytest.mark.parametrize("op", ["norm", "swiglu", "rope"])
def test_cpu_and_reference_give_the_same_gradient_bits(op, draw):
    found = []
    x, dy = draw(8, 2, 64), draw(8, 2, 64)
    cos, sin = (torch.from_numpy(a) for a in rope_table(1e4, 64, 64))
    for plan in (strict_plan(model_contract(), "cpu"), reference_plan(model_contract())):
        ops, _ = ops_of(plan)
        leaf, dw = x.clone().requires_grad_(), torch.zeros(2, 64)
        if op == "norm":
            ops.norm(leaf.view(16, 64), torch.ones(64).bfloat16(), EPS, dw).backward(dy.view(16, 64))
        elif op == "swiglu":
            ops.swiglu_activation(leaf.view(8, 128)).backward(dy.view(8, 128)[:, :64].contiguous())
        else:
            ops.rotate(leaf, cos, sin, torch.arange(8)).backward(dy)
        found.append((leaf.grad, dw))
    assert torch.equal(found[0][0].view(torch.int16), found[1][0].view(torch.int16))
    assert torch.equal(found[0][1], found[1][1])


def test_a_gradient_without_its_correction_term_is_rejected(draw):
    # dx of RMSNorm with the part through the mean left out: what the bound must catch.
    x, w, dy = draw(12, 200).requires_grad_(), draw(200), draw(12, 200)
    x64, g = x.detach().double(), dy.double() * w.double()
    r = (x64.square().mean(-1, keepdim=True) + EPS).rsqrt()
    (true,) = derivative(lambda x: x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * w.double(), x, along=dy)
    t = (x64 * r).abs()
    assert not within(r * g, true, r * (g.abs() + t * (g.abs() * t).mean(-1, keepdim=True)))
