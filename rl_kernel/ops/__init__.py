"""Strict ops: one folder an op, one table of backends a folder. `strict_plan` chooses one backend for each."""

import importlib

from rl_kernel.contract import ModelContract
from rl_kernel.plan import Backend, Plan

OPS = (
    "embedding",
    "gemm",
    "residual_add",
    "rms_norm",
    "rope",
    "swiglu",
    "attention",
    "linear_logp",
    "tree_all_reduce",
)


def tables() -> dict[str, tuple[Backend, ...]]:
    """Return op → its table of backends."""
    return {op: importlib.import_module(f"rl_kernel.ops.{op}").BACKENDS for op in OPS}


def strict_plan(contract: ModelContract, device: str = "cpu") -> Plan:
    """Choose one backend for every op of `contract` on `device`; PlanError where there is none."""
    return Plan.build(contract, device, tables())
