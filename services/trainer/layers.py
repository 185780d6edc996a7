"""What the layers of a forward gave, as one digest a layer and sample: `auditor.facts.layer_digests` says of what."""

import hashlib
from collections.abc import Sequence

import torch

from rl_kernel.integrations.megatron.packing import Tokens


class LayerDigests:
    """Shown the layers of one forward (`see`). samples: as they were packed, each without its last token."""

    def __init__(self, samples: Sequence[Tokens]) -> None:
        self._lengths = [len(s.prompt) + len(s.response) - 1 for s in samples]
        self._found: list[list[str]] = [[] for _ in samples]

    def see(self, layer: int, rows: torch.Tensor) -> None:
        """Take in the output of a layer, bf16 [T,E]; layers come in their order."""
        bits = rows.contiguous().view(torch.int16).cpu()
        for digests, part in zip(self._found, bits.split(self._lengths), strict=True):
            assert len(digests) == layer, "each layer is seen once, in order"
            digests.append(hashlib.sha256(part.numpy().data).hexdigest())

    def found(self) -> list[tuple[str, ...]]:
        """One tuple a sample, a digest a layer."""
        return [tuple(digests) for digests in self._found]
