"""Ray around the two actors: a cluster to run on, one process an engine (and trainer rank), and plain calls to them.

What an actor raises on purpose arrives here as the error itself, without Ray's wrapping; what else goes wrong in its
process is a ServicesError, and so is its death.
"""

import functools
import gc
import logging
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from auditor.client import Counts
from rl_kernel.errors import RlKernelError
from services.audit_sink import AuditTarget
from services.config import Ray as RayConfig
from services.engines import RolloutEngine, TrainerEngine
from services.errors import ServicesError
from services.records import Batch, Request, Rollout, TrainOutcome, WeightVersion
from services.rollout.actor import RolloutActor
from services.trainer.actor import TrainerActor
from services.weights import WeightStore

_CLOSE_SECONDS = 20.0
_CONNECT_SECONDS = 5.0
_POLL_SECONDS = 0.2
_SIGNAL_SECONDS = 0.002
_ROLLOUT, _TRAINER = "the rollout actor", "the trainer actor"
_MESSAGE = 400  # characters of a foreign error that a line has room for


@contextmanager
def ray_cluster(config: RayConfig, actors: int, gpus: float = 0.0) -> Iterator[None]:
    """Join the cluster that the config or the environment names, or start one here with a CPU for each actor.

    gpus: that the actors need together; ServicesError where the cluster has fewer, since Ray would wait for ever.
    A cluster that was started here ends with the block; one that was joined is left as it was found.
    """
    address = config.address or os.environ.get("RAY_ADDRESS", "")
    _require_somebody_at(address)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        if address:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        else:
            ray.init(
                address="local",
                num_cpus=max(os.cpu_count() or 1, actors),
                include_dashboard=config.dashboard,
                object_store_memory=config.object_store_mb * 2**20,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = f"the Ray cluster at {address} cannot be joined" if address else "a local Ray cluster cannot be started"
        raise ServicesError(f"{where}: {str(error).splitlines()[0]}") from None
    signal.signal(signal.SIGTERM, on_sigterm)  # ray.init puts its own there, which ends the process under our blocks
    try:
        _require_resources(actors, gpus)
        _wait_for_free(actors, config.wait_seconds)
        yield
    finally:
        _leave()


def _leave() -> None:
    """ray.shutdown. In its midst Ray's core makes SIGTERM kill this process; what was there is put back at once."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(ray.shutdown)
        while not done.done():
            wait([done], _SIGNAL_SECONDS)
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    done.result()


def _require_resources(actors: int, gpus: float) -> None:
    there = ray.cluster_resources()
    if there.get("CPU", 0) < actors:
        raise ServicesError(
            f"the Ray cluster has {there.get('CPU', 0):g} CPUs; the {actors} actors of this job need one each"
        )
    if there.get("GPU", 0) < gpus:
        raise ServicesError(
            f"the Ray cluster has {there.get('GPU', 0):g} GPUs and this job needs {gpus:g}, since numerics.profile is "
            f"one of a GPU; numerics.profile = portable runs on any CPU"
        )


def _require_somebody_at(address: str) -> None:
    """ServicesError where nobody listens at host:port, which ray.init itself takes more than a minute to find out."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not (host and port.isdigit()):
        return  # `auto`, or nothing
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError, ValueError) as error:  # the latter: a port or a host name that there cannot be
        raise ServicesError(
            f"nobody answers at the Ray cluster's address {address} ({error}); `ray status` there says which is right"
        ) from None


def _wait_for_free(actors: int, seconds: float) -> None:
    """Other jobs' actors may hold the CPUs for now; ServicesError once `seconds` have passed."""
    deadline = time.monotonic() + seconds
    while (free := int(ray.available_resources().get("CPU", 0))) < actors:
        if time.monotonic() >= deadline:
            raise ServicesError(
                f"the Ray cluster had {free} free CPUs after {seconds:.0f} s; the {actors} actors of this job need one "
                f"each; wait for another job to end, or set ray.wait_seconds"
            )
        time.sleep(_POLL_SECONDS)


@dataclass(frozen=True, slots=True)
class Place:
    """How an actor's process is set up.

    environment: variables for it. log: file that its output is appended to. gpus: that Ray must give it; below 1, a
    share of one that another actor may have too.
    """

    environment: Mapping[str, str]
    log: Path
    gpus: float = 0.0


class RolloutHandle:
    """The rollout actor, called as if it were here."""

    def __init__(self, make_engine: Callable[[], RolloutEngine], audit: AuditTarget, place: Place) -> None:
        self._log = place.log
        self._actor, self._started = _start(RolloutActor, _ROLLOUT, place, make_engine, audit)

    def wait(self) -> None:
        """Wait until the engine is there; raises what its start raised."""
        self._call(self._started)

    def load(self, weights: WeightVersion) -> str:
        """As RolloutActor.load."""
        return str(self._call(self._actor.load.remote(weights)))

    def generate(self, step: int, requests: Sequence[Request]) -> tuple[Rollout, ...]:
        """As RolloutActor.generate."""
        rollouts: tuple[Rollout, ...] = self._call(self._actor.generate.remote(step, requests))
        return rollouts

    def flush(self, timeout: float) -> Counts:
        """As RolloutActor.flush."""
        counts: Counts = self._call(self._actor.flush.remote(timeout))
        return counts

    def close(self) -> None:
        """Deliver the last records and end the process."""
        _close([self._actor])

    def _call(self, reference: Any) -> Any:
        return _results([reference], _ROLLOUT, self._log)[0]


