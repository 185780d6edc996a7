"""Who runs the reference: a process here, or an actor of an engine that is already there, chosen by name.

A worker answers one job at a time: a header and bytes in, a header and bytes out (`recompute_worker.answer`).
"""

import importlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO, Final, Protocol, cast

from auditor.errors import ConfigError
from auditor.frames import read_frame, write_frame
from auditor.weights_place import WeightsPlace

# A process is there within a second or two, but for a disk or a store that does not answer.
_START_S: Final = 60.0


class Worker(Protocol):
    """One runner of the reference."""

    def wait(self, seconds: float) -> bool:
        """Whether it is there, waited for so long: a cluster may have no core free. EOFError or OSError where it ended
        before it was: no job is to blame for that.
        """

    def ask(self, job: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """Run one job. EOFError or OSError where the worker is gone; another one is hired then."""

    def kill(self) -> None:
        """End it at once, from any thread; a job that it is at fails."""

    def stop(self) -> None:
        """End it and let go of what it holds, from the thread that asks it."""


Hire = Callable[[WeightsPlace], Worker]


class ProcessWorker:
    """A process on this machine, spoken to over pipes. weights: where it finds them.

    idle: it runs only on cores that nothing else wants, so that a job beside it loses no time, and verdicts come later.
    start_s: after which one that is not there is taken for one that hangs.
    """

    def __init__(self, weights: WeightsPlace, idle: bool = False, start_s: float = _START_S) -> None:
        command = [sys.executable, "-m", "auditor.recompute_worker", weights.to_json(), str(os.getpid())]
        command += ["idle"] if idle else []
        # As many workers as cores are wanted, and threads of NumPy's products wait in a spin, at the others' cost.
        environment = {"OPENBLAS_NUM_THREADS": "1", **os.environ}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._there, self._start_s, self._started = False, start_s, time.monotonic()

    def wait(self, seconds: float) -> bool:
        """Whether it has said that it is there. EOFError where it was not for `start_s`; it is killed then."""
        stdout = cast(BinaryIO, self._process.stdout)
        if not self._there:
            left = max(0.0, self._started + self._start_s - time.monotonic())
            poll = select.poll()
            poll.register(stdout, select.POLLIN)
            if not poll.poll(1e3 * min(seconds, left)):
                if seconds < left:
                    return False
                self.kill()
                raise EOFError(f"the worker had not started after {self._start_s:g} s")
            read_frame(stdout)
            self._there = True
        return True

    def ask(self, job: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """Run one job in the process."""
        write_frame(cast(BinaryIO, self._process.stdin), job, body)
        return read_frame(cast(BinaryIO, self._process.stdout))

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def stop(self) -> None:
        """Kill the process and close the pipes."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except BrokenPipeError:
                continue  # what it still held was for a process that is gone


def find(name: str, idle: bool = False, beside: bool = False) -> Hire:
    """`process`, `ray`, or MODULE:NAME of a function that takes a `WeightsPlace` and returns a Worker.

    idle: see `ProcessWorker`. beside: for what is not waited for, beside workers that are.
    """
    if name == "process":
        return partial(ProcessWorker, idle=True) if idle else ProcessWorker
    if idle:
        raise ConfigError(f"recompute_idle is for recompute_pool process, not {name}")
    module, _, attribute = {"ray": f"auditor.ray_workers:{'hire_beside' if beside else 'hire'}"}.get(
        name, name
    ).partition(":")
    try:
        hire: Hire = getattr(importlib.import_module(module), attribute)
        if not callable(hire):
            raise AttributeError("it cannot be called")
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"recompute_pool {name!r}: {error}; give process, ray or MODULE:NAME") from None
    return hire
