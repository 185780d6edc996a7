"""The contracts in force. `model_contract` is the one door: profile and segments in, every op's contract out."""

from rl_kernel.contract import ModelContract, profile
from rl_kernel.contracts.v1 import ops
from rl_kernel.errors import ContractError

__all__ = ["model_contract"]


def model_contract(profile_name: str = "portable", *, segments: int = 1) -> ModelContract:
    """Return contract version 1 of every op under `profile_name`.

    segments: a power of two; TP degrees that divide it give the same bits.
    """
    if segments < 1 or segments & (segments - 1):
        raise ContractError(f"segments must be a power of two (1, 2, 4, …), got {segments}")
    chosen = profile(profile_name)
    return ModelContract(profile=chosen, segments=segments, ops=ops(chosen))
