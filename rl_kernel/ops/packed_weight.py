"""A weight in the layout that the CPU matrix product reads; shared by the linear layers and the vocabulary head."""

from dataclasses import dataclass

import torch

from rl_kernel.errors import ShapeError
from rl_kernel.ops import huge_pages
from rl_kernel.ops.tensors import BF16, check, extension, threads


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """w[N,K] in panels of 48 rows, two k to a 32-bit word (csrc/cpu/pack.h): the bytes of w, padded to 48 rows.

    words: int32, opaque.
    """

    words: torch.Tensor
    n: int
    k: int

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the weight it was made from."""
        return self.n, self.k

    def unpack(self) -> torch.Tensor:
        """Return w[N,K] bf16, bit for bit what was packed."""
        w = torch.empty(self.n, self.k, dtype=BF16)
        extension.unpack(w.data_ptr(), self.words.data_ptr(), self.n, self.k, threads())
        return w


def pack(w: torch.Tensor, out: PackedWeight | None = None) -> PackedWeight:
    """Pack w[N,K] bf16, to stay; into `out`, where given, so that a weight update needs no new memory.

    ShapeError if w is not contiguous bf16 [N,K] or `out` has another shape.
    """
    check("pack", "w", w, BF16, (None, None))
    n, k = w.shape
    if out is None:
        out = PackedWeight(huge_pages.empty(extension.packed_words(n, k)), n, k)
    elif out.shape != (n, k):
        raise ShapeError(f"pack: out holds a weight of shape {list(out.shape)}; w has {[n, k]}")
    extension.pack(out.words.data_ptr(), w.data_ptr(), n, k, k, threads())
    return out
