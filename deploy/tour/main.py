"""`make tour`: auditor, Prometheus, Alertmanager and a job with a fault, until the pager rings; and a look at why.

From then on the same job runs on native numerics too, so that the dashboards show both on top of each other. Leaves in
the folder that it prints: pictures of the page and of the dashboards, the alert's text, the logs. Everything runs on
this machine and is stopped at the end.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from deploy.grafana.render import prometheus, render_all
from deploy.prometheus.pager import render as words
from deploy.tour import pictures
from deploy.tour.stack import Stack, StackError, free_ports, running, running_stack, wait_until_ok
from services.tiny_model import write_tiny_model


class Stages:
    """Prints each stage with its seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block."""
        began = time.monotonic()
        print(f"… {name}", flush=True)
        yield
        self.seconds[name] = time.monotonic() - began
        print(f"  {self.seconds[name]:6.1f} s  {name}", flush=True)


def main(arguments: Sequence[str]) -> int:
    """Take the tour; 0 when the pager rang and everything was left in the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/tour"), help="folder, made where it is missing")
    parser.add_argument("--steps", type=int, default=20, help="RL steps of each job")
    parser.add_argument("--clean", type=int, default=10, help="steps before the fault begins")
    parser.add_argument("--wait", type=float, default=900.0, help="seconds to wait for the job and its page")
    options = parser.parse_args(arguments)
    if not 0 < options.clean < options.steps:
        parser.error(f"--clean {options.clean} leaves no step for the fault, or none before it, of {options.steps}")
    if not 0 < options.wait < math.inf:
        parser.error(f"--wait {options.wait:g}: seconds are expected")
    out = options.out / time.strftime("%Y%m%d-%H%M%S")
    try:
        out.mkdir(parents=True)
    except OSError as error:
        parser.error(f"--out {options.out}: {error.strerror}")
    try:
        return _tour(out.resolve(), options.steps, options.clean, options.wait)
    except StackError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; everything that was started has been stopped", file=sys.stderr)
        return 130


def _tour(out: Path, steps: int, clean: int, wait: float) -> int:
    stage = Stages()
    weights, auditor_folder = out / "weights", out / "auditor"
    for folder in (weights, auditor_folder):
        folder.mkdir()
    grpc, http = (f"127.0.0.1:{port}" for port in free_ports(2))
    command = [sys.executable, "-m", "auditor.main", "--grpc", grpc, "--http", http]
    command += ["--ledger", str(auditor_folder / "ledger.db"), "--weights-root", str(weights), "--recompute-rate", "1"]
    # Of a native run every sample mismatches, and a search for its cause takes seconds: one at a time says enough.
    command += ["--diagnose-per-step", "1"]
    with running(auditor_folder, {"auditor": command}) as check:
        with stage("auditor ready"):
            wait_until_ok(f"http://{http}/readyz", 60, check)
        # Ray's sockets live in its folder, and their paths must be short.
        with tempfile.TemporaryDirectory(prefix="tour-") as ray, _watching(out, http, Path(ray), stage) as stack:
            stale = [sys.executable, "-m", "deploy.tour.stale_rollout", "--from-version", str(clean + 1), "--"]
            native = [sys.executable, "-m", "services.main"]
            with _job(stale, out, _tree(out, "strict", steps, grpc, http), Path(ray)) as strict_job:
                began, paged = _story(strict_job, stack, http, stage, wait)
                with _job(native, out, _tree(out, "native", steps, grpc, http), Path(ray)) as native_job:
                    with stage("it ends, and beside it the same job without a fault, on native numerics"):
                        strict_job.wait(wait)
                        if (code := native_job.wait(wait)) != 0:
                            raise StackError(f"the native job ended with code {code}; see native.log")
                    with stage("the reference has spoken on every mismatch, and causes were searched for"):
                        _until(lambda: _settled(http), wait, "the reference is behind")
            _leave(out, stack, http, paged, (began, time.time()), stage)
    print(f"\n{'seconds':>8}  stage")
    for name, seconds in stage.seconds.items():
        print(f"{seconds:8.1f}  {name}")
    print(f"\neverything is in {out}")
    return 0


@contextmanager
def _watching(out: Path, http: str, ray: Path, stage: Stages) -> Iterator[Stack]:
    nodes = {f"ray-{mode}": ray / mode / "ray" / "prom_metrics_service_discovery.json" for mode in ("strict", "native")}
    with running_stack(out / "stack", {"auditor": [http]}, nodes) as stack:
        with stage("Prometheus, Alertmanager and pager ready; the auditor is scraped"):
            _until(lambda: stack.query('up{job="auditor"} == 1'), 60, "Prometheus does not scrape the auditor")
        yield stack


