"""A side that went wrong in more than one way: which prediction is right of which of its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from auditor.causes.evidence import IN_PART, LAST_BITS, STRONG, Evidence, Suggestion
from auditor.causes.oracle import Oracle
from auditor.compare import Mask

_SHARE: Final = 0.7  # of a strong score, where pieces leave something over
_LEAST: Final = 4  # wrong tokens of which a prediction must have the bits


@dataclass(frozen=True, slots=True)
class Piece:
    """Wrong tokens of which one prediction has the bits. rows: bool [R]."""

    cause: str
    name: str
    rows: Mask
    whole: bool


def largest_piece(evidence: Evidence, oracle: Oracle) -> Piece | None:
    """Of all that was predicted so far, what has most of the bits that are wrong; None where nothing has enough."""
    window = oracle.window
    # Differences in the last bit have few values, which something else may have by chance.
    wrong = (evidence.differs & (np.abs(evidence.delta) > LAST_BITS))[window]
    found = evidence.found[window].view(np.uint32)
    computed = evidence.found[window] != 0.0  # what nobody computed is 0, too
    best: Piece | None = None
    for cause, name, predicted in oracle.said:
        rows = wrong & (found == predicted.view(np.uint32))
        if (rows & computed).sum() >= _LEAST and (best is None or rows.sum() > best.rows.sum()):
            everywhere = np.zeros(len(evidence.found), np.bool_)
            everywhere[window] = rows
            best = Piece(cause, name, everywhere, bool(rows.sum() == wrong.sum()))
    return best


def together(pieces: Sequence[Piece]) -> Suggestion:
    """The cause of most of the tokens, with what each piece is; nearly certain where they cover all that is wrong."""
    size: dict[str, int] = {}
    for piece in pieces:
        size[piece.cause] = size.get(piece.cause, 0) + int(piece.rows.sum())
    cause = max(size, key=size.__getitem__)
    whose = "; ".join(
        f"{int(piece.rows.sum())} from token {int(np.flatnonzero(piece.rows)[0])} on those of {piece.name}"
        for piece in pieces
    )
    said = f"of the values that are wrong, {whose}"
    return Suggestion(cause, IN_PART if pieces[-1].whole else STRONG * _SHARE, said)
