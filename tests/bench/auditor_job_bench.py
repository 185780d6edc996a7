"""What being audited costs each engine: `python -m tests.bench.auditor_job_bench [rollout] [trainer] [--steps N]`.

Each engine of the CPU demo (SmolLM2, strict) in a process of its own, beside a real auditor: the same step with its
records reported and without, in turn, so that what else the machine does hits both. The reference runs on cores that
nothing else wants (`recompute_idle`).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rl_kernel.contracts import model_contract
from services.audit_sink import AuditTarget
from services.auditor_access import AuditorAccess
from services.config import Config, load_config
from services.job import make_rollout, make_trainer
from services.models import ensure_model
from services.records import Batch, Request, Rollout, Sample, Sampling, WeightVersion
from services.rollout.actor import RolloutActor
from services.threads import thread_variables
from services.trainer.actor import TrainerActor
from services.weights import WeightStore
from tests.auditor.processes import REPOSITORY, running_auditor

GOAL = 1.01
SAMPLES, PROMPT, RESPONSE = 64, 24, 32
Step = Callable[[int], tuple[float, float]]  # seconds, and seconds of all threads on a core


class _Silent:
    """A sink that reports nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


def measure(side: str, steps: int) -> dict[str, Any]:
    """Seconds of a step, reported and not."""
    config = load_config(REPOSITORY / "deploy" / "configs" / "demo.yaml")
    model = ensure_model(config.model.path, Path(config.model.cache))
    with tempfile.TemporaryDirectory(prefix="auditor-job-") as scratch:
        folder = Path(scratch)
        store = WeightStore(folder / "weights", 3)
        weights = store.import_model(1, model)
        flags = ("--weights-root", str(folder / "weights"), "--recompute-rate", "0.25", "--recompute-idle")
        with running_auditor(folder / "auditor", *flags) as auditor:
            target = AuditTarget(
                access=AuditorAccess(auditor.grpc, f"http://{auditor.http}"),
                run_id="cost",
                spool=folder / "spool",
                contract=model_contract(config.numerics.profile, segments=config.numerics.segments),
            )
            make = _rollout if side == "rollout" else _trainer
            actor, step = make(config, model, target, weights, folder)
            sink, silent = actor._sink, _Silent()
            step(0)
            on, off = [], []
            for number in range(1, steps + 1):
                for seconds, used in ((off, silent), (on, sink)) if number % 2 else ((on, sink), (off, silent)):
                    actor._sink = used
                    seconds.append(step(number))
            actor._sink = sink
            counts = sink.close()
    ratios, of_cores = (sorted(a[i] / b[i] for a, b in zip(on, off, strict=True)) for i in (0, 1))
    return {
        "side": side,
        "steps": steps,
        "step_seconds_on": round(statistics.median(a[0] for a in on), 4),
        "step_seconds_off": round(statistics.median(a[0] for a in off), 4),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_of_core_seconds": round(statistics.median(of_cores), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "records": counts.accepted,
        "ok": statistics.median(ratios) <= GOAL,
    }


def _rollout(
    config: Config, model: Path, target: AuditTarget, weights: WeightVersion, folder: Path
) -> tuple[RolloutActor, Step]:
    actor = RolloutActor(partial(make_rollout, config, model), target)
    actor.load(weights)
    prompts = np.random.default_rng(0).integers(1000, 40_000, (SAMPLES, PROMPT)).tolist()

    def step(number: int) -> tuple[float, float]:
        requests = [
            Request(f"{i:03d}", tuple(prompt), Sampling(1.0, 1 + i, RESPONSE)) for i, prompt in enumerate(prompts)
        ]
        begun, worked = time.perf_counter(), time.process_time()
        actor.generate(number, requests)
        return time.perf_counter() - begun, time.process_time() - worked

    return actor, step


def _trainer(
    config: Config, model: Path, target: AuditTarget, weights: WeightVersion, folder: Path
) -> tuple[TrainerActor, Step]:
    actor = TrainerActor(partial(make_trainer, config, model, 0, folder / "rendezvous"), target)
    actor.load(weights)
    rng = np.random.default_rng(0)
    samples = tuple(
        Sample(
            Rollout(
                sample_id=f"{i:03d}",
                prompt=tuple(rng.integers(1000, 40_000, PROMPT).tolist()),
                response=tuple(rng.integers(1000, 40_000, RESPONSE).tolist()),
                logprobs=-rng.exponential(2.0, RESPONSE).astype(np.float32),
                finish_reason="length",
                sampling=Sampling(1.0, 1 + i, RESPONSE),
                weights=weights,
            ),
            mask=(True,) * RESPONSE,
            reward=0.0,
            advantage=float(rng.standard_normal()),
        )
        for i in range(SAMPLES)
    )

    def step(number: int) -> tuple[float, float]:
        begun, worked = time.perf_counter(), time.process_time()
        actor.train(Batch(number, weights, samples))
        return time.perf_counter() - begun, time.process_time() - worked

    return actor, step


def main() -> int:
    """Each side in its own process; exit code 1 if one misses the goal."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.auditor_job_bench", description=__doc__)
    parser.add_argument("sides", nargs="*", help="rollout, trainer; default: both")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--in-process", action="store_true", help="measure the one side here")
    given = parser.parse_args()
    if given.in_process:
        print(json.dumps(measure(given.sides[0], given.steps)))
        return 0
    results = {}
    environment = {
        **os.environ,
        **thread_variables(load_config(REPOSITORY / "deploy/configs/demo.yaml").numerics.threads),
    }
    for side in given.sides or ("rollout", "trainer"):
        command = [sys.executable, "-m", "tests.bench.auditor_job_bench", side, "--in-process"]
        command += ["--steps", str(given.steps)]
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        results[side] = json.loads(done.stdout.splitlines()[-1])
        print(f"{side}: {json.dumps(results[side])}", flush=True)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")
    return int(not all(result["ok"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