def _tree(out: Path, mode: str, steps: int, grpc: str, http: str) -> dict[str, Any]:
    """The config of a job on the tiny model; both modes have the same seeds."""
    return {
        "run": {"steps": steps, "directory": str(out / "job")},
        "model": {"path": str(write_tiny_model(out / "model"))},
        "numerics": {"mode": mode},
        "task": {"name": "tokens", "prompts_per_step": 2, "samples_per_prompt": 4},
        "rollout": {"max_new_tokens": 96, "max_model_len": 128, "kv_cache_mb": 16},
        # Ray names the job to Prometheus five seconds after its start; steps must not be over by then.
        "trainer": {"learning_rate": 1e-3, "updates_per_step": 8},
        "weights": {"directory": str(out / "weights"), "keep": steps + 2},
        "auditor": {"grpc": grpc, "http": f"http://{http}"},
        # With its dashboard Ray writes down where its metrics are.
        "ray": {"dashboard": True},
    }


@contextmanager
def _job(command: Sequence[str], out: Path, tree: dict[str, Any], ray: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A job as a process that ends with the block; its config and its log are left in `out`."""
    mode = tree["numerics"]["mode"]
    config = out / f"{mode}.yaml"
    config.write_text(yaml.safe_dump(tree), "utf-8")
    # Metrics of a job this short must come often.
    (ray / mode).mkdir()
    environment = {**os.environ, "RAY_TMPDIR": str(ray / mode), "RAY_metrics_report_interval_ms": "1000"}
    with (out / f"{mode}.log").open("wb") as output:
        job = subprocess.Popen([*command, "--config", str(config)], stdout=output, stderr=output, env=environment)
    try:
        yield job
    finally:
        job.terminate()
        job.wait()


def _story(
    job: subprocess.Popen[bytes], stack: Stack, http: str, stage: Stages, wait: float
) -> tuple[float, dict[str, Any]]:
    """From the job's start to the page; Unix seconds of the first comparison, and what was paged."""

    def alive(answer: Any) -> Any:
        if not answer and job.poll() is not None:
            raise StackError(f"the job ended with code {job.returncode} before that; see strict.log")
        return answer

    with stage("job up (Ray, vLLM, Megatron-core) and its first step compared"):
        _until(lambda: alive(stack.query("sum(auditor_compared_tokens_total) > 0")), wait, "nothing was compared")
    began = time.time() - 2
    with stage("clean steps, until the first token that differs is in the ledger"):
        _until(lambda: alive(_mismatching(http)), wait, "no token differed")
    with stage("from there until the pager rang"):
        alerts = _until(
            lambda: [a for a in stack.firing("page") if a["labels"]["alertname"] == "MismatchedTokens"],
            60,
            "nobody was paged",
        )
    return began, alerts[0]


def _leave(out: Path, stack: Stack, http: str, paged: dict[str, Any], span: tuple[float, float], stage: Stages) -> None:
    text = "\n".join(words("page", {"alerts": [paged]}))
    (out / "alert.txt").write_text(text + "\n", "utf-8")
    print(text)
    strict = paged["labels"]["run_id"]
    for run in _get(http, "/runs")["runs"]:
        causes = ", ".join(f"{cause} {count}" for cause, count in run["by_cause"].items()) or "none"
        print(f"the auditor's finding on {run['run_id']}: sides {run['by_side']}, causes {causes}")
    with stage("dashboards drawn"):
        for path, empty in render_all(prometheus(stack.prometheus), span, out, {}).items():
            print(f"{path.name}: nothing to show in {', '.join(empty) or 'no panel'}")
    with stage("pictures of the page taken"):
        try:
            pictures.take(f"http://{http}", strict, _worst_sample(http, strict), out)
        except (StackError, ImportError) as error:
            print(f"no pictures: {error}")


def _settled(http: str) -> bool:
    return all(run["queued"] == 0 and "searching" not in run["by_cause"] for run in _get(http, "/runs")["runs"])


def _mismatching(http: str) -> bool:
    return any(run["mismatched_tokens"] for run in _get(http, "/runs")["runs"])


def _worst_sample(http: str, run_id: str) -> tuple[int, str] | None:
    steps = _get(http, f"/runs/{run_id}/steps?mismatching=true")["steps"]
    if not steps:
        return None
    step = steps[-1]["step"]
    samples = _get(http, f"/runs/{run_id}/steps/{step}/samples?verdict=mismatch")["samples"]
    diagnosed = [sample for sample in samples if sample["judgement"]["causes"]]
    worst = max(diagnosed or samples, key=lambda sample: sample["judgement"]["max_abs"] or 0.0)
    return step, worst["sample_id"]


def _get(http: str, path: str) -> Any:
    with urllib.request.urlopen(f"http://{http}/api/v1{path}", timeout=30) as answer:
        return json.loads(answer.read())


def _until(condition: Callable[[], Any], seconds: float, complaint: str) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise StackError(f"{complaint} within {seconds:.0f} s")
        time.sleep(0.2)
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
