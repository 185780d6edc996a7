"""The process that runs the reference: `python -m auditor.recompute_worker PLACE PARENT`, a `WeightsPlace` and a pid.

Jobs come on stdin, answers go to stdout.
A worker holds the newest few models it was asked for; weights are mapped, not read, so several workers share them.
"""

import ctypes
import logging
import os
import signal
import sys
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np

from auditor.causes.evidence import Evidence, Suggestion
from auditor.causes.sample import Weights, diagnose_sample
from auditor.causes.table import diagnose, ranked
from auditor.codec import decode
from auditor.compare import Logprobs, first_layer
from auditor.contracts import known_contracts
from auditor.errors import RecomputeError
from auditor.facts import layer_digests
from auditor.frames import read_frame, write_frame
from auditor.judge import ReferenceLogprobs
from auditor.positions import CAUSAL, I64, Positions, first_keys_of, ids_of, pads_seen
from auditor.records import Record, RolloutRecord, TrainerRecord
from auditor.weights_place import WeightsPlace, WeightsStore
from rl_kernel.errors import ModelError, RlKernelError
from rl_kernel.reference.model import Decoder

log = logging.getLogger(__name__)
_MODELS = 4
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Models:
    """Decoders by weight digest and contract digest, out of a store of weights."""

    def __init__(self, store: WeightsStore) -> None:
        self._store = store
        self._contracts = known_contracts()
        self._open: OrderedDict[tuple[str, str], Decoder] = OrderedDict()

    def get(self, version: int, digest: str, contract_digest: str) -> Decoder:
        """The decoder of these weights; RecomputeError where the root does not hold them."""
        key = (digest, contract_digest)
        if key not in self._open:
            self._keep(key, self._load(version, digest, contract_digest))
        self._open.move_to_end(key)
        return self._open[key]

    def _load(self, version: int, digest: str, contract_digest: str) -> Decoder:
        contract = self._contracts.get(contract_digest)
        if contract is None:
            raise RecomputeError(f"no contract has the digest {contract_digest}", "contract_unknown")
        folder = self._store.folder(version, digest)
        try:
            decoder = Decoder.open(folder, contract)
        except ModelError as error:
            self._store.reject(folder)
            raise RecomputeError(str(error), "weights_unreadable") from error
        if decoder.weight_digest != digest:
            self._store.reject(folder)
            raise RecomputeError(
                f"{folder} holds weights {decoder.weight_digest}, the record names {digest}", "weights_digest"
            )
        return decoder

    def around(self, record: RolloutRecord) -> Weights:
        """The decoder that a record names and the versions of its job, for a diagnosis."""
        named = self.get(record.weight_version, record.weight_digest, record.contract_digest)
        near = self._store.folder(record.weight_version, record.weight_digest)
        versions = self._store.versions(near)

        def load(version: int) -> Decoder:
            key = (f"{near.parent}/v{version}", record.contract_digest)
            if key not in self._open:
                folder = self._store.of_version(version, near)
                self._keep(key, Decoder.open(folder, self._contracts[record.contract_digest]))
            return self._open[key]

        return Weights(named, versions, load)

    def _keep(self, key: tuple[str, str], decoder: Decoder) -> None:
        self._open[key] = decoder
        while len(self._open) > _MODELS:
            self._open.popitem(last=False)


