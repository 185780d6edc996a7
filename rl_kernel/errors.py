"""Every error that rl_kernel raises on purpose.

    RlKernelError
    ├── ContractError        a contract, profile or MMA model that does not exist or does not fit
    ├── PlanError            no backend serves an op as asked; a fallback is never taken instead
    ├── EvidenceError        an op on the path to a logprob was served by something else
    ├── ModelError           a model folder that is missing, incomplete or of another architecture
    ├── WeightDigestError    weights whose bytes are not the ones that were announced
    └── ShapeError           an argument of the wrong shape, dtype or layout

The message names the thing that is wrong, its value, and what would be right.
"""

__all__ = [
    "ContractError",
    "EvidenceError",
    "ModelError",
    "PlanError",
    "RlKernelError",
    "ShapeError",
    "WeightDigestError",
]


class RlKernelError(Exception):
    """Base of the tree; catch this to catch any of them."""


class ContractError(RlKernelError, ValueError):
    """A contract, profile or MMA model that does not exist or does not fit its use."""


class PlanError(RlKernelError, LookupError):
    """No backend serves an op as asked. The message names the nearest one that works."""


class EvidenceError(RlKernelError, RuntimeError):
    """An op on the path to a logprob was served by something other than the plan."""


class ModelError(RlKernelError, ValueError):
    """A model folder that is missing, incomplete or of an architecture that has no contract."""


class WeightDigestError(RlKernelError, ValueError):
    """Weights whose bytes differ from the announced digest."""


class ShapeError(RlKernelError, ValueError):
    """An argument of the wrong shape, dtype or layout."""
