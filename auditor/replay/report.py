"""What a replay finds on one side: does it reproduce, which op is the first to differ, which swap removes it."""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from auditor.compare import Logprobs
from auditor.records import Record
from auditor.replay.watch import OPS, Call, Mixed, Tensors, Watched, first_difference, run
from rl_kernel.compare import compare_bits
from rl_kernel.reference.model import Decoder

OUTSIDE: Final = "so the fault lies outside these ops: in weights, tokens, positions, sampling, cache or the engine"


@dataclass(frozen=True, slots=True)
class Replayed:
    """One side.

    unlike: reported values that the given ops do not give bit by bit; distance: their mean |Δ| from the reported ones,
    over values that are finite on both sides, None where none is; reference_distance: the same of the reference.
    differing: tokens that differ from the reference under these ops. call: the first to differ on equal inputs, with
    what it took and gave; None: there is none. expected: the reference's output of that call. swaps: tokens that still
    differ with one op swapped, by op;
    together: where no single swap is enough, the ops that must all be swapped.
    """

    unlike: int
    distance: float | None
    reference_distance: float | None
    differing: int
    call: Call | None
    tensors: Tensors | None
    expected: Tensors | None
    swaps: dict[str, int]
    together: tuple[str, ...] = ()

    @property
    def reproduced(self) -> bool:
        """Whether the given ops give the very bits that the side reported."""
        return self.unlike == 0


@dataclass(frozen=True, slots=True)
class Question:
    """What is run: a decoder on a sample at a temperature. tokens: int64 [N]."""

    decoder: Decoder
    tokens: np.ndarray
    prompt_len: int
    temperature: float

    def run(self, ops: object) -> tuple[Logprobs, Watched]:
        """Run it on some ops."""
        return run(self.decoder, ops, self.tokens, self.prompt_len, self.temperature)


@dataclass(frozen=True, slots=True)
class Match:
    """How near ops come to what a side reported: values that they do not give bit by bit, and the mean |Δ|, if any."""

    unlike: int
    distance: float | None

    @property
    def away(self) -> float:
        """The distance to compare by: what cannot be compared is as far as anything."""
        return math.inf if self.distance is None else self.distance


def match(question: Question, record: Record, make_ops: Callable[[], object]) -> Match:
    """Run a side's ops once, to see whether they are the ones to look at."""
    found, _ = question.run(make_ops())
    return Match(compare_bits(found, record.logprobs).differing, distance_between(found, record.logprobs))


def replay(question: Question, record: Record, make_ops: Callable[[], object]) -> Replayed:
    """Run the reference and a side's ops, find the first op that differs, then swap one op after the other.

    make_ops: gives the ops for one run, for they may keep state.
    """
    truth, right = question.run(question.decoder.reference)
    found, wrong = question.run(make_ops())
    at = first_difference(wrong.calls, right.calls)
    tensors = expected = None
    if at is not None:
        tensors = question.run(Watched(make_ops(), keep=at))[1].kept
        expected = question.run(Watched(question.decoder.reference, keep=at))[1].kept
    swaps = {op: _left(question, make_ops, truth, [op]) for op in OPS} if at is not None else {}
    return Replayed(
        unlike=compare_bits(found, record.logprobs).differing,
        distance=distance_between(found, record.logprobs),
        reference_distance=distance_between(truth, record.logprobs),
        differing=compare_bits(found, truth).differing,
        call=None if at is None else wrong.calls[at],
        tensors=tensors,
        expected=expected,
        swaps=swaps,
        together=_together(question, make_ops, truth) if swaps and min(swaps.values()) > 0 else (),
    )


def lines(side: str, name: str, replayed: Replayed) -> Iterator[str]:
    """The report for people. name: of the ops."""
    told = (
        "reproduce the reported bits"
        if replayed.reproduced
        else f"do NOT give {replayed.unlike} reported values, from which they are {apart(replayed.distance)} away in"
        f" the mean (the reference {apart(replayed.reference_distance)})"
    )
    yield f"{side}: the ops {name} {told}; {replayed.differing} tokens differ from the reference"
    if replayed.call is None:
        yield f"{side}: no op differs on equal inputs"
        if not replayed.reproduced:
            yield f"{side}: {OUTSIDE}"
        return
    if not replayed.reproduced:
        yield f"{side}: these ops are the nearest of ours, not the side's own; what follows is said of them"
    assert replayed.tensors is not None
    assert replayed.expected is not None
    difference = compare_bits(replayed.tensors.output, replayed.expected.output)
    yield (
        f"{side}: first to differ on equal inputs: {replayed.call.op} at {replayed.call.name},"
        f" {difference.differing} of {difference.compared} values, by {difference.largest}"
        + ("" if difference.max_ulp is None else f" and {difference.max_ulp} units of the last place at most")
    )
    for op, left in replayed.swaps.items():
        verdict = "the difference is gone" if left == 0 else f"{left} tokens still differ"
        yield f"{side}: with the reference's {op}: {verdict}"
    if replayed.together:
        yield f"{side}: with the reference's {', '.join(replayed.together)} together: the difference is gone"


def apart(distance: float | None) -> str:
    """A mean |Δ| for a message: where no two values are finite it is not 0."""
    return "not finitely" if distance is None else f"{distance:.3g}"


def distance_between(found: Logprobs, reported: Logprobs) -> float | None:
    """Their mean |Δ| over the values that are finite on both sides; None where none is."""
    finite = np.isfinite(found) & np.isfinite(reported)
    return float(np.abs(found[finite].astype(np.float64) - reported[finite]).mean()) if finite.any() else None


def _left(question: Question, make_ops: Callable[[], object], truth: Logprobs, swapped: Collection[str]) -> int:
    """Tokens that differ from the reference with these ops swapped for its own."""
    names = frozenset(swapped)
    if "linear_logp" in names:
        # The head's product is part of linear_logp in the reference, and goes with it.
        names |= {"gemm_fp32", "logp_from_logits"}
    found, _ = question.run(Mixed(make_ops(), question.decoder.reference, names))
    return compare_bits(found, truth).differing


def _together(question: Question, make_ops: Callable[[], object], truth: Logprobs) -> tuple[str, ...]:
    """Ops of which none can be left unswapped if the difference is to go; empty where even all of them leave some."""
    swapped = list(OPS)
    if _left(question, make_ops, truth, swapped):
        return ()
    for op in OPS:
        fewer = [other for other in swapped if other != op]
        if _left(question, make_ops, truth, fewer) == 0:
            swapped = fewer
    return tuple(swapped)
