"""`--engines`: the faults are put into real engines, which report to a real auditor; here its answers are counted.

The auditor imports none of what it audits. The job that is broken is loaded by its name, when somebody asks for it.
"""

import importlib.util
import os
import shutil
import sys
import tempfile
import time
import warnings
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from auditor.errors import ConfigError
from auditor.faults.matrix import Outcome, rows
from rl_kernel.errors import RlKernelError

# What breaks them, by its name: `chosen(names)` and `broken(model, folder, faults, each, seconds)`.
_BREAKS: Final = "services.faults.broken"
_ENGINES: Final = ("vllm", "megatron")


def break_engines(given: Namespace) -> int:
    """Run the list, print a row as each fault ends, then the count; the exit code."""
    breaks = _loaded()
    began = time.monotonic()
    found: list[Outcome] = []
    clean = flagged = untouched = 0
    try:
        faults = breaks.chosen(given.only)
        with _folder(given.out) as folder, _progress() as bar:
            task = bar.add_task("", total=len(faults))
            model = given.model.resolve() if given.model else None
            for one in breaks.broken(model, folder, faults, given.each, given.seconds):
                outcomes = [_outcome(one.fault, sample) for sample in one.samples]
                mine = [outcome for outcome in outcomes if outcome is not None]
                found += mine or [Outcome(one.fault.name, one.fault.causes, one.fault.side, "none", ())]
                untouched += len(outcomes) - len(mine) if mine else 0
                clean += len(one.clean)
                flagged += sum(not sample.sound for sample in one.clean)
                bar.advance(task)
                bar.update(task, description=one.fault.name)
                _say(one, found, given.evidence)
    except Exception as error:
        # The job's errors are lines too; their tree is not the auditor's to import.
        if not isinstance(error, OSError | RlKernelError) and not hasattr(error, "exit_code"):
            raise
        print(f"faults: {error}", file=sys.stderr)
        return 2
    return _sum(found, clean, flagged, untouched, time.monotonic() - began)


def _loaded() -> Any:
    for name in _ENGINES:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"--engines needs {name}, which is not installed here; pip install '.[cpu,auditor]' does")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron-core's, of parts that nothing here needs
            return importlib.import_module(_BREAKS)
    except ImportError as error:
        raise ConfigError(f"--engines: {_BREAKS} cannot be loaded: {error}") from None


def _outcome(fault: Any, sample: Any) -> Outcome | None:
    """None where the fault left every bit of this sample as it is, as another order of sums may."""
    if sample.sound:
        return None
    judgement = sample.judgement
    named = "declared" if judgement["verdict"] == "not_comparable" else judgement["side"]
    causes = tuple((each["cause"], each["score"], each["evidence"]) for each in judgement["causes"])
    return Outcome(fault.name, fault.causes, fault.side, named, causes)


def _say(one: Any, found: list[Outcome], evidence: bool) -> None:
    mine = [outcome for outcome in found if outcome.fault == one.fault.name]
    (row,) = rows(mine, width=40)
    print(f"{one.fault.kind:<18}  {row}" + (f"  ({one.fault.note})" if one.fault.note else ""), flush=True)
    for outcome in mine if evidence else ():
        for cause, score, why in outcome.causes:
            print(f"  [{outcome.named}] {cause} {score:.2f}: {why}", flush=True)


def _sum(found: list[Outcome], clean: int, flagged: int, untouched: int, seconds: float) -> int:
    right = sum(outcome.correct for outcome in found) / len(found)
    missed = sum(outcome.missed for outcome in found)
    print(
        f"\n{right:.1%} of {len(found)} samples that were broken in real engines get a right cause first, {missed} are"
        f" missed, {flagged} of {clean} sound samples in front of the faults are flagged; {seconds:.0f} s"
    )
    if untouched:
        print(f"{untouched} more had every bit in spite of the fault, as the reference confirms")
    return 0 if right >= 0.9 and missed == 0 and flagged == 0 else 1


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """Where ledger, weights and capsules go: given and kept, or made and removed."""
    if out is not None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise NotADirectoryError(f"--out {out} is there already; give a folder that is new or empty")
        out.mkdir(parents=True, exist_ok=True)
        yield out.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _progress() -> Iterator[Progress]:
    """On the real standard error, whatever becomes of file descriptor 2 while engines write to it."""
    with os.fdopen(os.dup(2), "w") as terminal:
        said = Console(file=terminal)
        columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        with Progress(
            *columns, TimeElapsedColumn(), console=said, transient=True, disable=not said.is_terminal,
            redirect_stdout=False, redirect_stderr=False,
        ) as bar:  # fmt: skip
            yield bar
