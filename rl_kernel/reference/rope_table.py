"""The RoPE table: computed once, in float64 on the host, and shipped to every engine as fp32."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_kernel.contract import digest_of
from rl_kernel.errors import ModelError

F32 = npt.NDArray[np.float32]


def rope_table(theta: float, dim: int, max_position: int, scaling: Mapping[str, Any] | None = None) -> tuple[F32, F32]:
    """Return (cos, sin), each fp32 [max_position, dim/2]; angle = position / theta^(2i/dim).

    scaling: the `rope_scaling` of a Hugging Face config. None and type `default` are the only ones with a contract;
    ModelError names any other.
    """
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
    if kind != "default":
        raise ModelError(f"rope_scaling type {kind!r} has no contract; only plain RoPE (`default`) has one")
    frequency = np.float64(theta) ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    angle = np.arange(max_position, dtype=np.float64)[:, None] * frequency[None, :]
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def rope_digest(theta: float, dim: int, scaling: Mapping[str, Any] | None = None) -> str:
    """sha256 (hex) of the parameters that determine the table; two sides with equal digests rotate alike."""
    return digest_of({"theta": float(theta), "dim": dim, "scaling": dict(scaling) if scaling else None})
