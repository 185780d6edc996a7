"""A response that goes on behind more than was reported: tokens that stand between two of its own."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from auditor.causes.context.rope import turned
from auditor.causes.context.stepwise import Kept, Row
from auditor.causes.edits import edited
from auditor.causes.evidence import HINT, Evidence, Suggestion
from auditor.causes.oracle import I64, Oracle
from auditor.causes.search import Candidate, cosine, nearest
from auditor.compare import Logprobs

_TOKENS: Final = 1024  # of a vocabulary that are all tried
_TOGETHER: Final = 64
_FEW: Final = 2  # wrong rows whose bits tell
_LEAST: Final = 16
_MOST: Final = 16  # tokens that are not known
_ALIKE: Final = 0.62  # cosine of two differences
_AGAIN: Final = (1, 2, 3, 4, 8, 16)  # tokens that are read again


def more_in_between(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """One token more, or some that were there before, in front of the first value that is wrong."""
    if evidence.begins is None:
        return
    if best := nearest(evidence, oracle, _with_more(evidence, oracle)):
        yield best
        return
    alike, more = max(_moved(evidence, oracle), default=(0.0, 0))
    if alike > _ALIKE:
        said = (
            f"values move as where {more} tokens stand in front of them, which are not known: correlation {alike:.2f}"
        )
        yield Suggestion("other_context", HINT, said)


def _moved(evidence: Evidence, oracle: Oracle) -> Iterator[tuple[float, int]]:
    """How alike to the difference it is that all from the first wrong token on stand so many positions further on."""
    wrong = np.flatnonzero(evidence.differs[oracle.window] & np.isfinite(evidence.found[oracle.window]))
    if wrong.size < _LEAST:
        return
    first, truth = int(oracle.rows[wrong[0]]) + 1, evidence.truth[oracle.window][wrong]
    where, delta = np.arange(len(oracle.tokens), dtype=np.float64), evidence.delta[oracle.window][wrong]
    for more in range(1, _MOST + 1):
        moved = edited(oracle.decoder, turned(oracle, where + more * (where >= first)))
        effect = oracle.logprobs(moved)[wrong].astype(np.float64) - truth
        yield cosine(effect, delta), more


def _with_more(evidence: Evidence, oracle: Oracle) -> Iterator[Candidate]:
    first = int(evidence.positions[np.flatnonzero(evidence.differs)[0]])  # the token whose value is wrong
    for name, tokens in (*_again(oracle, first), *_one(evidence, oracle, first)):
        longer = np.insert(oracle.tokens, first, tokens)
        if len(longer) > oracle.decoder.config.max_position:
            continue
        late = np.flatnonzero(oracle.rows >= first - 1)
        few = late[evidence.differs[oracle.window][late]][:_FEW]
        if (_behind(oracle, longer, few) == evidence.found[oracle.window][few]).all():
            values = evidence.truth[oracle.window].copy()
            values[late] = _behind(oracle, longer, late)
            yield "other_context", f"a sequence with {name} in front of token {first}", values


def _behind(oracle: Oracle, longer: I64, rows: I64) -> Logprobs:
    at = oracle.rows[rows] + len(longer) - len(oracle.tokens)
    hidden = oracle.hidden(oracle.decoder, longer[: int(at.max()) + 1])
    return oracle.from_logits(oracle.head(oracle.decoder, hidden[at]), targets=oracle.targets[rows])


def _again(oracle: Oracle, first: int) -> Iterator[tuple[str, I64]]:
    """What a generation that is resumed may read again: its start, its prompt, its last tokens."""
    yield "its first token again", oracle.tokens[:1]
    for count in _AGAIN:
        if count <= first:
            yield f"its {count} tokens before again", oracle.tokens[first - count : first]
    yield "its prompt again", oracle.tokens[: oracle.prompt_len]


def _one(evidence: Evidence, oracle: Oracle, first: int) -> Iterator[tuple[str, I64]]:
    """Any one token: each is a row by itself, of which the value is that of the token behind it."""
    vocab, wanted = oracle.decoder.config.vocab, evidence.found[first - oracle.prompt_len]
    if vocab > _TOKENS or first >= len(oracle.tokens):
        return
    kept = Kept(oracle)
    for some in np.array_split(np.arange(vocab), 1 + vocab // _TOGETHER):
        rows = [Row(token=int(token)) for token in some]
        for hit in np.flatnonzero(kept.values(first, rows, target=int(oracle.tokens[first])) == wanted):
            yield f"token {some[hit]}", some[hit : hit + 1]
