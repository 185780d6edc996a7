"""The causes in the order in which they are tried, cheap before dear, and the ranking of what they say."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from auditor.causes.altered import altered_weights
from auditor.causes.context import cut_in_front, more_in_front, part_of_the_prompt
from auditor.causes.context_parallel import slice_edges
from auditor.causes.evidence import CERTAIN, Evidence, Suggestion
from auditor.causes.filler import filler
from auditor.causes.head import low_precision_head, low_precision_sum, low_precision_values
from auditor.causes.kv import boundary, stale_kv
from auditor.causes.logits import logit_processor, tokens_forbidden
from auditor.causes.lookup import other_token, value_order
from auditor.causes.misalignment import shifted_from_a_point, shifted_values, wrong_row
from auditor.causes.nonfinite import nonfinite
from auditor.causes.oracle import Oracle, OutOfBudget
from auditor.causes.reduction import flat_last_bits, split_sums
from auditor.causes.rope import grows_with_position, padded_positions, rope
from auditor.causes.routing import other_experts
from auditor.causes.shards import one_shard
from auditor.causes.temperature import temperature
from auditor.causes.transform import unrelated_values, value_transform
from auditor.causes.truncation import truncation
from auditor.causes.variants import other_model
from auditor.causes.weights import half_updated_weights, other_weights, stale_weights

Read = Callable[[Evidence], Iterator[Suggestion]]
Compute = Callable[[Evidence, Oracle], Iterator[Suggestion]]

# Read off the values alone.
READ: Final[tuple[Read, ...]] = (
    filler,
    nonfinite,
    shifted_values,
    shifted_from_a_point,
    value_order,
    value_transform,
    unrelated_values,
    low_precision_values,
    other_experts,
    slice_edges,
    boundary,
    grows_with_position,
    tokens_forbidden,
    flat_last_bits,
    other_weights,
)
# Computed by the reference; what is common and cheap first, for time may run out on a large model.
COMPUTED: Final[tuple[Compute, ...]] = (
    temperature,
    low_precision_head,
    low_precision_sum,
    wrong_row,
    other_token,
    truncation,
    one_shard,
    stale_weights,
    logit_processor,
    split_sums,
    stale_kv,
    cut_in_front,
    more_in_front,
    part_of_the_prompt,
    half_updated_weights,
    other_model,
    rope,
    altered_weights,
    padded_positions,
)


def diagnose(evidence: Evidence, oracle: Oracle | None) -> tuple[Suggestion, ...]:
    """Suggested causes, the likeliest first, one line each; empty where nothing differs.

    oracle: None reads the values only. Computing stops at the first hypothesis that is right in every bit, or when
    the oracle's budget is spent; what was found until then is ranked.
    """
    if not evidence.differs.any():
        return ()
    found = [suggestion for read in READ for suggestion in read(evidence)]
    if oracle is not None and not _certain(found):
        found += _computed(evidence, oracle)
    return ranked(found)


def ranked(suggestions: Iterable[Suggestion]) -> tuple[Suggestion, ...]:
    """One suggestion a cause, its best, by descending score; of equal ones the first."""
    best: dict[str, Suggestion] = {}
    for suggestion in suggestions:
        if suggestion.cause not in best or suggestion.score > best[suggestion.cause].score:
            best[suggestion.cause] = suggestion
    return tuple(sorted(best.values(), key=lambda suggestion: -suggestion.score))


def _computed(evidence: Evidence, oracle: Oracle) -> list[Suggestion]:
    found: list[Suggestion] = []
    try:
        for compute in COMPUTED:
            found += compute(evidence, oracle)
            if _certain(found):
                break
    except OutOfBudget:
        return found
    return found


def _certain(suggestions: list[Suggestion]) -> bool:
    return any(suggestion.score >= CERTAIN for suggestion in suggestions)
