"""Why two sides were not comparable: the field that failed often names the cause by itself."""

import numpy as np

from auditor.causes.evidence import CERTAIN, STRONG, Suggestion
from auditor.preconditions import UNKNOWN, NotComparable
from auditor.records import RolloutRecord, TrainerRecord

_START = 2  # tokens that stand at the beginning of every sequence, or do not
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
    shorter = min(len(ours), len(theirs))
    if len(ours) != len(theirs) and np.array_equal(ours[:shorter], theirs[:shorter]):
        return Suggestion("truncation", CERTAIN, f"{values}: the shorter sequence is the beginning of the longer one")
    if len(ours) != len(theirs) and np.array_equal(ours[-shorter:], theirs[-shorter:]):
        more = max(len(ours), len(theirs)) - shorter
        if more <= _START:
            said = f"{values}: they are the same behind {more} token(s) in front, as of a start that one side has"
            return Suggestion("retokenisation", STRONG, said)
        return Suggestion("truncation", CERTAIN, f"{values}: the shorter sequence is the end of the longer one")
    longer, part = (ours, theirs) if len(ours) > shorter else (theirs, ours)
    if len(longer) > shorter and _inside(part, longer):
        return Suggestion("truncation", CERTAIN, f"{values}: the shorter sequence is a part of the longer one")
    at = int(np.flatnonzero(ours[:shorter] != theirs[:shorter])[0])
    tail = 0
    while tail < shorter - at and ours[len(ours) - 1 - tail] == theirs[len(theirs) - 1 - tail]:
        tail += 1
    return Suggestion(
        "retokenisation",
        STRONG,
        f"{values}: ids differ from token {at} on ({int(ours[at])} and {int(theirs[at])}), the last {tail} are equal",
    )


def _inside(part: np.ndarray, longer: np.ndarray) -> bool:
    """Whether a sequence is a run of another one."""
    starts = np.flatnonzero(longer[: len(longer) - len(part) + 1] == part[0])
    return any(np.array_equal(longer[at : at + len(part)], part) for at in starts[:_PLACES])
