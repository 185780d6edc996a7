"""Linears, lm_head and embedding as vLLM "quantization": the one door through which vLLM lets a linear be replaced.

Nothing is quantised. Weights are bf16; after loading, a matrix exists only in the form that products read, so that
the digest of what is in memory (`weights`) is the digest of what computes: packed for functions, as it was loaded for
operators, whose graphs hold its address. Shapes: T tokens, K input features, N output features of this rank, V ids of
this rank.
"""

from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, RowParallelLinear
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.utils import set_weight_attrs

from rl_kernel.integrations.vllm import QUANTIZATION
from rl_kernel.integrations.vllm.runtime import StrictRuntime, current_runtime


class StrictConfig(QuantizationConfig):
    """vLLM asks this for the method of every linear, embedding and attention layer."""

    def get_name(self) -> str:
        """Name under which `register` made this known."""
        return QUANTIZATION

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Activations are bf16."""
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """No GPU is needed."""
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Nothing is read from the checkpoint."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "StrictConfig":
        """No parameters: profile and segments come through `additional_config`."""
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Strict method of a layer that holds a matrix; None for attention, which is replaced elsewhere."""
        if isinstance(layer, LinearBase):
            return StrictLinearMethod(current_runtime(), row_parallel=isinstance(layer, RowParallelLinear))
        if isinstance(layer, VocabParallelEmbedding):
            return StrictEmbeddingMethod(current_runtime())
        return None


class StrictLinearMethod(LinearMethodBase):
    """y[T,N] = x[T,K] W[N,K]ᵀ by contract. A row-parallel rank of several returns its fp32 partial sum."""

    def __init__(self, runtime: StrictRuntime, *, row_parallel: bool) -> None:
        self._gemm, self._packs = runtime.plan.function("gemm"), not runtime.opaque
        self._pack = runtime.plan.plan.resolve("gemm").function("pack")
        self._segments = runtime.own_segments if row_parallel else 1
        self._out_dtype = torch.float32 if row_parallel and runtime.tp_size > 1 else torch.bfloat16

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Give `layer` a bf16 weight [N,K] that vLLM's own loaders fill."""
        _create_weight(layer, sum(output_partition_sizes), input_size_per_partition, params_dtype, extra_weight_attrs)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Pack the loaded weight and give its own memory back."""
        if not self._packs:
            return
        layer.packed = self._pack(layer.weight.data, getattr(layer, "packed", None))
        layer.weight.data = layer.weight.data.new_empty(0)

    def make_room(self, layer: torch.nn.Module) -> None:
        """Let `layer.weight` be loaded again."""
        if self._packs:
            layer.weight.data = torch.empty(layer.packed.shape, dtype=torch.bfloat16)

    def matrix(self, layer: torch.nn.Module) -> torch.Tensor:
        """W[N,K] as the products read it."""
        matrix: torch.Tensor = layer.packed.unpack() if self._packs else layer.weight.data
        return matrix

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x[T,K] bf16 → y[T,N] bf16, or the fp32 partial sum."""
        assert bias is None, "a model with biases is refused before it is built"
        weight = layer.packed if self._packs else layer.weight
        result: torch.Tensor = self._gemm(x, weight, segments=self._segments, out_dtype=self._out_dtype)
        return result


class StrictEmbeddingMethod(QuantizeMethodBase):
    """Embedding rows, and logits[T,V] in fp32 from the output layer; the two may share one weight."""

    def __init__(self, runtime: StrictRuntime) -> None:
        self._embedding = runtime.plan.function("embedding")
        self._gemm, self._packs = runtime.plan.function("gemm"), not runtime.opaque
        self._pack = runtime.plan.plan.resolve("gemm").function("pack")
        self._tied = False

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Give `layer` a bf16 weight [V,K]."""
        _create_weight(layer, sum(output_partition_sizes), input_size_per_partition, params_dtype, extra_weight_attrs)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Pack the output layer's weight. The embedding's stays: its rows are looked up."""
        if self._packs and isinstance(layer, ParallelLMHead):
            layer.packed = self._pack(layer.weight.data, getattr(layer, "packed", None))
            if not self._tied:
                layer.weight.data = layer.weight.data.new_empty(0)

    def make_room(self, layer: torch.nn.Module) -> None:
        """Let `layer.weight` be loaded again."""
        if self._packs and isinstance(layer, ParallelLMHead) and not self._tied:
            layer.weight.data = torch.empty(layer.packed.shape, dtype=torch.bfloat16)

    def matrix(self, layer: torch.nn.Module) -> torch.Tensor:
        """W[V,K] as the output layer or the embedding reads it."""
        packed = self._packs and isinstance(layer, ParallelLMHead)
        matrix: torch.Tensor = layer.packed.unpack() if packed else layer.weight.data
        return matrix

    def tie_weights(self, layer: torch.nn.Module, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        """Let the output layer `layer` be loaded with the embedding's weight."""
        self._tied = True
        layer.weight = embed_tokens.weight
        return layer

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states x[T,K] bf16 → logits[T,V] fp32 of this rank's ids."""
        assert bias is None, "a model with biases is refused before it is built"
        weight = layer.packed if self._packs else layer.weight
        result: torch.Tensor = self._gemm(x, weight, out_dtype=torch.float32)
        return result

    def embedding(self, layer: torch.nn.Module, input_: torch.Tensor) -> torch.Tensor:
        """Ids[T] → rows[T,K] bf16."""
        ids = input_.long() if self._packs else input_  # an operator converts by itself
        result: torch.Tensor = self._embedding(ids, layer.weight)
        return result


def _create_weight(
    layer: torch.nn.Module, rows: int, columns: int, dtype: torch.dtype, attributes: dict[str, Any]
) -> None:
    weight = torch.nn.Parameter(torch.empty(rows, columns, dtype=dtype), requires_grad=False)
    set_weight_attrs(weight, {"input_dim": 1, "output_dim": 0, **attributes})
    layer.register_parameter("weight", weight)
