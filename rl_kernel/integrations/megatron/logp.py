"""Linear logp over a vocabulary that may be cut over ranks: the fused op on one rank, its parts on several.

On several ranks each computes its own tiles' statistics from its own logits, a few rows at a time; tiles meet in
global order, so the bits are those of one rank. Logits are never kept: backward computes them again.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from rl_kernel.torch_autograd import Find, StrictOps

_ROWS = 128  # rows of logits held at a time; changes no bit


class LinearLogp:
    """Logprobs of targets, and their gradients. start: first id of this rank's rows; vocab: ids that count."""

    def __init__(self, ops: StrictOps, find: Find, start: int, vocab: int) -> None:
        self.ops, self.start, self.vocab = ops, start, vocab
        names = ("linear_logp", "linear_logp_backward", "vocab_stats", "merge_vocab_stats", "logit_gradient")
        self._fused, self._fused_backward, self._stats, self._merge, self._gradient = (
            find("linear_logp", name) for name in names
        )

    def forward(self, h: Tensor, w: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """h[n,K] bf16, w[V/t,K] bf16, targets[n] int64 → fp32 (logp[n], lse[n])."""
        if self.ops.tp.size == 1:
            logp, lse = self._fused(h, w, targets, temperature=temperature, vocab=self.vocab)
            return logp, lse
        heat = torch.full((h.shape[0],), temperature, dtype=torch.float32)
        parts = [self._shard(h[r], w, targets[r], heat[r]) for r in _chunks(h.shape[0])]
        m, s, z = (self._gather(torch.cat(part)) for part in zip(*parts, strict=True))
        lse = self._merge(torch.cat(m, dim=1), torch.cat(s, dim=1))
        owner = torch.div(targets, w.shape[0], rounding_mode="floor")
        logp = torch.stack(z).gather(0, owner.unsqueeze(0)).squeeze(0) - lse
        return torch.where(logp.isnan(), torch.nan, logp), lse

    def backward(
        self, dlogp: Tensor, h: Tensor, w: Tensor, targets: Tensor, lse: Tensor, temperature: float, main_grad: Tensor
    ) -> Tensor:
        """dlogp[n] fp32 and the forward's tensors → dh[n,K] bf16; main_grad[V/t,K] continues its chain."""
        if self.ops.tp.size == 1:
            dh: Tensor = self._fused_backward(
                dlogp, h, w, targets, lse,
                temperature=temperature, vocab=self.vocab, main_grad=main_grad, segments=self.ops.segments,
            )  # fmt: skip
            return dh
        heat = torch.full((h.shape[0],), temperature, dtype=torch.float32)
        parts = []
        for r in _chunks(h.shape[0]):
            logits = self.ops.gemm(h[r], w, out_dtype=torch.float32)
            dlogits = self._gradient(
                logits, targets[r], lse[r], dlogp[r], heat[r], vocab_start=self.start, vocab=self.vocab
            )
            self.ops.gemm_dw_(main_grad, dlogits, h[r])
            parts.append(self.ops.sum_over_ranks(self.ops.gemm_dx, dlogits, w))
        return torch.cat(parts)

    def _shard(self, h: Tensor, w: Tensor, targets: Tensor, heat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.ops.gemm(h, w, out_dtype=torch.float32)
        m, s = self._stats(logits, heat, vocab_start=self.start, vocab=self.vocab)
        mine = (targets - self.start).clamp(0, w.shape[0] - 1)  # an id of another rank: its value is never used
        return m, s, logits.gather(1, mine.unsqueeze(1)).squeeze(1) / heat

    def _gather(self, part: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(part) for _ in range(self.ops.tp.size)]
        dist.all_gather(parts, part.contiguous(), group=self.ops.tp.group)
        return parts


def logp_chunks(rows: int) -> int:
    """In how many parts `rows` rows are taken where the vocabulary is cut over ranks."""
    return max(1, -(-rows // _ROWS))


def _chunks(rows: int) -> Iterator[slice]:
    # One chunk even of no rows, so that every rank takes part in every collective.
    return (slice(i * _ROWS, (i + 1) * _ROWS) for i in range(logp_chunks(rows)))
