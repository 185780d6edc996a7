"""The two layers that are as wide as the vocabulary: the embedding, and the output layer with its logprobs.

Rows of both are token ids. A rank owns a contiguous range of whole tiles; ids from the true vocabulary up are padding,
which never counts. Where the two layers share one weight, its gradient is the output layer's chain over all rows of
the step and then the embedding's additions, so the embedding's are kept until the step's last backward.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from rl_kernel.integrations.megatron.logp import LinearLogp
from rl_kernel.torch_autograd import StrictOps


class StrictEmbedding(torch.nn.Module):
    """weight[V/t,K] bf16; `start` is the first id of this rank."""

    def __init__(self, weight: torch.nn.Parameter, start: int, *, ops: StrictOps) -> None:
        super().__init__()
        self.weight, self.start, self.ops = weight, start, ops

    def forward(self, ids: Tensor) -> Tensor:
        """ids[1,T] int64 → [1,T,K] bf16."""
        rows: Tensor = _Embedding.apply(ids.view(-1), self.weight, self.start, self.ops)
        return rows.unsqueeze(0)

    def add_kept_grads(self) -> None:
        """Add to weight.main_grad what the step's backward passes kept, in their order."""
        weight = self.weight
        for ids, dy in weight.embedding_grads:
            mine = (ids >= 0) & (ids < weight.shape[0])
            self.ops.embedding_dw_(weight.main_grad, dy[mine], ids[mine])
        weight.embedding_grads.clear()


class _Embedding(Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, start: int, ops: StrictOps) -> Tensor:
        ctx.ids, ctx.kept = ids - start, getattr(weight, "embedding_grads", None)
        if ops.tp.size == 1:
            rows: Tensor = ops.embedding(ids, weight)
            return rows
        mine = (ctx.ids >= 0) & (ctx.ids < weight.shape[0])
        partial = torch.zeros(ids.shape[0], weight.shape[1], dtype=torch.float32, device=weight.device)
        partial[mine] = ops.embedding(ctx.ids[mine], weight).float()
        rows = ops.tree_all_reduce(partial, ops.tp.group, torch.bfloat16)
        return rows

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, None, None]:
        ctx.kept.append((ctx.ids, dy.contiguous()))
        return None, None, None, None


class StrictOutputLayer(torch.nn.Module):
    """weight[V/t,K] bf16, the embedding's own where the model ties them."""

    def __init__(self, weight: torch.nn.Parameter, logp: LinearLogp) -> None:
        super().__init__()
        self.weight, self.logp = weight, logp

    def forward(self, hidden: Tensor, rows: Tensor, targets: Tensor, temperature: float) -> Tensor:
        """hidden[T,1,K], rows[n], targets[n] int64 → fp32 logprob[n] of each target after its row."""
        logprobs: Tensor = _LinearLogp.apply(hidden.squeeze(1), self.weight, rows, targets, temperature, self.logp)
        return logprobs


class _LinearLogp(Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, rows: Tensor, targets: Tensor, temperature: float, logp: LinearLogp
    ) -> Tensor:
        h = hidden[rows]
        logprobs, lse = logp.forward(h, weight, targets, temperature)
        ctx.save_for_backward(h, weight, rows, targets, lse)
        ctx.temperature, ctx.logp, ctx.shape = temperature, logp, hidden.shape
        ctx.main_grad = getattr(weight, "main_grad", None)
        result: Tensor = logprobs
        return result

    @staticmethod
    def backward(ctx: Any, dlogp: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        h, weight, rows, targets, lse = ctx.saved_tensors
        d_hidden = torch.zeros(ctx.shape, dtype=h.dtype, device=h.device)
        d_hidden[rows] = ctx.logp.backward(dlogp.contiguous(), h, weight, targets, lse, ctx.temperature, ctx.main_grad)
        return d_hidden, None, None, None, None, None
