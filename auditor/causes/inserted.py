"""A response that goes on behind more than was reported: tokens that stand between two of its own."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from auditor.causes.evidence import Evidence, Suggestion
from auditor.causes.oracle import I64, Oracle
from auditor.causes.search import Candidate, nearest
from auditor.causes.stepwise import Kept, Row
from auditor.compare import Logprobs

_TOKENS: Final = 1024  # of a vocabulary that are all tried
_TOGETHER: Final = 64
_FEW: Final = 2  # wrong rows whose bits tell
_AGAIN: Final = (1, 2, 3, 4, 8, 16)  # tokens that are read again


def more_in_between(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """One token more, or some that were there before, in front of the first value that is wrong."""
    if evidence.begins is not None and (best := nearest(evidence, oracle, _with_more(evidence, oracle))):
        yield best


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