def answer(models: Models, job: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    """Run one job: the two records in the body, one after the other, the first `rollout_bytes` long.

    The answer's body is the reference under the rollout's contract, then, where it is another, under the trainer's.
    """
    cut = job["rollout_bytes"]
    rollout, trainer = decode(body[:cut]), decode(body[cut:])
    assert isinstance(rollout, RolloutRecord)
    assert isinstance(trainer, TrainerRecord)
    try:
        reference = recompute(models, rollout, trainer)
    except RecomputeError as error:
        return {"code": error.code, "error": str(error)}, b""
    except RlKernelError as error:
        return {"code": "reference_refused", "error": str(error)}, b""
    causes = _causes(models, rollout, trainer, reference, job["diagnose"]) if job["diagnose"] else None
    arrays = [reference.rollout] if reference.trainer is reference.rollout else [reference.rollout, reference.trainer]
    header = {"mma": reference.mma, "causes": causes, "first_layers": reference.first_layers}
    return header, b"".join(a.astype("<f4").tobytes() for a in arrays)


def _causes(
    models: Models, rollout: RolloutRecord, trainer: TrainerRecord, reference: ReferenceLogprobs, seconds: float
) -> list[dict[str, Any]] | None:
    """The search for causes; None where it fails, which costs nobody the verdict.

    The models of causes count from 0: at other positions only what the values look like can be said.
    """
    try:
        with np.errstate(all="ignore"):  # what a broken side reports may overflow anything
            if stated_positions(rollout.positions, trainer.positions, len(rollout.tokens)) is not None:
                return [suggestion.to_json() for suggestion in _patterns(rollout, trainer, reference)]
            found = diagnose_sample(rollout, trainer, reference, models.around(rollout), seconds=seconds)
    except Exception:
        log.exception("causes of %s were not found", rollout.key)
        return None
    return [suggestion.to_json() for suggestion in found]


def _patterns(rollout: RolloutRecord, trainer: TrainerRecord, reference: ReferenceLogprobs) -> tuple[Suggestion, ...]:
    found: list[Suggestion] = []
    sides: tuple[tuple[Record, Logprobs], ...] = ((rollout, reference.rollout), (trainer, reference.trainer))
    for record, truth in sides:
        evidence = Evidence(record.logprobs, truth, record.mask, record, rollout, trainer)
        if evidence.differs.any():
            found += [replace(suggestion, side=record.side) for suggestion in diagnose(evidence, None)]
    return ranked(found)


def recompute(models: Models, rollout: RolloutRecord, trainer: TrainerRecord) -> ReferenceLogprobs:
    """The reference under each side's contract, once where it is the same one, at the positions that they state."""
    places = stated_positions(rollout.positions, trainer.positions, len(rollout.tokens))
    layers = bool(rollout.layer_digests or trainer.layer_digests)
    of_rollout = _reference(models, rollout, rollout.contract_digest, places, layers)
    of_trainer = of_rollout
    if trainer.contract_digest != rollout.contract_digest:
        of_trainer = _reference(models, rollout, trainer.contract_digest, places, layers)
    first = tuple(
        first_layer(record.layer_digests, truth.layer_digests)
        for record, truth in ((rollout, of_rollout), (trainer, of_trainer))
    )
    mma = of_rollout.mma if of_trainer is of_rollout else f"{of_rollout.mma},{of_trainer.mma}"
    return ReferenceLogprobs(of_rollout.logprobs, of_trainer.logprobs, mma, first_layers=(first[0], first[1]))


def temperature_of(record: Record) -> float:
    """The temperature that the reported log-probabilities are of; RecomputeError where the reference cannot follow."""
    sampling = record.sampling
    if sampling.logprobs_mode == "raw_logprobs":
        return 1.0
    if sampling.logprobs_mode != "processed_logprobs":
        raise RecomputeError(f"logprobs_mode {sampling.logprobs_mode!r} has no reference", "sampling_unsupported")
    if (sampling.top_p, sampling.top_k, sampling.min_p) != (1.0, 0, 0.0):
        raise RecomputeError(
            f"top_p {sampling.top_p}, top_k {sampling.top_k}, min_p {sampling.min_p}: the reference renormalises"
            " over the whole vocabulary only",
            "sampling_unsupported",
        )
    return sampling.temperature


def stated_positions(said: Positions, other: Positions, length: int) -> I64 | None:
    """Where a side says that its tokens are, int64 [N]; None where it counts from 0. other: says the same, maybe more.

    RecomputeError where the reference cannot follow: it rotates by any position, and each row sees all in front of it.
    """
    if said.attention != CAUSAL:
        _not_supported(f"attention {said.attention!r}")
    keys = first_keys_of(said, length)
    if keys.any():
        at = int(np.flatnonzero(keys)[0])
        _not_supported(f"row {at}, which sees nothing before token {keys[at]},")
    if pads_seen(said):
        _not_supported(f"a sample that sees {pads_seen(said)} pads")
    found = ids_of(said, length)
    places = ids_of(other, length) if found is None else found
    if places is None:
        _not_supported("a digest of positions without the positions")
    if places.min() < 0:
        _not_supported(f"position {places.min()}")
    return None if np.array_equal(places, np.arange(length)) else places


def _not_supported(what: str) -> NoReturn:
    raise RecomputeError(f"{what} has no reference", "positions_unsupported")


def decoder_of(models: Models, record: Record, tokens: np.ndarray, contract_digest: str) -> Decoder:
    """The decoder that answers for a record; RecomputeError where the reference cannot follow what the record says."""
    decoder = models.get(record.weight_version, record.weight_digest, contract_digest)
    if record.positions.rope_digest != decoder.config.rope_digest:
        raise RecomputeError(
            f"the record names rotary parameters {record.positions.rope_digest}, the weights' config has"
            f" {decoder.config.rope_digest}",
            "rope_differs",
        )
    if not 1 <= record.prompt_len < len(tokens):
        said = f"prompt_len {record.prompt_len} of {len(tokens)} tokens: the reference needs a prompt and a response"
        raise RecomputeError(said, "reference_refused")
    highest = int(tokens.max())
    if highest >= decoder.config.vocab:
        said = f"token id {highest} is beyond the model's vocabulary of {decoder.config.vocab}"
        raise RecomputeError(said, "reference_refused")
    return decoder


@dataclass(frozen=True, slots=True)
class _Reference:
    """What one contract gives: float32 [R], the model of its arithmetic, the digests of its layers where asked for."""

    logprobs: Logprobs
    mma: str
    layer_digests: tuple[str, ...]


def _reference(
    models: Models, record: RolloutRecord, contract_digest: str, places: I64 | None, layers: bool
) -> _Reference:
    temperature = temperature_of(record)
    decoder = decoder_of(models, record, record.tokens, contract_digest)
    digests: list[str] = []
    (logprobs,) = decoder.logprobs(
        [record.tokens.astype(np.int64)],
        [record.prompt_len],
        temperature,
        None if places is None else [places],
        (lambda _, rows: digests.extend(layer_digests([rows[:-1]]))) if layers else None,
    )
    return _Reference(logprobs, decoder.contract.profile.mma, tuple(digests))


def main(place: WeightsPlace, parent: int, idle: bool) -> None:
    """Answer jobs until stdin ends. The auditor must not slow the job that it watches: the worker is nice, or idle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the auditor too, which ends this process
    # Nor does it outlive one that is killed: it would find out when its search, or a disk that hangs, lets it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # it was killed before that
    models = Models(place.open())
    write_frame(sys.stdout.buffer, {"there": True})
    if idle:  # from here on, for one that only starts is waited for so long and no longer
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(5)
    while True:
        try:
            job, body = read_frame(sys.stdin.buffer)
            if job["diagnose"]:
                os.setpriority(os.PRIO_PROCESS, 0, 19)  # a guess must not take the core of a verdict
            write_frame(sys.stdout.buffer, *answer(models, job, body))
        except (EOFError, BrokenPipeError):
            return  # the auditor has gone, and with it whoever would read the answer


if __name__ == "__main__":
    main(WeightsPlace.from_json(sys.argv[1]), int(sys.argv[2]), idle="idle" in sys.argv[3:])
