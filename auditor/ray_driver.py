"""The process that joins a Ray cluster for the auditor: `python -m auditor.ray_driver PLACE` (a `WeightsPlace`).

RAY_ADDRESS names the cluster; without it the one on this machine is taken. Requests come on stdin, answers go to
stdout; Ray moves jobs and answers as bytes. It ends with its stdin, and its actors with it.
"""

import importlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from auditor.errors import ConfigError
from auditor.frames import read_frame, write_frame
from auditor.weights_place import WeightsPlace

Reply = Callable[[int, dict[str, Any], bytes], None]


class Answerer:
    """What runs in an actor."""

    def __init__(self, weights: str) -> None:
        worker = importlib.import_module("auditor.recompute_worker")
        self._answer = worker.answer
        self._models = worker.Models(WeightsPlace.from_json(weights).open())

    def there(self) -> tuple[dict[str, Any], bytes]:
        """Says that a core was found for it."""
        return {}, b""

    def answer(self, job: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """Run one job."""
        header, answer = self._answer(self._models, job, body)
        return {"answer": header}, answer


def join() -> Any:
    """Ray, with a cluster joined; ConfigError where there is none."""
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise ConfigError("Ray is not installed in the auditor's environment") from None
    _require_reachable(os.environ.get("RAY_ADDRESS", ""))
    try:
        ray.init(address="auto", namespace="auditor", log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(" ".join(str(error).split())[:200]) from None
    return ray


def _require_reachable(address: str) -> None:
    """Ray itself tries for minutes to reach a cluster that is not there."""
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if not separator or not port.isdigit():
        return  # `auto` or nothing: Ray looks on this machine and answers at once
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        raise ConfigError(f"RAY_ADDRESS {address}: {error}") from None


def serve(ray: Any, weights: str, reply: Reply) -> None:
    """Do what is asked until stdin ends."""
    actors: dict[int, Any] = {}
    while True:
        try:
            request, body = read_frame(sys.stdin.buffer)
        except EOFError:
            return
        number, which = request["number"], request["actor"]
        if request["do"] == "kill":
            if which in actors:
                ray.kill(actors.pop(which))
            continue
        if request["do"] == "hire":
            # Restarts are the pool's: it counts them, and gives a sample up after three.
            actors[which] = ray.remote(num_cpus=request["cores"], max_restarts=0)(Answerer).remote(weights)
            said = actors[which].there.remote()
        elif which in actors:
            said = actors[which].answer.remote(request["job"], body)
        else:
            reply(number, {"gone": "it was killed"}, b"")
            continue
        said.future().add_done_callback(partial(_answered, reply, number))


def _answered(reply: Reply, number: int, said: "Future[tuple[dict[str, Any], bytes]]") -> None:
    error = said.exception()  # of the actor, its node, the object store
    header, body = ({"gone": " ".join(str(error).split())[:200]}, b"") if error else said.result()
    reply(number, header, body)


def main(weights: str) -> None:
    """Join, say so, serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the auditor too, which ends this process
    os.nice(5)  # Ray looks for a cluster that has gone with most of a core
    # What Ray prints must not come between the frames.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    replying = threading.Lock()

    def reply(number: int, header: dict[str, Any], body: bytes) -> None:
        with replying:
            write_frame(out, {**header, "number": number}, body)

    try:
        ray = join()
    except ConfigError as error:
        reply(0, {"error": str(error)}, b"")
        return
    reply(0, {}, b"")
    serve(ray, weights, reply)


if __name__ == "__main__":
    main(sys.argv[1])
