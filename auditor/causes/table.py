"""The causes in the order in which they are tried, cheap before dear, and the ranking of what they say."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Final

import numpy as np

from auditor.causes.computation.activations import products_in_fewer_bits
from auditor.causes.computation.constants import other_constants
from auditor.causes.computation.formats import usual_formats
from auditor.causes.computation.precision import low_precision
from auditor.causes.computation.reduction import rounding_noise, split_sums
from auditor.causes.computation.variants import other_model
from auditor.causes.context.blocks import unknown_block
from auditor.causes.context.context_parallel import slice_edges
from auditor.causes.context.front import cut_in_front, more_in_front, part_of_the_prompt
from auditor.causes.context.inserted import more_in_between
from auditor.causes.context.kv import lost_blocks, stale_kv
from auditor.causes.context.masked import masked_in_part
from auditor.causes.context.prompt import chunk_of_the_prompt, one_more_token, other_prompt
from auditor.causes.context.rope import padded_positions, rope
from auditor.causes.context.routing import other_experts
from auditor.causes.context.seen import attention_mask
from auditor.causes.context.stepwise import row_by_row
from auditor.causes.context.stored import stored_in_fewer_bits, usual_caches
from auditor.causes.context.tenants import other_tenants
from auditor.causes.distribution.bands import other_filters
from auditor.causes.distribution.blurred import blurred_filter
from auditor.causes.distribution.head import low_precision_head, low_precision_output, low_precision_values
from auditor.causes.distribution.logits import logit_processor, penalised_values
from auditor.causes.distribution.masses import many_tokens
from auditor.causes.distribution.shards import one_shard
from auditor.causes.distribution.softmax import tokens_forbidden, touched_tokens
from auditor.causes.distribution.softmax_steps import rounded_steps
from auditor.causes.distribution.temperature import temperature
from auditor.causes.distribution.truncation import truncation
from auditor.causes.evidence import HINT, SETTLED, STRONG, Evidence, Suggestion
from auditor.causes.oracle import Oracle
from auditor.causes.patterns import BEYOND_BY_BOTH, begins_somewhere, boundary, flat_last_bits, other_weights, trend
from auditor.causes.pieces import Piece, largest_piece, together
from auditor.causes.purse import OutOfBudget
from auditor.causes.steps import sampler_defaults, two_steps
from auditor.causes.turns import in_turns
from auditor.causes.values.combined import combined_values
from auditor.causes.values.filler import filler
from auditor.causes.values.lookup import other_token, value_order
from auditor.causes.values.misalignment import shifted_from_a_point, shifted_values, wrong_row
from auditor.causes.values.nonfinite import nonfinite
from auditor.causes.values.transform import value_transform
from auditor.causes.values.unrelated import other_response, unrelated_values
from auditor.causes.weights.altered import altered_weights
from auditor.causes.weights.coherent import one_factor
from auditor.causes.weights.rounded import rounded_weights
from auditor.causes.weights.versions import mixed_weights, stale_weights

Read = Callable[[Evidence], Iterator[Suggestion]]
Compute = Callable[[Evidence, Oracle], Iterator[Suggestion]]
Pattern = Callable[[Evidence, float | None], Iterator[Suggestion]]

_PIECES: Final = 4
_MAY_BE_BEATEN: Final = 0.5
_ALL_BUT_NOISE: Final = 0.99 * STRONG  # a prediction that leaves a hundredth: in other roundings it would be exact
_FAR_BEYOND: Final = 10.0  # times rounding: what no order of sums makes
_FAR_BELOW: Final = 0.01  # times rounding: what no other value inside of the model makes

# Read off the values alone.
READ: Final[tuple[Read, ...]] = (
    filler,
    nonfinite,
    shifted_values,
    shifted_from_a_point,
    value_order,
    penalised_values,
    value_transform,
    unrelated_values,
    low_precision_values,
    other_experts,
    slice_edges,
    tokens_forbidden,
)
# What it looks like where nothing was found.
LOOKS_LIKE: Final[tuple[Pattern, ...]] = (boundary, flat_last_bits, other_weights, trend, begins_somewhere)
# Computed by the reference; what is common and cheap first, for time may run out on a large model. What costs forwards
# takes turns.
OF_ROWS: Final[tuple[Compute, ...]] = (
    temperature,
    stale_weights,
    low_precision_head,
    rounded_steps,
    wrong_row,
    other_token,
    other_response,
    truncation,
    one_shard,
    touched_tokens,
    many_tokens,
    other_filters,
    blurred_filter,
    combined_values,
    logit_processor,
)
OF_MODELS: Final[tuple[Compute, ...]] = (
    split_sums,
    stale_kv,
    usual_caches,
    rope,
    mixed_weights,
    row_by_row,
    usual_formats,
    cut_in_front,
    attention_mask,
    more_in_front,
    part_of_the_prompt,
    more_in_between,
    unknown_block,
    other_model,
    chunk_of_the_prompt,
    other_prompt,
    other_constants,
    other_tenants,
    masked_in_part,
    rounded_weights,
    altered_weights,
    products_in_fewer_bits,
    stored_in_fewer_bits,
    low_precision,
    sampler_defaults,
    low_precision_output,
    lost_blocks,
    one_factor,
    two_steps,
    padded_positions,
    one_more_token,
)
# What users report most of all these; their turns are twice as long.
USUAL: Final = (split_sums, mixed_weights, stale_kv, row_by_row, rope, usual_formats)
FROM_A_TOKEN_ON: Final = (stale_kv, row_by_row)
COMPUTED: Final[tuple[Compute, ...]] = (*OF_ROWS, *OF_MODELS)
# Where values are wrong by themselves; whole models may have said them one by one, as a draft's does.
BY_THEMSELVES: Final[tuple[Compute, ...]] = (other_model, other_constants, sampler_defaults, two_steps)


def diagnose(evidence: Evidence, oracle: Oracle | None) -> tuple[Suggestion, ...]:
    """Suggested causes, the likeliest first, one line each; empty where nothing differs.

    oracle: None reads the values only. Computing stops at the first hypothesis that is right in every bit, or when
    the oracle's budget is spent; what was found until then is ranked.
    """
    if not evidence.differs.any():
        return ()
    found, untried = [suggestion for read in READ for suggestion in read(evidence)], list[str]()
    if oracle is not None and not _settled(found):
        computed, untried = _computed(evidence, oracle)
        found += [_unsure(suggestion) for suggestion in computed] if untried else computed
        if not _explained(computed):
            found += _in_pieces(evidence, oracle)
    if not _settled(found):
        found += _looks_like(evidence, oracle, untried)
    return ranked(found)


def _unsure(said: Suggestion) -> Suggestion:
    """What takes away a part of the difference may be beaten by what was not tried."""
    return said if said.score >= HINT or said.sure else replace(said, score=said.score * _MAY_BE_BEATEN)


def _looks_like(evidence: Evidence, oracle: Oracle | None, untried: list[str]) -> Iterator[Suggestion]:
    noise = None if oracle is None else oracle.noise
    beyond = oracle is not None and oracle.beyond_the_prompt
    ended = f"; time ended before {len(untried)} searches began: {', '.join(untried)}" if untried else ""
    for suggestion in chain.from_iterable(looks_like(evidence, noise) for looks_like in LOOKS_LIKE):
        if not (beyond and suggestion.cause == "other_context"):
            yield replace(suggestion, evidence=suggestion.evidence + ended.replace("_", " "))


def ranked(suggestions: Iterable[Suggestion]) -> tuple[Suggestion, ...]:
    """One suggestion a cause, its best, by descending score; of equal ones the first."""
    best: dict[str, dict[str, Suggestion]] = {}
    for suggestion in suggestions:
        of_sides = best.setdefault(suggestion.cause, {})
        if suggestion.side not in of_sides or suggestion.score > of_sides[suggestion.side].score:
            of_sides[suggestion.side] = suggestion
    each = (_of_sides(list(of_sides.values())) for of_sides in best.values())
    return tuple(sorted(each, key=lambda suggestion: -suggestion.score))


def _of_sides(said: list[Suggestion]) -> Suggestion:
    """What is said of one side, or of both where it is not much less likely of the other."""
    first, *others = sorted(said, key=lambda suggestion: -suggestion.score)
    if not others or others[0].score < _MAY_BE_BEATEN * first.score:
        return first
    evidence = "; ".join(f"{each.side}: {each.evidence}" for each in (first, others[0]))
    return replace(first, side="both", evidence=evidence)


def _computed(evidence: Evidence, oracle: Oracle) -> tuple[list[Suggestion], list[str]]:
    """What was found, and the searches that the budget was spent before."""
    found, left = list[Suggestion](), [*OF_ROWS]
    try:
        while left:
            found += left.pop(0)(evidence, oracle)
            if _explained(found):
                return found, []
        searches = [
            (each.__name__, partial(each, evidence, oracle), _long(each, evidence))
            for each in _of_models(evidence, oracle)
        ]
    except OutOfBudget:
        return found, [each.__name__ for each in (*left, *OF_MODELS)]
    return found, in_turns(searches, oracle.purse, found, _explained)


def _long(search: Compute, evidence: Evidence) -> float:
    """How many turns it has at a time: what is usual where values go wrong where they do."""
    if search is row_by_row and not _starts_right(evidence):
        return 1.0  # what is wrong from the first value on is seldom one row's doing
    return 2.0 if search in USUAL else 1.0


def _starts_right(evidence: Evidence) -> bool:
    """Whether the first value is right, so that the prompt may be: moved positions of a response begin behind it."""
    return bool(np.flatnonzero(evidence.differs)[0] > np.flatnonzero(evidence.active)[0])


def _of_models(evidence: Evidence, oracle: Oracle) -> tuple[Compute, ...]:
    """Those that differences of this kind and size may come from."""
    told = evidence.found[evidence.differs]
    if not (np.isfinite(told) & (told != 0.0)).any():
        return ()  # nobody computed them
    if evidence.pointwise:
        return BY_THEMSELVES
    # Where neither side computes as the reference does, no fault finer than that could be told.
    if not evidence.alone and _within(BEYOND_BY_BOTH, evidence, oracle):
        return ()
    if _within(_FAR_BELOW, evidence, oracle):
        return OF_MODELS[: OF_MODELS.index(split_sums) + 1]
    if _starts_right(evidence):  # what begins somewhere is a cache's or a row's sooner than a model's
        return (*FROM_A_TOKEN_ON, *(search for search in OF_MODELS if search not in FROM_A_TOKEN_ON))
    return OF_MODELS if _within(_FAR_BEYOND, evidence, oracle) else tuple(s for s in OF_MODELS if s is not split_sums)


def _in_pieces(evidence: Evidence, oracle: Oracle) -> list[Suggestion]:
    """What is left of a side when the piece that one prediction is right of is taken away, looked at by itself."""
    pieces: list[Piece] = []
    rest = evidence
    while len(pieces) < _PIECES and (piece := largest_piece(rest, oracle)):
        pieces.append(piece)
        rest = replace(rest, active=rest.active & ~piece.rows)
        if not rest.differs.any():
            return [together(pieces)]
        if not largest_piece(rest, oracle):
            found = [suggestion for read in READ for suggestion in read(rest)] + _computed(rest, oracle)[0]
            if _settled(found):
                return [max(found, key=lambda suggestion: suggestion.score), together(pieces)]
    return [together(pieces)] if pieces else []


def _within(times: float, evidence: Evidence, oracle: Oracle) -> bool:
    """Whether the differences are within so many times those that rounding alone makes inside of the model."""
    if oracle.noise is None:
        oracle.noise = rounding_noise(oracle)
    return float(np.median(np.abs(evidence.delta[evidence.differs]))) < times * oracle.noise


def _explained(computed: list[Suggestion]) -> bool:
    """Whether a prediction is right but for roundings."""
    return any(suggestion.score >= _ALL_BUT_NOISE for suggestion in computed)


def _settled(suggestions: list[Suggestion]) -> bool:
    """Whether one is right wherever the side is wrong, which nothing could explain better."""
    return any(suggestion.score >= SETTLED for suggestion in suggestions)
