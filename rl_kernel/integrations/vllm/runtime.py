"""What the strict layers of one worker share: the plan whose calls are counted, and the tensor-parallel group.

vLLM builds its layers without passing anything of ours down, so the runtime is in a module variable for exactly as
long as a model is being built; a layer takes its functions from it then and keeps them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rl_kernel.errors import PlanError
from rl_kernel.integrations.evidence import CountingPlan
from rl_kernel.integrations.opaque.plan import OpaquePlan


@dataclass(frozen=True, slots=True)
class StrictRuntime:
    """segments: parts of each row-parallel sum over all ranks; a rank owns segments / tp_size. group: of torch."""

    plan: CountingPlan
    segments: int
    tp_size: int
    tp_rank: int
    group: Any

    @property
    def opaque(self) -> bool:
        """Whether the layers' functions are torch operators, which take a layer's weight as it lies."""
        return isinstance(self.plan, OpaquePlan)

    @property
    def own_segments(self) -> int:
        """Segments of a row-parallel sum on this rank."""
        return self.segments // self.tp_size


_building: StrictRuntime | None = None


@contextmanager
def building_with(runtime: StrictRuntime) -> Iterator[None]:
    """Let the layers that are built inside take their functions from `runtime`."""
    global _building  # noqa: PLW0603
    previous, _building = _building, runtime
    try:
        yield
    finally:
        _building = previous


def current_runtime() -> StrictRuntime:
    """The runtime of the model that is being built; PlanError outside of that."""
    if _building is None:
        raise PlanError(
            "quantization 'rl_kernel_strict' is only the linear part of strict mode; "
            "build the engine with rl_kernel.integrations.vllm.engine_arguments()"
        )
    return _building
