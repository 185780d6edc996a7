"""Where the tokens of a sample stand and which keys their rows see, as a side says it.

A side that counts plainly says nothing: its tokens stand at offset, offset + 1, …, and each row sees all in front of it
and itself. Legend: N tokens of the whole sample, prompt and response.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from auditor.errors import RecordError
from auditor.fields import INT64, UINT32, as_array, text, whole

CAUSAL: Final = "causal"
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Positions:
    """Where the tokens are and what they see. rope_digest: of the rotary table's parameters, as
    `rl_kernel.reference.rope_table.rope_digest` gives it; attention: `causal` where no row sees a later token.

    ids: uint32 [N], where they are not offset, offset + 1, …; ids_digest: of them (`position_ids_digest`), alone where
    the ids are not sent. window: keys that a row sees at most, itself among them; 0: all. first_keys: uint32 [N], the
    first token that each row sees, where no window says it. left_padding: pads in front of the first token, which
    stand at no position and are hidden, unless padding_seen: every row then attends to them.
    """

    rope_digest: str
    offset: int = 0
    attention: str = CAUSAL
    ids: npt.NDArray[np.uint32] | None = None
    ids_digest: str = ""
    window: int = 0
    first_keys: npt.NDArray[np.uint32] | None = None
    left_padding: int = 0
    padding_seen: bool = False

    def __post_init__(self) -> None:
        text(self, "positions.", ("rope_digest", "attention"))
        whole(self, "positions.", ("offset",), INT64)
        if not self._says_no_more():
            self._check_the_rest()

    def _says_no_more(self) -> bool:
        """Whether all else is as it is by default: nearly every record of nearly every job, and there are many."""
        if self.ids is not None or self.first_keys is not None or self.padding_seen is not False:
            return False
        return (
            self.ids_digest == ""
            and type(self.window) is type(self.left_padding) is int
            and not (self.window or self.left_padding)
        )

    def _check_the_rest(self) -> None:
        text(self, "positions.", ("ids_digest",))
        whole(self, "positions.", ("window", "left_padding"), UINT32)
        if not isinstance(self.padding_seen, bool):
            raise RecordError(f"positions.padding_seen is {self.padding_seen!r}; it must be true or false")
        for name in ("ids", "first_keys"):
            if getattr(self, name) is not None:
                array = as_array(f"positions.{name}", getattr(self, name), np.uint32, 1).copy()
                array.flags.writeable = False
                object.__setattr__(self, name, array)
        if self.offset and (self.ids is not None or self.ids_digest):
            raise RecordError(f"positions.offset is {self.offset} beside ids, which say all; leave it out")
        if self.window and self.first_keys is not None:
            raise RecordError(f"positions.window is {self.window} beside first_keys, which say all; leave it out")
        if self.ids is not None and self.ids_digest not in ("", position_ids_digest(self.ids)):
            raise RecordError(f"positions.ids_digest {self.ids_digest} is not that of the ids given")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Positions) and self._said() == other._said()

    def __hash__(self) -> int:
        return hash(self._said())

    def _said(self) -> tuple[object, ...]:
        values = (getattr(self, name) for name in self.__slots__)
        return tuple(value.tobytes() if isinstance(value, np.ndarray) else value for value in values)

    def check(self, tokens: int) -> None:
        """RecordError unless these can be the positions of so many tokens."""
        if self.ids is None and self.first_keys is None:
            return
        for name, array in (("ids", self.ids), ("first_keys", self.first_keys)):
            if array is not None and len(array) != tokens:
                raise RecordError(f"positions.{name} has {len(array)} values; {tokens} tokens need as many")
        if self.first_keys is not None:
            beyond = np.flatnonzero(self.first_keys > np.arange(tokens))
            if beyond.size:
                at = int(beyond[0])
                raise RecordError(f"positions.first_keys[{at}] is {self.first_keys[at]}; a row sees itself at least")

    def to_json(self) -> dict[str, Any]:
        """What is said, without what is not."""
        always, said = ("rope_digest", "offset", "attention"), {}
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, np.ndarray):
                said[name] = value.tolist()
            elif value or name in always:
                said[name] = value
        return said


def position_ids_digest(ids: npt.ArrayLike) -> str:
    """sha256 (hex) over position ids as little-endian uint32."""
    return hashlib.sha256(as_array("position ids", ids, np.uint32, 1).astype("<u4").tobytes()).hexdigest()


def ids_of(positions: Positions, tokens: int) -> I64 | None:
    """Position of each token, int64 [N]; None where a side gave no more than their digest."""
    if positions.ids is not None:
        return positions.ids.astype(np.int64)
    # Sums past the end of int64 wrap: no side is let in with such an offset, but it may be held from before.
    plain = np.arange(tokens, dtype=np.int64) + np.int64(positions.offset)
    if positions.ids_digest not in ("", _digest_of(plain)):
        return None
    return plain


def first_keys_of(positions: Positions, tokens: int) -> I64:
    """The first token that each row sees, int64 [N]."""
    if positions.first_keys is not None:
        return positions.first_keys.astype(np.int64)
    seen = positions.window or tokens
    return np.maximum(0, np.arange(tokens, dtype=np.int64) - seen + 1)


def pads_seen(positions: Positions) -> int:
    """Pads in front of the first token that rows attend to."""
    return positions.left_padding if positions.padding_seen else 0


def differences(rollout: Positions, trainer: Positions, tokens: int) -> Iterator[tuple[str, object, object]]:
    """Field and both values of what the sides say differently, the first differing token named."""
    yield from _ids(rollout, trainer, tokens)
    for name in ("rope_digest", "attention"):
        left, right = getattr(rollout, name), getattr(trainer, name)
        if left != right or left == "":
            yield f"positions.{name}", left, right
    if (rollout.window, trainer.window) != (0, 0) or not rollout.first_keys is trainer.first_keys is None:
        yield from _first("first_keys", first_keys_of(rollout, tokens), first_keys_of(trainer, tokens))
    if pads_seen(rollout) != pads_seen(trainer):
        yield "positions.left_padding", f"{pads_seen(rollout)} seen", f"{pads_seen(trainer)} seen"


def _ids(rollout: Positions, trainer: Positions, tokens: int) -> Iterator[tuple[str, object, object]]:
    if not any(said.ids is not None or said.ids_digest for said in (rollout, trainer)):
        if rollout.offset != trainer.offset:
            yield "positions.offset", rollout.offset, trainer.offset
        return
    ours, theirs = ids_of(rollout, tokens), ids_of(trainer, tokens)
    if ours is not None and theirs is not None:
        yield from _first("ids", ours, theirs)
        return
    left = rollout.ids_digest if ours is None else _digest_of(ours)
    right = trainer.ids_digest if theirs is None else _digest_of(theirs)
    if left != right:
        yield "positions.ids_digest", left, right


def _first(name: str, left: I64, right: I64) -> Iterator[tuple[str, object, object]]:
    differing = np.flatnonzero(left != right)
    if differing.size:
        at = int(differing[0])
        yield f"positions.{name}[{at}]", int(left[at]), int(right[at])


def _digest_of(ids: I64) -> str:
    """The digest; where one of them is no uint32 there is none, and a text that no digest equals."""
    if ids.size and not UINT32[0] <= ids.min() <= ids.max() <= UINT32[1]:
        return f"of {ids.min()}..{ids.max()}, which are no uint32"
    return position_ids_digest(ids.astype(np.uint32))
