"""Peers that are not installed everywhere: FlashAttention 3, vLLM's batch-invariant operators, Liger's fused head.

A peer that cannot be imported is left out, and a line says so.
"""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

Op = Callable[..., object]


@cache
def load(name: str, what: str) -> Any:
    """The module; None, and a line that says so, where it is not installed or does not load."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        print(f"{what}: not measured, not installed ({error})")
        return None


def flash_attention_3() -> Any:
    """vLLM's build of FlashAttention 3, or None."""
    return load("vllm.vllm_flash_attn", "FlashAttention 3")


def batch_invariant() -> Any:
    """vLLM's operators of `VLLM_BATCH_INVARIANT=1`, or None."""
    return load("vllm.model_executor.determinism.batch_invariant", "vLLM's batch-invariant operators")


def products(x: torch.Tensor) -> dict[str, Op]:
    """Of x[M,K] with w[N,K]ᵀ."""
    peers: dict[str, Op] = {"cuBLAS default": lambda w: torch.mm(x, w.t())}
    if (vllm := batch_invariant()) is not None:
        peers["vLLM batch-invariant"] = lambda w: vllm.mm_batch_invariant(x, w.t())
    return peers


def heads(h: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> dict[str, Op]:
    """Of h[T,K] and w[V,K]: the product alone, and vLLM's log-probabilities, which store every logit, in fp32 too."""
    peers: dict[str, Op] = {"GEMM alone, bf16 out": lambda: torch.mm(h, w.t())}
    if (vllm := batch_invariant()) is not None:

        def stored() -> torch.Tensor:
            logits = vllm.mm_batch_invariant(h, w.t()).float()
            found: torch.Tensor = vllm.log_softmax(logits).gather(1, target[:, None])
            return found

        peers["vLLM batch-invariant"] = stored
    return peers


def liger(h: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> Op | None:
    """Liger's fused linear cross entropy, forward alone, a loss a token; None where it is not installed.

    No CUDA graph can hold it: it reads back how many targets count.
    """
    module = load("liger_kernel.ops.fused_linear_cross_entropy", "Liger's fused linear cross entropy")
    if module is None:
        return None

    def call() -> object:
        with torch.no_grad():
            return module.LigerFusedLinearCrossEntropyFunction.apply(h, w, target, None, None, -100, 0.0, 0.0, "none")

    return call
