"""A vocabulary cut over ranks whose parts were not put together: a softmax over one part, a target of another."""

from collections.abc import Iterator
from itertools import chain
from typing import Final

import numpy as np

from auditor.causes.evidence import Evidence, Suggestion
from auditor.causes.oracle import F64, Oracle
from auditor.causes.search import nearest
from auditor.compare import Logprobs

_RANKS: Final = (2, 4, 8)
_PADDED_TO: Final = (64, 128)
_WORK: Final = 1 << 23  # probabilities that are looked at
_LEAST: Final = 8
_TILES: Final = 64
_SLACK: Final = 0.01  # of the mass: what the right part leaves


def one_shard(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """The reference's logits, normalised or looked up on one rank only."""
    z = oracle.own_logits[:, : oracle.decoder.config.vocab].astype(np.float64) / oracle.temperature
    mistakes = (("vocabulary", name, values) for name, values in _mistakes(z, oracle.targets))
    miscounted = (("vocabulary", name, values) for name, values in _miscounted(evidence, oracle, z))
    if best := nearest(evidence, oracle, chain(miscounted, mistakes)):
        yield best


def _miscounted(evidence: Evidence, oracle: Oracle, z: F64) -> Iterator[tuple[str, Logprobs]]:
    """A shard, or the first or last part of the vocabulary, that is not in the sum, or is there twice.

    At every row the mass of that part is then what the side's softmax has too little or too much.
    """
    found, truth = (values[oracle.window].astype(np.float64) for values in (evidence.found, evidence.truth))
    rows = np.flatnonzero(evidence.differs[oracle.window] & np.isfinite(found))
    rows = rows[: max(_LEAST, _WORK // z.shape[1])]
    if rows.size < _LEAST:
        return
    added = np.expm1(np.clip(truth[rows] - found[rows], -50.0, 50.0))
    mass = np.exp(z[rows] - _lse(z[rows])[:, None])
    up_to = np.concatenate([np.zeros((rows.size, 1)), np.cumsum(mass, axis=1)], axis=1)
    for sign, how in ((-1.0, "without"), (1.0, "with twice the")):
        if not (sign * added > -_SLACK).all():
            continue
        for first, last in _spans(up_to, sign * added):
            if np.abs(up_to[:, last] - up_to[:, first] - sign * added).mean() < _SLACK * np.abs(added).mean():
                part = _lse(z[:, first:last])
                whole = _lse(z)
                lse = whole + np.log1p(sign * np.minimum(np.exp(part - whole), 1 - 1e-12))
                chosen = z[np.arange(len(z)), oracle.targets]
                name = f"a softmax {how} tokens {first} to {last - 1} of {z.shape[1]}"
                yield name, (chosen - lse).astype(np.float32)


def _spans(up_to: F64, mass: F64) -> Iterator[tuple[int, int]]:
    """Ranks' shards, and the end and the beginning of the vocabulary that fit best; up_to: mass in front [R,V+1]."""
    vocab = up_to.shape[1] - 1
    for _, _, cuts in _cut(vocab):
        yield from cuts
    tiles = [first for first in range(0, vocab, _PADDED_TO[0])][:_TILES]
    ends = [min(first + _PADDED_TO[0] * count, vocab) for first in tiles for count in (1, 2)]
    yield from ((first, end) for first, end in zip(np.repeat(tiles, 2).tolist(), ends, strict=True) if first < end)
    end = int(np.abs(up_to[:, -1:] - up_to - mass[:, None]).mean(axis=0).argmin())
    beginning = int(np.abs(up_to - mass[:, None]).mean(axis=0).argmin())
    yield from ((first, last) for first, last in ((end, vocab), (0, beginning)) if last - first >= _LEAST)


def _cut(vocab: int) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Ranks, tokens of a shard, and the shards that a vocabulary of so many tokens has, padded or not."""
    for ranks in _RANKS:
        for multiple in dict.fromkeys((*(m * r for m in _PADDED_TO for r in (1, ranks)), ranks)):
            size = -(-vocab // multiple) * multiple // ranks
            if size * ranks % multiple == 0 and size < vocab:
                yield ranks, size, [(first, min(first + size, vocab)) for first in range(0, vocab, size)]


def _mistakes(z: F64, targets: np.ndarray) -> Iterator[tuple[str, Logprobs]]:
    """Name and log-probabilities; z[W,V] heated logits."""
    chosen = z[np.arange(len(z)), targets]
    whole = _lse(z)
    for ranks, size, cuts in _cut(z.shape[1]):
        parts = np.stack([_lse(z[:, first:last]) for first, last in cuts], axis=1)
        owner = np.minimum(targets // size, len(cuts) - 1)
        tops = np.stack([z[:, first:last].max(axis=1) for first, last in cuts], axis=1)
        unscaled = np.log(np.exp(parts - tops).sum(axis=1))
        for whose, top in (("its token's shard's", tops[np.arange(len(z)), owner]), ("the largest", tops.max(axis=1))):
            name = f"{ranks} shards of {size} tokens, each below its own maximum, with {whose} maximum put back"
            yield f"a sum over {name}", (chosen - top - unscaled).astype(np.float32)
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
