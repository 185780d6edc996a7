"""Contracts as data: digests move with every part, and a plan never falls back."""

from dataclasses import replace

import pytest

from rl_kernel.contract import digest_of
from rl_kernel.contracts import model_contract
from rl_kernel.errors import ContractError, PlanError
from rl_kernel.ops import strict_plan
from rl_kernel.plan import Backend, Plan

CONTRACT = model_contract()


def test_the_digest_moves_with_every_part_of_a_contract() -> None:
    gemm = CONTRACT["gemm"]
    changed = [
        replace(gemm, version=2),
        replace(gemm, mma="sm90"),
        replace(gemm, exp2="poly"),
        replace(gemm, semantics=(*gemm.semantics, "one more step")),
        replace(gemm, parameters=(("lanes", 64),)),
    ]
    assert len({c.digest() for c in [gemm, *changed]}) == 6


def test_the_model_digest_moves_with_segments_and_with_any_op() -> None:
    other_op = replace(CONTRACT, ops=(replace(CONTRACT.ops[0], version=2), *CONTRACT.ops[1:]))
    assert len({c.digest() for c in (CONTRACT, model_contract(segments=2), other_op)}) == 3


def test_a_digest_is_the_same_for_any_order_of_keys() -> None:
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})


@pytest.mark.parametrize("segments", [0, 3, -2])
def test_segments_must_be_a_power_of_two(segments: int) -> None:
    with pytest.raises(ContractError, match=f"power of two.*got {segments}"):
        model_contract(segments=segments)


def test_an_unknown_profile_names_the_known_ones() -> None:
    with pytest.raises(ContractError, match="unknown numerics profile 'tpu'; choose one of portable"):
        model_contract("tpu")


def _backend(name: str, mma: str = "fma32", device: str = "cpu") -> Backend:
    return Backend("gemm", name, "nowhere", device, frozenset({mma}), backward=True)


def _tables(*gemm: Backend) -> dict[str, tuple[Backend, ...]]:
    return {c.op: (replace(_backend("x"), op=c.op),) for c in CONTRACT.ops} | {"gemm": gemm}


def test_a_plan_has_one_backend_for_every_op_of_the_contract() -> None:
    plan = strict_plan(CONTRACT, "cpu")
    assert {op: plan.resolve(op).device for op in plan.backends} == {c.op: "cpu" for c in CONTRACT.ops}


def test_no_backend_is_an_error_that_names_what_there_is() -> None:
    with pytest.raises(
        PlanError, match=r"no backend serves gemm on cpu under MMA model fma32.*; there is: b \(cpu, sm90, exp2 poly\)"
    ):
        Plan.build(CONTRACT, "cpu", _tables(_backend("b", mma="sm90")))


def test_two_claimants_are_an_error_not_a_priority_list() -> None:
    with pytest.raises(PlanError, match="2 backends claim it \\(a, b\\)"):
        Plan.build(CONTRACT, "cpu", _tables(_backend("a"), _backend("b")))


def test_a_backend_of_another_device_never_serves() -> None:
    with pytest.raises(PlanError, match="no backend serves gemm"):
        Plan.build(CONTRACT, "cpu", _tables(_backend("a", device="cuda")))
