"""A shape, dtype or layout without proof raises an error that names it and the nearest that works."""

import pytest
import torch

from rl_kernel.contracts import model_contract
from rl_kernel.errors import PlanError, ShapeError
from rl_kernel.ops import strict_plan
from tests.gpu.tensors import normal, offsets

pytestmark = pytest.mark.gpu


def test_a_cuda_plan_serves_sm90_and_no_other_profile() -> None:
    plan = strict_plan(model_contract("sm90"), "cuda")
    assert {plan.resolve(op.op).device for op in plan.contract.ops} == {"cuda"}
    for profile in ("portable", "sm90_poly", "sm80", "cdna3"):
        with pytest.raises(PlanError, match=r"there is: .*cpu"):
            strict_plan(model_contract(profile), "cuda")


def test_wrong_arguments_of_a_product_are_named() -> None:
    from rl_kernel.ops.gemm.cublaslt import gemm

    x, w = normal(4, 64), normal(8, 64)
    with pytest.raises(ShapeError, match=r"x is torch\.float32"):
        gemm(x.float(), w)
    with pytest.raises(ShapeError, match=r"x has shape \[4, 64\], expected \[any, 32\]"):
        gemm(x, w[:, :32].contiguous())
    with pytest.raises(ShapeError, match="segments 3; the kernel has 1, 2, 4 and 8"):
        gemm(x, w, segments=3)
    with pytest.raises(ShapeError, match="20 is not divisible by segments 8"):
        gemm(x[:, :20], w[:, :20].contiguous(), segments=8)
    with pytest.raises(ShapeError, match="use the cpu backend"):
        gemm(x.cpu(), w.cpu())
    with pytest.raises(ShapeError, match="strides"):
        gemm(normal(64, 4).t(), w)


def test_a_head_dim_without_a_kernel_names_the_nearest() -> None:
    from rl_kernel.ops.attention.triton_kernel import attention, attention_backward

    q, k = normal(4, 2, 96), normal(4, 1, 96)
    with pytest.raises(ShapeError, match=r"head_dim 96; .* nearest (64|128)"):
        attention(q, k, k, offsets(4), offsets(4))
    rows = torch.zeros(4, 2, device="cuda")
    with pytest.raises(ShapeError, match=r"attention_backward: head_dim 96; .* nearest (64|128)"):
        attention_backward(q, q, k, k, q, rows, rows, offsets(4))
    with pytest.raises(ShapeError, match="3 query heads are no multiple of 2"):
        attention(normal(4, 3, 64), normal(4, 2, 64), normal(4, 2, 64), offsets(4), offsets(4))


def test_an_id_or_position_outside_its_table_becomes_nan_not_a_neighbour() -> None:
    from rl_kernel.ops.embedding.triton_kernel import embedding
    from rl_kernel.ops.linear_logp.triton_kernel import linear_logp, logp_from_logits
    from rl_kernel.ops.rope.triton_kernel import rope

    table, outside = normal(10, 32), torch.tensor([3, 10, -1], device="cuda")
    assert embedding(outside, table).isnan().all(1).tolist() == [False, True, True]
    cos, sin = torch.ones((10, 16), device="cuda"), torch.zeros((10, 16), device="cuda")
    assert rope(normal(3, 1, 32), cos, sin, outside).isnan().all(2).flatten().tolist() == [False, True, True]
    logp, _ = linear_logp(normal(3, 32), table, outside, temperature=1.0, vocab=9)
    assert logp.isnan().tolist() == [False, True, True]
    ids = torch.tensor([[8, 9, 11, -1, 12]], device="cuda")
    logp, _ = logp_from_logits(torch.zeros(1, 12, device="cuda"), ids, torch.ones(1, device="cuda"), vocab=9)
    assert logp.isnan().tolist() == [[False, True, True, True, True]]
