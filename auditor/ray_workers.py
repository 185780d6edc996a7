"""The reference on a Ray cluster: one actor a worker, one core each. Loaded where `recompute_pool: ray` asks for it.

A process of its own joins the cluster (`auditor.ray_driver`), for all workers: Ray ends the process that it is in where
a cluster has been gone for a minute, and that must not be the auditor. The weights root must be a folder that every
node sees, or an object store, of which every node keeps copies.
"""

import itertools
import subprocess
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, BinaryIO, Final, cast

from auditor.errors import ConfigError
from auditor.frames import read_frame, write_frame
from auditor.weights_place import WeightsPlace

_JOIN_S: Final = 60.0
_KILL_S: Final = 1.0
_NO_ACTOR: Final = -1
_ENDED: Final = "the process that had joined the cluster has ended"

Answer = tuple[dict[str, Any], bytes]


class Driver:
    """The process that is in the cluster. Requests are numbered, and answered in any order."""

    def __init__(self, weights: WeightsPlace) -> None:
        command = [sys.executable, "-m", "auditor.ray_driver", weights.to_json()]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._numbers = itertools.count(1)
        self._sending, self._changed = threading.Lock(), threading.Lock()
        # The first answer, to no request, says whether it has joined.
        joined: Future[Answer] = Future()
        self._asked: dict[int, tuple[int, Future[Answer]]] = {0: (_NO_ACTOR, joined)}
        self.gone = False
        threading.Thread(target=self._read, name="ray-driver", daemon=True).start()
        try:
            error = joined.result(_JOIN_S)[0].get("error")
        except TimeoutError:
            error = f"no answer for {_JOIN_S:g} s"
        except EOFError as ended:
            error = str(ended)
        if error:
            self.end()
            raise ConfigError(f"recompute_pool ray: no cluster to join: {error}")

    def ask(self, actor: int, request: dict[str, Any], body: bytes = b"") -> Future[Answer]:
        """The answer to come; EOFError where there will be none."""
        number, answer = next(self._numbers), Future[Answer]()
        with self._changed:
            self._asked[number] = (actor, answer)
        try:
            with self._sending:
                self._send({**request, "actor": actor, "number": number}, body)
        except (OSError, ValueError):
            self.gone = True
        if self.gone:
            self._give_up(self._asked)
        return answer

    def kill(self, actor: int) -> None:
        """End an actor and what it is asked, or the whole process where it does not even read that."""
        self._give_up([number for number, (whose, _) in list(self._asked.items()) if whose == actor])
        if not self._sending.acquire(timeout=_KILL_S):
            self._process.kill()
            return
        try:
            with suppress(OSError, ValueError):
                self._send({"do": "kill", "actor": actor, "number": _NO_ACTOR})
        finally:
            self._sending.release()

    def end(self) -> None:
        """End the process, and with it its actors."""
        self._process.kill()
        self._process.wait()

    def _send(self, header: dict[str, Any], body: bytes = b"") -> None:
        write_frame(cast(BinaryIO, self._process.stdin), header, body)

    def _read(self) -> None:
        try:
            while True:
                header, body = read_frame(cast(BinaryIO, self._process.stdout))
                with self._changed:
                    _, answer = self._asked.pop(header["number"], (_NO_ACTOR, None))
                if answer is not None:
                    answer.set_result((header, body))
        except (EOFError, OSError):
            self.gone = True
            self._give_up(self._asked)
            self._process.wait()

    def _give_up(self, numbers: Iterable[int]) -> None:
        with self._changed:
            asked = [self._asked.pop(number)[1] for number in list(numbers) if number in self._asked]
        for answer in asked:
            answer.set_exception(EOFError(_ENDED))


class RayWorker:
    """One actor on the cluster. cores: that it takes of those that the cluster gives out."""

    def __init__(self, driver: Driver, actor: int, cores: int) -> None:
        self._driver, self._actor = driver, actor
        self._there = driver.ask(actor, {"do": "hire", "cores": cores})

    def wait(self, seconds: float) -> bool:
        """Whether the cluster finds a core for it within that time."""
        try:
            _answered(self._there.result(seconds))
        except TimeoutError:
            return False
        return True

    def ask(self, job: dict[str, Any], body: bytes) -> Answer:
        """Run one job in the actor."""
        header, answer = _answered(self._driver.ask(self._actor, {"do": "answer", "job": job}, body).result())
        return header["answer"], answer

    def kill(self) -> None:
        """Kill the actor."""
        self._driver.kill(self._actor)

    def stop(self) -> None:
        """Kill the actor; the last one ends the process that is in the cluster too."""
        self._driver.kill(self._actor)
        with _hiring:
            users = _users.get(self._driver, set())
            users.discard(self._actor)
            if not users and _users.pop(self._driver, None) is not None:
                self._driver.end()


_hiring = threading.Lock()
_actors = itertools.count()
_users: dict[Driver, set[int]] = {}


def hire(weights: WeightsPlace, cores: int = 1) -> RayWorker:
    """A worker on the cluster, joined on first use; ConfigError where there is none."""
    with _hiring:
        driver = next((driver for driver in _users if not driver.gone), None) or Driver(weights)
        actor = next(_actors)
        _users.setdefault(driver, set()).add(actor)
    return RayWorker(driver, actor, cores)


def hire_beside(weights: WeightsPlace) -> RayWorker:
    """One for searches, which must not want a core more than the verdicts' workers have, nor keep one from them."""
    return hire(weights, cores=0)


def _answered(answer: Answer) -> Answer:
    if "gone" in answer[0]:
        raise EOFError(f"the Ray actor is gone: {answer[0]['gone']}")
    return answer
