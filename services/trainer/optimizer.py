"""AdamW on fp32 masters, in elementary operations that IEEE 754 rounds one way, so its bits depend on nothing else.

torch's own fused updates (`addcmul_`, `add_` with alpha) round differently in a vector's body and in its tail, and its
`sqrt` is MKL's, which is off by one unit for 15 % of arguments. Here every operation is a plain + - * / of two
operands, and the square root is NumPy's, the processor's own.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rl_kernel.integrations.megatron.weights import Piece
from rl_kernel.torch_autograd import TensorParallel

_CHUNK = 1 << 17  # elements worked on at a time, so that what is between two operations stays in the cache


@dataclass(frozen=True, slots=True)
class AdamWOptions:
    """Source: arXiv 1711.05101, algorithm 2. Weights of one dimension (norms) do not decay."""

    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    epsilon: float = 1e-8


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rate: linear from 0 to `peak` over `warmup` updates, then linear to 0 over `decay` (0: constant)."""

    peak: float
    warmup: int = 0
    decay: int = 0

    def rate(self, update: int) -> float:
        """Rate of the update that is `update`-th, counting from 1."""
        if update <= self.warmup:
            return self.peak * update / self.warmup
        if not self.decay:
            return self.peak
        return self.peak * max(0.0, 1.0 - (update - self.warmup - 1) / self.decay)


class AdamW:
    """Masters and moments of this rank's parameters; gradients come from `parameter.main_grad`."""

    def __init__(self, parameters: Mapping[str, Tensor], options: AdamWOptions) -> None:
        self._parameters, self._options = parameters, options
        self.masters = {name: p.detach().float() for name, p in parameters.items()}
        self.first = {name: torch.zeros_like(m) for name, m in self.masters.items()}
        self.second = {name: torch.zeros_like(m) for name, m in self.masters.items()}

    def step(self, update: int, rate: float, grad_scale: float) -> None:
        """Apply the `update`-th update (from 1) at `rate`, with gradients times `grad_scale`."""
        for name, parameter in self._parameters.items():
            decay = 1.0 - rate * self._options.weight_decay * (parameter.dim() > 1)
            self._update(name, parameter, update, rate, decay, grad_scale)
            self.publish(name)

    def publish(self, name: str) -> None:
        """Round a master into its parameter."""
        self._parameters[name].detach().copy_(self.masters[name])

    def _update(self, name: str, parameter: Tensor, update: int, rate: float, decay: float, grad_scale: float) -> None:
        beta1, beta2 = self._options.betas
        correct1, correct2 = 1.0 / (1.0 - beta1**update), 1.0 / (1.0 - beta2**update)
        state = (parameter.main_grad, self.masters[name], self.first[name], self.second[name])
        for gradient, master, first, second in zip(*(x.view(-1).split(_CHUNK) for x in state), strict=True):
            g = gradient * grad_scale
            first.mul_(beta1).add_(g * (1.0 - beta1))
            second.mul_(beta2).add_(g.mul_(g).mul_(1.0 - beta2))
            denominator = torch.mul(second, correct2, out=g)
            _square_root(denominator)
            denominator.add_(self._options.epsilon)
            change = (first * correct1).div_(denominator).mul_(rate)
            if decay != 1.0:
                master.mul_(decay)
            master.sub_(change)


def _square_root(x: Tensor) -> None:
    """In place, correctly rounded: NumPy's on a CPU, the device's on a GPU, where torch's is sqrt.rn."""
    if x.is_cuda:
        x.sqrt_()
    else:
        np.sqrt(x.numpy(), out=x.numpy())


def gradient_norm(gradients: Iterator[Piece], blocks: int, tp: TensorParallel) -> float:
    """L2 norm over all ranks' gradients.

    Rows are summed in float64, each alone, and the rows' sums by `fsum`, which rounds once; a row that is cut over
    ranks is summed in `blocks` parts at every TP size. So the norm does not depend on the TP size.
    """
    shared: list[Tensor] = []
    own: list[Tensor] = []
    for piece in gradients:
        width = piece.local.shape[-1] // (blocks // tp.size if piece.axis == 1 else 1)
        (shared if piece.axis is None else own).append(_row_sums(piece.local.reshape(-1, width)))
    mine = torch.cat(own)
    parts = [mine]
    if tp.size > 1:
        parts = [torch.empty_like(mine) for _ in range(tp.size)]
        dist.all_gather(parts, mine, group=tp.group)
    return math.sqrt(math.fsum(torch.cat([*shared, *parts]).tolist()))


def _row_sums(rows: Tensor) -> Tensor:
    at_once = max(1, _CHUNK // rows.shape[1])
    return torch.cat([part.double().square_().sum(dim=1) for part in rows.split(at_once)])
