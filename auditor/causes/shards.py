"""A vocabulary cut over ranks whose parts were not put together: a softmax over one part, a target of another."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from auditor.causes.evidence import Evidence, Suggestion
from auditor.causes.oracle import F64, Oracle
from auditor.causes.search import nearest
from auditor.compare import Logprobs

_RANKS: Final = (2, 4, 8)
_PADDED_TO: Final = (64, 128)


def one_shard(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """The reference's logits, normalised or looked up on one rank only."""
    z = oracle.own_logits[:, : oracle.decoder.config.vocab].astype(np.float64) / oracle.temperature
    mistakes = (("vocabulary", name, values) for name, values in _mistakes(z, oracle.targets))
    if best := nearest(evidence, oracle, mistakes):
        yield best


def _mistakes(z: F64, targets: np.ndarray) -> Iterator[tuple[str, Logprobs]]:
    """Name and log-probabilities; z[W,V] heated logits."""
    vocab = z.shape[1]
    chosen = z[np.arange(len(z)), targets]
    whole = _lse(z)
    for ranks in _RANKS:
        for multiple in dict.fromkeys(m * r for m in _PADDED_TO for r in (1, ranks)):
            padded = -(-vocab // multiple) * multiple
            size = padded // ranks
            if padded % ranks or size >= vocab:
                continue
            cuts = [(first, min(first + size, vocab)) for first in range(0, vocab, size)]
            parts = np.stack([_lse(z[:, first:last]) for first, last in cuts], axis=1)
            owner = np.minimum(targets // size, len(cuts) - 1)
            own = parts[np.arange(len(z)), owner]
            of = f"one of {ranks} shards of {size} tokens"
            yield f"a softmax over the token's own shard, {of}", (chosen - own).astype(np.float32)
            for rank in range(len(cuts)):
                here = owner == rank
                absent = f"{of}, rank {rank}"
                yield f"a softmax over {absent}", (chosen - parts[:, rank]).astype(np.float32)
                yield f"0 for targets outside of {absent}", (np.where(here, chosen, 0.0) - whole).astype(np.float32)


def _lse(z: F64) -> F64:
    top = z.max(axis=1)
    total: F64 = top + np.log(np.exp(z - top[:, None]).sum(axis=1))
    return total
