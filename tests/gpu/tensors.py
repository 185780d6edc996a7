"""Random device tensors and their way to the reference: bf16 as uint16 bit patterns, equality by bit pattern."""

import numpy as np
import torch

from rl_kernel.compare import compare_bits
from rl_kernel.contracts import model_contract
from rl_kernel.reference.ops import Reference
from tests.contracts.subjects import to_numpy

REFERENCE = Reference.of(model_contract("sm90"))


def normal(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """N(0, scale²), the same for the same seed and shape."""
    generator = torch.Generator("cuda").manual_seed(seed * 1000003 + len(shape))
    return (torch.randn(shape, generator=generator, device="cuda") * scale).to(dtype)


def ids(count: int, below: int, seed: int = 0) -> torch.Tensor:
    """Distinct int64 indices in ascending order."""
    chosen = np.sort(np.random.default_rng(seed).choice(below, min(count, below), replace=False))
    return torch.from_numpy(chosen.astype(np.int64)).cuda()


def offsets(*lengths: int) -> torch.Tensor:
    """Offsets of sequences laid one after another, int32."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda()


def same_as_reference(found: torch.Tensor, expected: np.ndarray, what: str) -> None:
    """Assert that a device tensor has the bits of a reference array."""
    difference = compare_bits(to_numpy(found), expected)
    assert difference.equal, f"{what}: {difference}"


def same_bits(a: torch.Tensor, b: torch.Tensor, what: str) -> None:
    """Assert that two device tensors have the same bits."""
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    width = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    differing = int((a.contiguous().view(width) != b.contiguous().view(width)).sum())
    assert a.numel() > 0
    assert differing == 0, f"{what}: {differing} of {a.numel()} values differ"
