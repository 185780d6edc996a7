"""Every fault in a job of its own, on one auditor; what its API then says."""

import json
import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote

from services.auditor_access import AuditorAccess
from services.errors import AuditorError, ConfigError
from services.faults.fault import Broken, EngineFault, Sample
from services.faults.small_job import SmallJob
from services.faults.table import FAULTS
from services.referee import OwnAuditor
from services.tiny_model import write_tiny_model
from services.verdicts import AuditorApi

_TINY_RATE: Final = 1e-3
_RATE: Final = 2e-5  # a trained model's update is that small
_SPARE_SECONDS: Final = 120.0


def chosen(names: Sequence[str]) -> tuple[EngineFault, ...]:
    """The faults whose name or kind is one of `names`, or all; ConfigError for a name that there is not."""
    for name in names:
        if not any(name in (fault.name, fault.kind) for fault in FAULTS):
            kinds = ", ".join(dict.fromkeys(fault.kind for fault in FAULTS))
            raise ConfigError(f"there is no fault {name!r}; kinds are: {kinds}")
    return tuple(fault for fault in FAULTS if not names or fault.name in names or fault.kind in names)


def broken(
    model: Path | None, folder: Path, faults: Sequence[EngineFault], each: int, seconds: float
) -> Iterator[Broken]:
    """Break a job in each way. folder: gets ledger, weights, capsules and the engines' output.

    each: samples looked at of each. seconds: for a search for causes, of one side at most. Raises what the engines
    and the auditor raise: ServicesError, RlKernelError.
    """
    rate = _TINY_RATE if model is None else _RATE
    model = model or write_tiny_model(folder / "model")
    weights = folder / "weights"
    weights.mkdir(parents=True, exist_ok=True)
    arguments = ["--ledger", str(folder / "ledger.sqlite"), "--weights-root", str(weights), "--recompute-rate", "1"]
    arguments += ["--diagnose-per-step", "1000000", "--diagnose-seconds", str(seconds)]
    auditor = OwnAuditor(folder / "auditor", arguments, 0, 0, restart=False)
    access = auditor.start()
    try:
        for number, fault in enumerate(faults):
            began = time.monotonic()
            run_id = f"{number:02d}-{re.sub('[^0-9a-z]+', '-', fault.name.lower())}"
            with _output_to(folder / "engines.log"):
                _run(SmallJob(model, access, folder, run_id, each, rate), fault)
            found = _answers(access, run_id, fault, each, seconds)
            samples = [sample for sample in found if sample.step == fault.last_step][:each]
            _keep_capsule(access, folder, run_id, samples)
            clean = tuple(sample for sample in found if sample.step < fault.sound_steps)
            yield Broken(fault, run_id, tuple(samples), clean, time.monotonic() - began)
    finally:
        auditor.stop()


def _run(job: SmallJob, fault: EngineFault) -> None:
    try:
        for _ in range(fault.clean):
            job.step()
        job.flush(_SPARE_SECONDS)
        fault.begin(job)
        for _ in range(fault.shows):
            job.step()
        job.flush(_SPARE_SECONDS)
    finally:
        job.close()


def _answers(access: AuditorAccess, run_id: str, fault: EngineFault, each: int, seconds: float) -> list[Sample]:
    """All samples of a run, once each has a verdict and its causes."""
    api = AuditorApi(access, run_id)
    deadline = time.monotonic() + _SPARE_SECONDS + 2 * seconds * each * fault.shows
    while (said := api.run()) is None or not said.settled:
        if time.monotonic() > deadline:
            raise AuditorError(
                f"the auditor has not judged run {run_id} within {_SPARE_SECONDS:.0f} s and its searches"
            )
        time.sleep(0.1)
    steps = range(fault.last_step + 1)
    pages = (_get(access, f"/runs/{quote(run_id)}/steps/{step}/samples?limit=1000") for step in steps)
    return [
        Sample(it["step"], it["sample_id"], it["judgement"]) for page in pages for it in json.loads(page)["samples"]
    ]


def _keep_capsule(access: AuditorAccess, folder: Path, run_id: str, samples: Sequence[Sample]) -> None:
    """Freeze the first of the samples that is wrong."""
    for sample in samples:
        if not sample.sound:
            content = _get(access, f"/runs/{quote(run_id)}/capsules/{sample.step}/{quote(sample.sample_id)}")
            (folder / "capsules").mkdir(exist_ok=True)
            (folder / "capsules" / f"{run_id}.capsule").write_bytes(content)
            return


def _get(access: AuditorAccess, path: str) -> bytes:
    try:
        with access.get(f"/api/v1{path}", seconds=30.0) as answer:
            return answer.read()
    except OSError as error:
        raise AuditorError(f"the auditor does not answer {path}: {error}") from None


@contextmanager
def _output_to(log: Path) -> Iterator[None]:
    """What engines write to the two outputs of this process, also from C++, goes to a file meanwhile."""
    kept = [os.dup(1), os.dup(2)]
    with log.open("ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for number, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)
