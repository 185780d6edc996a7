"""Peak memory of a tree of processes, each shared page counted once: the sum of proportional set sizes."""

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import psutil

_PERIOD_SECONDS = 1.0
# What a process is, by a word of its command line; the first that fits.
_ROLES = (
    ("RolloutActor", "rollout"),
    ("TrainerActor", "trainer"),
    ("VLLM", "rollout"),
    ("auditor.", "auditor"),
    ("ray", "ray"),
)


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of all processes together, and of each kind of process, at one moment."""

    total: int = 0
    by_role: Mapping[str, int] = field(default_factory=dict)


class PeakMemory:
    """Samples this process and all its descendants once a second, on a thread of its own, until `stop`."""

    def __init__(self) -> None:
        self._peak = Usage()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="peak-memory", daemon=True)
        self._thread.start()

    def stop(self) -> Usage:
        """Stop sampling and return the largest sum that was seen."""
        self._stopping.set()
        self._thread.join()
        return self._peak

    def _sample(self) -> None:
        while True:
            self._peak = max(self._peak, tree_usage(psutil.Process()), key=lambda usage: usage.total)
            if self._stopping.wait(_PERIOD_SECONDS):
                return


def tree_usage(root: psutil.Process) -> Usage:
    """Proportional set sizes of `root` (role `job`) and its descendants. A process that ends meanwhile counts as 0."""
    by_role: Counter[str] = Counter()
    for process in [root, *root.children(recursive=True)]:
        try:
            role = "job" if process == root else _role(" ".join(process.cmdline()))
            by_role[role] += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return Usage(by_role.total(), dict(by_role))


def _role(command: str) -> str:
    return next((role for word, role in _ROLES if word in command), "other")
