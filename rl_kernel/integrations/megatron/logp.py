"""Linear logp over a vocabulary that may be cut over ranks: the fused op on one rank, its parts on several.

Each rank takes the statistics of its own tiles; tiles meet in global order, so the bits are those of one rank. Logits
are never kept: backward computes them again.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from rl_kernel.torch_autograd import Find, StrictOps


class LinearLogp:
    """Logprobs of targets, and their gradients. start: first id of this rank's rows; vocab: ids that count."""

    def __init__(self, ops: StrictOps, find: Find, start: int, vocab: int) -> None:
        self.ops, self.start, self.vocab = ops, start, vocab
        names = ("linear_logp", "linear_vocab_stats", "merge_vocab_stats", "linear_logp_backward")
        self._fused, self._stats, self._merge, self._backward = (find("linear_logp", name) for name in names)

    def forward(self, h: Tensor, w: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """h[n,K] bf16, w[V/t,K] bf16, targets[n] int64 → fp32 (logp[n], lse[n])."""
        if self.ops.tp.size == 1:
            logp, lse = self._fused(h, w, targets, temperature=temperature, vocab=self.vocab)
            return logp, lse
        mine = self._stats(h, w, targets, temperature=temperature, vocab_start=self.start, vocab=self.vocab)
        m, s, z = (self._gather(part) for part in mine)
        lse = self._merge(torch.cat(m, dim=1), torch.cat(s, dim=1))
        owner = torch.div(targets, w.shape[0], rounding_mode="floor")
        logp = torch.stack(z).gather(0, owner.unsqueeze(0)).squeeze(0) - lse
        return logp.masked_fill_(logp.isnan(), torch.nan), lse

    def backward(
        self, dlogp: Tensor, h: Tensor, w: Tensor, targets: Tensor, lse: Tensor, temperature: float, main_grad: Tensor
    ) -> Tensor:
        """dlogp[n] fp32 and the forward's tensors → dh[n,K] bf16; main_grad[V/t,K] continues its chain."""
        one_rank = self.ops.tp.size == 1
        dh: Tensor = self._backward(
            dlogp, h, w, targets, lse,
            temperature=temperature, vocab=self.vocab, main_grad=main_grad, segments=self.ops.segments,
            vocab_start=self.start, out_dtype=torch.bfloat16 if one_rank else torch.float32,
        )  # fmt: skip
        if one_rank:
            return dh
        dh = self.ops.tree_all_reduce(dh, self.ops.tp.group, torch.bfloat16)
        return dh

    def _gather(self, part: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(part) for _ in range(self.ops.tp.size)]
        dist.all_gather(parts, part, group=self.ops.tp.group)
        return parts
