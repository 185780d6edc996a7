"""Samples of which one side is there, kept in memory until the other one comes: it is then neither read nor decoded.

What is here is durable, and is what the ledger would answer: it is taken in after a commit, and forgotten where a
transaction fails, since nobody knows then what became durable.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from auditor.codec import decode
from auditor.errors import EvidenceError, RecordError
from auditor.judge import Judgement
from auditor.records import Record, SampleKey, Side
from auditor.storage.chain import digest

_BYTES: Final = 64 << 20
# What a sample takes beside its arrays: a dozen objects.
_OBJECTS: Final = 4096
_LONG_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Held:
    """A stored record: the digest of its bytes, and the bytes unless they have been retired.

    record: the same decoded, where it is at hand; the bytes may be left out then.
    """

    digest: bytes
    payload: bytes | None
    record: Record | None = None

    @property
    def retired(self) -> bool:
        """Whether the content is gone."""
        return self.payload is None and self.record is None

    def decoded(self) -> Record:
        """The record; EvidenceError where the stored bytes are not those that were stored, be they one or not."""
        if self.record is not None:
            return self.record
        assert self.payload is not None, "asked of a record that has been retired"
        if digest(self.payload) != self.digest:
            raise EvidenceError("the stored content is not what was stored: its digest is another")
        try:
            return decode(self.payload)
        except RecordError as error:
            raise EvidenceError(str(error)) from None


@dataclass(frozen=True, slots=True)
class Half:
    """One side of a sample, and the judgement that says that it waits."""

    side: Side
    held: Held
    judgement: Judgement


class Halves:
    """Used by the ledger's writer alone.

    limit_bytes: beyond it nothing is taken in, and it is read from the ledger when its other side comes: a step's
    samples come in one order from both sides, so what is kept longest is asked for next. Only what has been here for
    long makes room, for its other side may never come.
    """

    def __init__(self, limit_bytes: int = _BYTES) -> None:
        self._limit, self._bytes = limit_bytes, 0
        # size, Unix seconds by the ledger's clock, and what is kept
        self._kept: OrderedDict[SampleKey, tuple[int, float, Half]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def held(self, key: SampleKey) -> Mapping[Side, Held] | None:
        """What is stored of a sample; None where that is not known here."""
        found = self._kept.get(key)
        return None if found is None else {found[2].side: found[2].held}

    def judgement(self, key: SampleKey) -> Judgement | None:
        """The present judgement; None where it is not known here."""
        found = self._kept.get(key)
        return None if found is None else found[2].judgement

    def keep(self, key: SampleKey, side: Side, held: Held, judgement: Judgement, now: float) -> None:
        """Keep one side, durable by now, without its bytes. Of one that is not decoded nothing is kept.

        now: Unix seconds by the ledger's clock.
        """
        self.forget(key)
        if held.record is None or held.payload is None:
            return
        size = _size(held.record, held.payload)
        while self._kept and self._bytes + size > self._limit:
            oldest, (_, since, _) = next(iter(self._kept.items()))
            if now - since < _LONG_S:
                return
            self.forget(oldest)
        if size <= self._limit:
            self._kept[key] = size, now, Half(side, Held(held.digest, None, held.record), judgement)
            self._bytes += size

    def forget(self, key: SampleKey) -> None:
        """It waits no more, or for something else."""
        if (found := self._kept.pop(key, None)) is not None:
            self._bytes -= found[0]

    def clear(self) -> None:
        """Nothing is known any more."""
        self._kept.clear()
        self._bytes = 0


def _size(record: Record, payload: bytes) -> int:
    """Bytes in memory, at most. An array takes there what it takes on the wire, and a mask eight times that, which is a
    quarter of the log-probabilities beside it; a digest less than twice; but the end of a shard 36 for one.
    """
    return _OBJECTS + 2 * len(payload) + 36 * len(record.layout.vocab_shards)
