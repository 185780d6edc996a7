"""The ops between the matrix products: RMSNorm, the residual's addition, SwiGLU, the RoPE table."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rl_kernel.torch_autograd import StrictOps


class StrictRmsNorm(torch.nn.Module):
    """RMSNorm over the last dimension; of this rank's `heads`, each alone, where that is not 0 (q-norm, k-norm)."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, *, ops: StrictOps, heads: int = 0, **_: Any
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        self.eps, self.ops, self.heads = eps, ops, heads

    def forward(self, x: Tensor) -> Tensor:
        """x[…,n] → y of the same shape."""
        dw = getattr(self.weight, "head_grads", None)
        return self.ops.norm(x.reshape(-1, x.shape[-1]), self.weight, self.eps, dw).view(x.shape)


class StrictResidualAdd(torch.nn.Module):
    """Takes the place of bias-dropout-add: there is neither bias nor dropout. see: shown each sum, where it is set."""

    def __init__(self, *, ops: StrictOps, **_: Any) -> None:
        super().__init__()
        self.ops = ops
        self.see: Callable[[Tensor], None] | None = None

    def forward(self, training: bool, fused: bool) -> Callable[[tuple[Tensor, None], Tensor, float], Tensor]:
        """Return the function that Megatron calls with ((x, no bias), residual, dropout probability)."""

        def add(x_and_bias: tuple[Tensor, None], residual: Tensor, probability: float) -> Tensor:
            total = self.ops.add(x_and_bias[0], residual)
            if self.see is not None:
                self.see(total.detach())
            return total

        return add


class StrictSwiGlu(torch.nn.Module):
    """SwiGLU on linear_fc1's output, whose rows are `ops.segments` blocks of (gate, up): see `weights`."""

    def __init__(self, *, ops: StrictOps, **_: Any) -> None:
        super().__init__()
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        """x[T,1,2I/t] → [T,1,I/t]."""
        rows, batch, width = x.shape
        pairs = x.view(rows * batch * self.ops.segments, width // self.ops.segments)
        return self.ops.swiglu_activation(pairs).view(rows, batch, width // 2)


class StrictRopeTable(torch.nn.Module):
    """Takes the place of Megatron's rotary embedding: hands the contract's table (cos, sin) to every layer."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        super().__init__()
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def get_rotary_seq_len(self, *_: Any) -> int:
        """Rows of the table; Megatron asks before it calls."""
        return int(self.cos.shape[0])

    def forward(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return cos and sin, fp32 [P,D/2]."""
        return self.cos, self.sin
