"""Why two sides were not comparable: the field that failed often names the cause by itself."""

import numpy as np
import numpy.typing as npt

from auditor.causes.evidence import CERTAIN, STRONG, Suggestion
from auditor.preconditions import UNKNOWN, NotComparable
from auditor.records import RolloutRecord, TrainerRecord

Ids = npt.NDArray[np.uint32]

_START = 2  # tokens that stand at the beginning of every sequence, or do not
_PART = 4  # tokens that were taken out, and not joined
_PLACES = 256  # where a part may begin

# field → cause, where the field says it all
_BY_FIELD = {
    "weight_version": "stale_weights",
    "weight_digest": "other_weights",
    "positions.rope_digest": "rope_scaling",
    "positions.offset": "position_offset",
    "positions.attention": "attention_mask",
    "sampling.temperature": "temperature",
    "sampling.logprobs_mode": "temperature",
    "sampling.top_p": "truncated_sampling",
    "sampling.top_k": "truncated_sampling",
    "sampling.min_p": "truncated_sampling",
    "sampling.seed": "random_state",
    "layout.vocab_size": "vocabulary",
    "tokens": "vocabulary",
    "contract_digest": "contract",
}


def cause_of_failure(failure: NotComparable, rollout: RolloutRecord, trainer: TrainerRecord) -> Suggestion:
    """The cause that a failed precondition suggests."""
    values = f"{failure.field} is {failure.rollout} at the rollout and {failure.trainer} at the trainer"
    silent = [side for side in ("rollout", "trainer") if getattr(failure, side) == UNKNOWN]
    if silent:
        return Suggestion("unreported", CERTAIN, f"{values}: {' and '.join(silent)} must report {failure.field}")
    if failure.field.startswith("mask"):
        return _mask(rollout, trainer, values)
    if failure.field == "prompt_len":
        off = trainer.prompt_len - rollout.prompt_len
        return Suggestion(
            "off_by_one" if abs(off) <= 2 else "truncation", CERTAIN, f"{values}: the cut is {off:+d} away"
        )
    if failure.field in ("token_count", "tokens_digest") or failure.field.startswith("tokens["):
        return _tokens(rollout, trainer, values)
    cause = _BY_FIELD.get(failure.field, failure.condition.value)
    return Suggestion(cause, CERTAIN, values)


def _mask(rollout: RolloutRecord, trainer: TrainerRecord, values: str) -> Suggestion:
    ours, theirs = rollout.mask, trainer.mask
    if not ours.any():
        return Suggestion("mask", CERTAIN, "no token of the response is active")
    for lag in (1, -1):
        near, far = (theirs[lag:], ours[:-lag]) if lag > 0 else (theirs[:lag], ours[-lag:])
        if near.size and np.array_equal(near, far):
            direction = "later" if lag > 0 else "earlier"
            return Suggestion("off_by_one", STRONG, f"{values}: it is the same mask, one token {direction}")
    return Suggestion("mask", STRONG, f"{values}: {int((ours != theirs).sum())} of {ours.size} tokens")


def _tokens(rollout: RolloutRecord, trainer: TrainerRecord, values: str) -> Suggestion:
    """Same text, other ids; or the same ids, cut short."""
    ours, theirs = rollout.tokens, trainer.tokens
    if theirs is None:
        return Suggestion("retokenisation", 0.5, f"{values}; the trainer sent no ids to look at")
    longer, part = (ours, theirs) if len(ours) > len(theirs) else (theirs, ours)
    more, head, tail = len(longer) - len(part), _alike(longer, part), _alike(longer[::-1], part[::-1])
    if tail == len(part) and 0 < more <= _START:
        said = f"{values}: they are the same behind {more} token(s) in front, as of a start that one side has"
        return Suggestion("retokenisation", STRONG, said)
    if more and (cut := _cut_short(longer, part, head, tail)):
        score, how = cut
        return Suggestion("truncation", score, f"{values}: the shorter sequence is {how}")
    return Suggestion(
        "retokenisation",
        STRONG,
        f"{values}: ids differ from token {head} on ({int(ours[head])} and {int(theirs[head])}),"
        f" the last {min(tail, len(part) - head)} are equal",
    )


def _cut_short(longer: Ids, part: Ids, head: int, tail: int) -> tuple[float, str] | None:
    """What was cut off, or out; head, tail: how many tokens are the same from the beginning, and from the end."""
    more = len(longer) - len(part)
    if head == len(part):
        return CERTAIN, "the beginning of the longer one"
    if tail == len(part):
        return CERTAIN, "the end of the longer one"
    if _inside(part, longer):
        return CERTAIN, "a part of the longer one"
    if more > _START and head >= len(part) - _START:
        last = len(part) - head
        return STRONG, f"the beginning of the longer one but for its last {last} token(s), as of an end put there"
    if more >= _PART and head + tail >= len(part):
        return STRONG, f"the longer one without {more} tokens from {head} on"
    return None


def _alike(a: Ids, b: Ids) -> int:
    """How many tokens are the same from the beginning."""
    count = min(len(a), len(b))
    differs = np.flatnonzero(a[:count] != b[:count])
    return int(differs[0]) if differs.size else count


def _inside(part: np.ndarray, longer: np.ndarray) -> bool:
    """Whether a sequence is a run of another one."""
    starts = np.flatnonzero(longer[: len(longer) - len(part) + 1] == part[0])
    return any(np.array_equal(longer[at : at + len(part)], part) for at in starts[:_PLACES])
