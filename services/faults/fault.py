"""What a fault of an engine is, and what comes out of one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from services.faults.small_job import SmallJob


@dataclass(frozen=True, slots=True)
class EngineFault:
    """One way to break a job that runs.

    kind: which of the list's kinds it is. side: that is wrong; `declared` where the reports themselves show it.
    causes: right answers. begin: breaks a job that has done its `clean` steps. shows: the step since then, from 1,
    whose samples are looked at; those before it are sound, or are of the same fault and not counted (`early`).
    note: what of it is not as in a real job.
    """

    kind: str
    name: str
    side: str
    causes: frozenset[str]
    begin: Callable[[SmallJob], None]
    clean: int = 2
    shows: int = 1
    early: int = 0
    note: str = ""

    @property
    def sound_steps(self) -> int:
        """Steps at the job's beginning whose samples must all match."""
        return self.clean + self.shows - 1 - self.early

    @property
    def last_step(self) -> int:
        """The step whose samples are looked at."""
        return self.clean + self.shows - 1


@dataclass(frozen=True, slots=True)
class Sample:
    """What the auditor's API says of one sample. judgement: as docs/audit-protocol.md explains it."""

    step: int
    sample_id: str
    judgement: dict[str, Any]

    @property
    def sound(self) -> bool:
        """Whether it is a match that the reference has confirmed."""
        return bool(self.judgement["verdict"] == "match" and self.judgement["reference"] == "done")


@dataclass(frozen=True, slots=True)
class Broken:
    """What became of one fault. samples: of the step that was looked at; clean: of the sound steps before it."""

    fault: EngineFault
    run_id: str
    samples: tuple[Sample, ...]
    clean: tuple[Sample, ...]
    seconds: float