class TrainerHandle:
    """All ranks of the trainer, called as one; what rank 0 says is the answer."""

    def __init__(
        self, make_engine: Callable[[int], Callable[[], TrainerEngine]], audit: AuditTarget, place: Place, ranks: int
    ) -> None:
        """make_engine: rank → what builds that rank's engine, in its own process. The ranks find each other there."""
        self._log = place.log
        started = [
            _start(TrainerActor, _TRAINER, place, make_engine(r), audit if r == 0 else None) for r in range(ranks)
        ]
        self._actors, self._started = [actor for actor, _ in started], [reference for _, reference in started]

    def wait(self) -> None:
        """Wait until the engines of all ranks are there; raises what a start raised."""
        _results(self._started, _TRAINER, self._log)

    def load(self, weights: WeightVersion) -> str:
        """As TrainerActor.load."""
        return str(self._all("load", weights))

    def train(self, batch: Batch) -> TrainOutcome:
        """As TrainerActor.train."""
        outcome: TrainOutcome = self._all("train", batch)
        return outcome

    def publish(self, store: WeightStore, version: int) -> WeightVersion:
        """Write the weights into `store` as `version`, and count from now on as holding that version."""
        final = store.folder(version)
        return store.publish(version, lambda scratch: str(self._all("export", version, scratch, final)))

    def save_checkpoint(self, folder: Path) -> None:
        """As TrainerActor.save_checkpoint."""
        self._all("save_checkpoint", folder)

    def load_checkpoint(self, folder: Path, weights: WeightVersion) -> str:
        """As TrainerActor.load_checkpoint."""
        return str(self._all("load_checkpoint", folder, weights))

    def flush(self, timeout: float) -> Counts:
        """As TrainerActor.flush."""
        counts: Counts = self._all("flush", timeout)
        return counts

    def close(self) -> None:
        """Deliver the last records and end the processes."""
        _close(self._actors)

    def _all(self, method: str, *arguments: Any) -> Any:
        references = [getattr(actor, method).remote(*arguments) for actor in self._actors]
        return _results(references, _TRAINER, self._log)[0]


def _start(actor: type, who: str, place: Place, *arguments: Any) -> tuple[Any, Any]:
    """Start a process for `actor`; return its handle and the reference of its start, which may fail."""
    options = {"num_cpus": 1, "max_restarts": 0, "runtime_env": {"env_vars": dict(place.environment)}}
    if place.gpus:
        options["num_gpus"] = place.gpus
    handle = ray.remote(_process(actor, who, place.log)).options(**options).remote()
    return handle, handle.start.remote(*arguments)


def _process(actor: type, who: str, log: Path) -> type:
    """What runs in the actor's process: the actor, with its output in `log` and its errors in our terms."""

    class Process(actor):  # type: ignore[misc]
        def __init__(self) -> None:
            _append_output_to(log)

        def start(self, *arguments: Any) -> None:
            # Not in __init__, whose errors Ray turns into text. Most of a start is imports, which leave no garbage: a
            # third of vLLM's was spent on looking for it.
            gc.disable()
            try:
                super().__init__(*arguments)
            finally:
                gc.freeze()
                gc.enable()

    Process.__name__ = Process.__qualname__ = actor.__name__
    for name in [name for name in dir(Process) if not name.startswith("_")]:
        setattr(Process, name, _in_our_terms(getattr(Process, name), who, log))
    return Process


def _in_our_terms(method: Callable[..., Any], who: str, log: Path) -> Callable[..., Any]:
    """The method, whose errors can be pickled: a foreign one often cannot, and Ray then loses what it said."""

    @functools.wraps(method)
    def call(*arguments: Any) -> Any:
        try:
            return method(*arguments)
        except Exception as error:
            if not _travels(error):
                traceback.print_exc()
                raise ServicesError(f"{who} failed: {_one_line(error)}; its output is in {log}") from None
            raise

    return call


def _travels(error: Exception) -> bool:
    """Whether the job can do something with the error itself, and it is the same after it was pickled."""
    if not isinstance(error, (ServicesError, RlKernelError, OSError)):
        return False
    try:
        again = pickle.loads(pickle.dumps(error))  # noqa: S301  our own bytes
    except Exception:  # noqa: BLE001  a class's own __reduce__ may raise anything
        return False
    return type(again) is type(error) and str(again) == str(error)


def _one_line(error: BaseException) -> str:
    text = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
    return text if len(text) <= _MESSAGE else text[:_MESSAGE] + " …"


def _append_output_to(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(handle, stream.fileno())
    os.close(handle)


def _results(references: list[Any], who: str, log: Path) -> list[Any]:
    try:
        return list(ray.get(references))
    except RayTaskError as error:
        if isinstance(error.cause, (ServicesError, RlKernelError, OSError)):
            raise error.cause from None
        raise ServicesError(f"{who} failed: {_one_line(error.cause)}; its output is in {log}") from None
    except RayActorError as error:
        raise ServicesError(f"{who} died: {_first_line(error)}; its output is in {log}") from None
    except RayError as error:  # out of memory, an environment that cannot be set up, a node that is gone, …
        raise ServicesError(f"{who}: {type(error).__name__}: {_first_line(error)}; its output is in {log}") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _close(actors: list[Any]) -> None:
    # The job is ending; what the auditor did not get was counted and is on disk.
    with suppress(RayError):
        ray.get([actor.close.remote() for actor in actors], timeout=_CLOSE_SECONDS)
    for actor in actors:
        ray.kill(actor)
