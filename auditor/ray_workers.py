"""The reference on a Ray cluster: one actor a worker, one core each. Loaded where `recompute_pool: ray` asks for it.

RAY_ADDRESS names the cluster; without it the one on this machine is taken. The weights root must be a folder that every
node sees, or an object store, of which every node keeps copies. Ray moves jobs and answers as bytes.
"""

import importlib
import os
import socket
from typing import Any

from auditor.errors import ConfigError
from auditor.weights_place import WeightsPlace


class RayWorker:
    """One actor on the cluster."""

    def __init__(self, ray: Any, weights: WeightsPlace) -> None:
        self._ray = ray
        # Restarts are the pool's: it counts them, and gives a sample up after three.
        self._actor = ray.remote(num_cpus=1, max_restarts=0)(_Answerer).remote(weights.to_json())

    def ask(self, job: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """Run one job in the actor."""
        try:
            header, answer = self._ray.get(self._actor.answer.remote(job, body))
        except self._ray.exceptions.RayError as error:
            raise EOFError(f"the Ray actor is gone: {' '.join(str(error).split())[:200]}") from None
        return header, answer

    def kill(self) -> None:
        """Kill the actor."""
        self._ray.kill(self._actor)

    def stop(self) -> None:
        """Kill the actor."""
        self._ray.kill(self._actor)


class _Answerer:
    """What runs in the actor."""

    def __init__(self, weights: str) -> None:
        worker = importlib.import_module("auditor.recompute_worker")
        self._answer = worker.answer
        self._models = worker.Models(WeightsPlace.from_json(weights).open())

    def answer(self, job: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        header, answer = self._answer(self._models, job, body)
        return header, answer


def hire(weights: WeightsPlace) -> RayWorker:
    """A worker on the cluster, joined on first use; ConfigError where there is none."""
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise ConfigError("recompute_pool ray: Ray is not installed in the auditor's environment") from None
    if not ray.is_initialized():
        _require_reachable(os.environ.get("RAY_ADDRESS", ""))
        try:
            ray.init(address="auto", namespace="auditor", log_to_driver=False, logging_level="error")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(f"recompute_pool ray: no cluster to join: {' '.join(str(error).split())[:200]}") from None
    return RayWorker(ray, weights)


def _require_reachable(address: str) -> None:
    """Ray itself tries for minutes to reach a cluster that is not there."""
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if not separator or not port.isdigit():
        return  # `auto` or nothing: Ray looks on this machine and answers at once
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise ConfigError(f"recompute_pool ray: no cluster to join: RAY_ADDRESS {address}: {error}") from None
