"""The weights that a strict model computes with, un-fused to Hugging Face names, and their replacement in place.

vLLM fuses q, k, v and gate, up, and cuts matrices over tensor-parallel ranks. `Piece` is this rank's part of one
Hugging Face tensor; rank 0 gathers the parts and digests the whole, so every rank's memory is what is confirmed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from rl_kernel.errors import ModelError, WeightDigestError
from rl_kernel.integrations.vllm.quantization import StrictEmbeddingMethod, StrictLinearMethod
from rl_kernel.integrations.vllm.runtime import StrictRuntime
from rl_kernel.reference.weights import digest_tensors

_METHODS = (StrictLinearMethod, StrictEmbeddingMethod)
Triple = tuple[str, str, np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class Piece:
    """One rank's part of a tensor. axis: where the ranks' parts join; None where each rank holds the whole."""

    name: str
    tensor: torch.Tensor
    axis: int | None


def pieces(model: nn.Module) -> Iterator[Piece]:
    """Yield every weight of a strict model, from the memory that its ops read; a tied output layer as `lm_head` too."""
    for path, module in model.named_modules():
        if isinstance(module, RMSNorm):
            yield Piece(f"{path}.weight", module.weight.data, None)
        elif isinstance(module, VocabParallelEmbedding):
            yield Piece(f"{path}.weight", _matrix(module)[: module.shard_indices.num_org_elements], 0)
        elif isinstance(module, QKVParallelLinear):
            query, kv = module.num_heads * module.head_size, module.num_kv_heads * module.head_size
            parts = _matrix(module).split([query, kv, kv])
            yield from _parts(path, "qkv_proj", ("q_proj", "k_proj", "v_proj"), parts)
        elif isinstance(module, MergedColumnParallelLinear):
            yield from _parts(path, "gate_up_proj", ("gate_proj", "up_proj"), _matrix(module).chunk(2))
        elif isinstance(module, RowParallelLinear):
            yield Piece(f"{path}.weight", _matrix(module), 1)


def memory_digest(model: nn.Module, runtime: StrictRuntime, *, tied: bool) -> str | None:
    """Weight digest of what the ranks hold; None on all ranks but 0. Every rank must call it."""
    whole = {piece.name: _gather(piece, runtime) for piece in pieces(model)}
    if runtime.tp_rank != 0:
        return None
    arrays = {name: bits_of(tensor) for name, tensor in whole.items() if tensor is not None}
    if tied and not np.array_equal(arrays["lm_head.weight"], arrays["model.embed_tokens.weight"]):
        raise WeightDigestError("the output layer and the embedding are tied, but hold different values")
    return digest_tensors(((name, "BF16", array) for name, array in arrays.items()), tied=tied)


def replace_weights(model: nn.Module, folder: Path) -> None:
    """Load `folder`/*.safetensors into the existing layers and pack again; ModelError if a weight is missing."""
    matrices = [(m, m.quant_method) for m in model.modules() if isinstance(getattr(m, "quant_method", None), _METHODS)]
    for module, method in matrices:
        method.make_room(module)
    loaded = model.load_weights(read_tensors(folder))
    missing = {name for name, _ in model.named_parameters()} - loaded
    if missing:
        raise ModelError(f"{folder} has nothing for {min(missing)!r} ({len(missing)} weights missing)")
    for module, method in matrices:
        method.process_weights_after_loading(module)


def read_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor from every safetensors file of `folder`."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                yield name, tensors.get_tensor(name)


def digest_while_reading(folder: Path, seen: list[Triple]) -> Iterator[tuple[str, torch.Tensor]]:
    """As `read_tensors`, keeping in `seen` what the digest of the tensors that were handed out needs."""
    for name, tensor in read_tensors(folder):
        dtype = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[tensor.dtype]
        seen.append((name, dtype, bits_of(tensor)))
        yield name, tensor


def _matrix(module: nn.Module) -> torch.Tensor:
    matrix: torch.Tensor = module.quant_method.matrix(module)
    return matrix


def _parts(path: str, fused: str, names: tuple[str, ...], parts: tuple[torch.Tensor, ...]) -> Iterator[Piece]:
    parent = path.removesuffix(fused)
    for name, part in zip(names, parts, strict=True):
        yield Piece(f"{parent}{name}.weight", part, 0)


def _gather(piece: Piece, runtime: StrictRuntime) -> torch.Tensor | None:
    """The whole tensor on rank 0, None elsewhere."""
    if runtime.tp_size == 1:
        return piece.tensor
    # Vocabulary shards differ in length; gloo gathers equal ones of few dtypes, so lengths go first, then bytes.
    local = piece.tensor.contiguous().view(torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64, device=local.device) for _ in range(runtime.tp_size)]
    dist.all_gather(lengths, torch.tensor([local.shape[0]], device=local.device), group=runtime.group)
    longest = int(max(n.item() for n in lengths))
    padded = local.new_zeros((longest, *local.shape[1:]))
    padded[: local.shape[0]] = local
    parts = [torch.empty_like(padded) for _ in range(runtime.tp_size)] if runtime.tp_rank == 0 else None
    dist.gather(padded, parts, group=runtime.group, group_dst=0)
    if parts is None:
        return None
    cut = [part[: int(n.item())].view(torch.bfloat16) for part, n in zip(parts, lengths, strict=True)]
    if piece.axis is not None:
        return torch.cat(cut, dim=piece.axis)
    for rank, copy in enumerate(cut):
        if not np.array_equal(bits_of(copy), bits_of(cut[0])):
            raise WeightDigestError(f"{piece.name}: tensor-parallel rank {rank} holds other values than rank 0")
    return cut[0]


def bits_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Tensor → array for the digest; bf16 as uint16 bit patterns."""
    plain = tensor.contiguous().cpu()
    array: np.ndarray[Any, Any]
    array = plain.view(torch.int16).numpy().view(np.uint16) if plain.dtype is torch.bfloat16 else plain.numpy()
    return array
