"""Column- and row-parallel linears: Megatron's classes with strict GEMMs in both directions. No bias."""

from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from rl_kernel.torch_autograd import StrictOps


class StrictColumnParallelLinear(ColumnParallelLinear):
    """linear_qkv and linear_fc1. Needs no segments forward; backward sums dx over ranks in the order of the rows."""

    def __init__(self, *args: Any, ops: StrictOps, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ops = ops

    def forward(self, input_: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """input_[T,1,K] → ([T,1,N/t], no bias)."""
        rows, batch, _ = input_.shape
        y = self.ops.column_linear(input_.view(rows * batch, -1), self.weight)
        return y.view(rows, batch, -1), None


class StrictRowParallelLinear(RowParallelLinear):
    """linear_proj and linear_fc2: the contract's segments along K, finished by the tree over ranks."""

    def __init__(self, *args: Any, ops: StrictOps, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ops = ops

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """input_[T,1,K/t] → ([T,1,N], no bias)."""
        rows, batch, _ = input_.shape
        y = self.ops.row_linear(input_.view(rows * batch, -1), self.weight)
        return y.view(rows, batch, -1), None
