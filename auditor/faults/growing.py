"""The reference on sequences that grow: what stands in front of the new tokens is kept, so that each costs a row."""

from dataclasses import dataclass, field, fields, replace
from itertools import pairwise

import numpy as np

from rl_kernel.reference.model import Decoder
from rl_kernel.reference.ops import F32, I32, I64, Bits, Reference


@dataclass(frozen=True, slots=True)
class Growing(Reference):
    """Ops of a decoder of so many layers that is given the new tokens only, of sequences that are of one length.

    kept: keys (rotated) and values, by layer and sequence.
    """

    layers: int = 1
    kept: list[list[tuple[Bits, Bits]]] = field(default_factory=list)
    at: list[int] = field(default_factory=lambda: [0])

    def rope(self, x: Bits, cos: F32, sin: F32, positions: I64, *, inverse: bool = False) -> Bits:
        """As the reference's, behind what is kept."""
        layer = self.at[0] % self.layers
        before = len(self.kept[layer][0][0]) if layer < len(self.kept) else 0
        return Reference.rope(self, x, cos, sin, positions + before, inverse=inverse)

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's, of all keys so far."""
        layer = self.at[0] % self.layers
        self.at[0] += 1
        now = [(k[a:b], v[a:b]) for a, b in pairwise(cu_k.tolist())]
        if layer < len(self.kept):
            pairs = zip(self.kept[layer], now, strict=True)
            now = [(np.concatenate([a, c]), np.concatenate([b, d])) for (a, b), (c, d) in pairs]
            self.kept[layer] = now
        else:
            self.kept.append(now)
        keys, values = (np.concatenate(list(each)) for each in zip(*now, strict=True))
        ends = np.cumsum([0, *(len(own) for own, _ in now)]).astype(np.int32)
        return Reference.attention(self, q, keys, values, cu_q, ends)


def growing(decoder: Decoder) -> Decoder:
    """The decoder for sequences that grow, from their beginning on."""
    settings = {f.name: getattr(decoder.reference, f.name) for f in fields(Reference)}
    return replace(decoder, reference=Growing(**settings, layers=decoder.config.layers))
