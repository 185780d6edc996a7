"""Strict ops: one folder an op, one table of backends a folder. `strict_plan` chooses one backend for each."""

import importlib
import platform

from rl_kernel.contract import ModelContract
from rl_kernel.errors import PlanError
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


def device_of(contract: ModelContract) -> str:
    """The device that serves every op of `contract`, here or elsewhere: `cpu` or `cuda`; PlanError if none does."""
    mma = contract.profile.mma
    device = next((b.device for b in tables()["gemm"] if b.serves(contract["gemm"])), None)
    if device is None:
        raise PlanError(f"no backend computes products by MMA model {mma}; profile portable runs on any CPU")
    strict_plan(contract, device)
    return device


def usable_device(contract: ModelContract) -> str:
    """As `device_of`; PlanError also if this process has no such device."""
    import torch  # noqa: PLC0415  who only asks what there is, as a job's driver does, is spared it

    device = device_of(contract)
    if device != "cpu" and not torch.cuda.is_available():
        raise PlanError(
            f"MMA model {contract.profile.mma} is a GPU's, and this process sees none; profile portable runs on any CPU"
        )
    return device


def arch_of(device: str) -> str:
    """What an engine's environment says of this process's `device`: `cpu-x86_64`, `cuda-sm90`."""
    if device == "cpu":
        return f"cpu-{platform.machine()}"
    import torch  # noqa: PLC0415  as above

    major, minor = torch.cuda.get_device_capability()
    return f"{device}-sm{major}{minor}"


def strict_plan(contract: ModelContract, device: str = "cpu") -> Plan:
    """Choose one backend for every op of `contract` on `device`; PlanError where there is none."""
    return Plan.build(contract, device, tables())
