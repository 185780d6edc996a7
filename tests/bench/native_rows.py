"""Fused native kernels for operations on rows: torch.compile's own (inductor), and vLLM's where it is installed.

They are peers of speed only: each rounds and sums in its own order.
"""

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tests.bench.native_peers import batch_invariant, load

EPS = 1e-6
Op = Callable[..., object]


@cache
def vllm() -> Any:
    """vLLM's compiled operators; None, and a line that says so, where there are none."""
    found = importlib.util.find_spec("vllm")
    for folder in (found.submodule_search_locations or []) if found else []:
        library = Path(folder) / "_C_stable_libtorch.abi3.so"
        if library.exists():
            torch.ops.load_library(str(library))
            return torch.ops._C
    print("vLLM's kernels of rows: not measured (no compiled vllm is installed)")
    return None


def compiled(f: Op) -> Op:
    """F as inductor fuses it, compiled for each shape by itself."""
    fused: Op = torch.compile(f, dynamic=False)
    return fused


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    c, s = cos[positions][:, None], sin[positions][:, None]
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), dim=-1).bfloat16()


def rope(cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> dict[str, Op]:
    """Rotations of one tensor, or of queries and keys; vLLM's in place, with its table in bf16."""

    def rotate(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [_rotated(x, cos, sin, positions) for x in tensors]

    peers = {"inductor": compiled(rotate)}
    if vllm() is not None:
        table = torch.cat((cos, sin), dim=1).bfloat16()

        def in_place(q: torch.Tensor, k: torch.Tensor | None = None) -> None:
            flat = [None if x is None else x.view(len(positions), -1) for x in (q, k)]
            vllm().rotary_embedding(positions, *flat, q.shape[-1], table, True)

        peers["vLLM"] = in_place
    return peers


def _megatron() -> Any:
    """Megatron-core's fused SwiGLU, which needs no build of its own as its norms and rotations do; or None."""
    return load("megatron.core.fusions.fused_bias_swiglu", "Megatron-core's fused SwiGLU")


def swiglu() -> dict[str, Op]:
    """Of x[T,2I] = gate, up."""

    def gated(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    peers = {"inductor": compiled(gated)}
    if vllm() is not None:

        def fused(x: torch.Tensor) -> None:
            vllm().silu_and_mul(torch.empty_like(x[:, : x.shape[1] // 2]), x)

        peers["vLLM"] = fused
    if (megatron := _megatron()) is not None:
        peers["Megatron-core"] = lambda x: megatron.bias_swiglu_impl(x, None)
    return peers


def rms_norm(w: torch.Tensor) -> dict[str, Op]:
    """Of rows as long as w; torch's own kernel beside those two."""

    def normalised(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, w.shape, w, EPS)

    peers = {"torch": normalised, "inductor": compiled(normalised)}
    if vllm() is not None:

        def fused(x: torch.Tensor) -> None:
            vllm().rms_norm(torch.empty_like(x), x, w, EPS)

        peers["vLLM"] = fused
    if (invariant := batch_invariant()) is not None:
        peers["vLLM batch-invariant"] = lambda x: invariant.rms_norm_batch_invariant(x, w, EPS)
    return peers


def add_rms_norm(w: torch.Tensor) -> dict[str, Op]:
    """Of the sum of two rows, which is handed out too; vLLM's in place."""

    def normalised(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return F.rms_norm(total, w.shape, w, EPS), total

    peers = {"inductor": compiled(normalised)}
    if vllm() is not None:
        peers["vLLM"] = lambda x, residual: vllm().fused_add_rms_norm(x, residual, w, EPS)
    if (invariant := batch_invariant()) is not None:
        peers["vLLM batch-invariant"] = lambda x, residual: invariant.rms_norm_batch_invariant(x, w, EPS, residual)
    return peers
