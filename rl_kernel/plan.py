"""Which backend serves which op in this process.

`Plan.resolve` returns exactly one backend or raises; there is no priority list and no fallback. What the
integrations call is what `resolve` returned, and the evidence (`integrations.evidence`) records it.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rl_kernel.contract import ModelContract, OpContract
from rl_kernel.errors import PlanError

COMPILED_ONLY: Final = "was compiled for gfx942 and its instructions were read, but it was never run on hardware"


@dataclass(frozen=True, slots=True)
class Backend:
    """One implementation of an op, and what it claims.

    module: where it lives; imported when the plan is resolved, not before.
    device: `cpu`, `cuda` or `rocm`.
    mma: the MMA models under which it is bitwise-equal to the reference; empty for ops without matrix products.
    backward: whether it has the gradients too.
    exp2: the exp2 models that it computes, where the op has one.
    unproved: why its claim does not count yet, so that no plan chooses it; empty where it was shown on hardware.
    """

    op: str
    name: str
    module: str
    device: str
    mma: frozenset[str]
    backward: bool
    exp2: frozenset[str] = frozenset({"poly"})
    unproved: str = ""

    def function(self, name: str) -> Callable[..., Any]:
        """Return the public function `name` of the backend's module."""
        function: Callable[..., Any] = getattr(importlib.import_module(self.module), name)
        return function

    def serves(self, contract: OpContract) -> bool:
        """Whether this backend claims the contract's MMA and exp2 models (ops without them are always served)."""
        return (contract.mma is None or contract.mma in self.mma) and (
            contract.exp2 is None or contract.exp2 in self.exp2
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """One backend an op, chosen once, for one device and one model contract."""

    contract: ModelContract
    device: str
    backends: Mapping[str, Backend]

    @classmethod
    def build(cls, contract: ModelContract, device: str, tables: Mapping[str, tuple[Backend, ...]]) -> "Plan":
        """Choose the backend of every op in `contract` from `tables` (op → backends); PlanError if one has none."""
        return cls(contract, device, {c.op: _choose(c, device, tables.get(c.op, ())) for c in contract.ops})

    def resolve(self, op: str) -> Backend:
        """Return the one backend of `op`."""
        try:
            return self.backends[op]
        except KeyError:
            raise PlanError(f"the plan has no op {op!r}; it has {', '.join(sorted(self.backends))}") from None


def _choose(contract: OpContract, device: str, table: tuple[Backend, ...]) -> Backend:
    able = [b for b in table if b.device == device and b.serves(contract)]
    proven = [b for b in able if not b.unproved]
    if len(proven) == 1:
        return proven[0]
    if proven:
        names = ", ".join(b.name for b in proven)
        raise PlanError(f"{contract.op} on {device}: {len(proven)} backends claim it ({names})")
    others = ", ".join(
        f"{b.name} ({b.device}, {'/'.join(sorted(b.mma)) or 'any MMA model'}, exp2 {'/'.join(sorted(b.exp2))})"
        for b in table
        if not b.unproved
    )
    if able:
        raise PlanError(
            f"{contract.op} on {device}: backend {able[0].name} {able[0].unproved}, so nothing proves its bits; "
            f"proven are: {others or 'none'}"
        )
    raise PlanError(
        f"no backend serves {contract.op} on {device} under {_models(contract)}; there is: {others or 'none'}"
    )


def _models(contract: OpContract) -> str:
    """The models that the op has: most have an MMA model or an exp2 model, some have both or none."""
    found = [f"{kind} model {name}" for kind, name in (("MMA", contract.mma), ("exp2", contract.exp2)) if name]
    return " and ".join(found) or "its contract"
