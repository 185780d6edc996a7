"""The contracts that this auditor can hold somebody to, by digest."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from rl_kernel.contract import PROFILES, ModelContract
from rl_kernel.contracts import model_contract

SEGMENTS: Final = (1, 2, 4, 8, 16)


def known_contracts() -> Mapping[str, ModelContract]:
    """Every model contract of every profile and segment count, by its digest."""
    contracts = (model_contract(profile, segments=segments) for profile in PROFILES for segments in SEGMENTS)
    return MappingProxyType({contract.digest(): contract for contract in contracts})
