"""Engines in processes of their own, and the requests that cross the boundaries of pages, chunks and prefixes."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_kernel.contracts import model_contract
from rl_kernel.reference.model import Decoder
from tests.gpu.vllm_process import TEMPERATURE

CAPTURE = [1, 2, 4, 8, 16, 24]
NEW_TOKENS = 6
SECONDS = float(os.environ.get("ENGINE_SECONDS", "500"))  # that an engine may take with all its jobs


def needs(*packages: str) -> pytest.MarkDecorator:
    """A mark that skips where a package is not installed; nothing is imported to find out."""
    missing = [name for name in packages if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


def prompts(vocab: int, count: int = 14, seed: int = 0) -> list[list[int]]:
    """Random prompts of 1 to 90 tokens, and one longer than a step may be, so that it is cut into chunks."""
    draw = np.random.default_rng(seed)
    lengths = [*draw.integers(1, 91, count - 1).tolist(), 300]
    return [draw.integers(0, vocab, n).tolist() for n in lengths]


def run_engine(
    model: Path, jobs: list[Any], *, mode: str = "strict", segments: int = 1, tp: int = 1, mutant: str | None = None,
    arguments: dict[str, Any] | None = None, environment: dict[str, str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Run `jobs` on one engine; its log is printed if it ended without a result."""
    defaults = {
        "max_model_len": 1024,
        "max_num_seqs": 24,
        "max_num_batched_tokens": 256,
        "enable_prefix_caching": True,
        "gpu_memory_utilization": 0.2,
        "compilation_config": {"cudagraph_capture_sizes": CAPTURE},
    }
    spec = {
        "model": str(model), "mode": mode, "segments": segments, "tp": tp, "mutant": mutant, "jobs": jobs,
        "arguments": defaults | (arguments or {}), "environment": environment or {},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        asked, answer, log = (Path(scratch, name) for name in ("spec.json", "result.json", "log"))
        asked.write_text(json.dumps(spec))
        ended = _run([sys.executable, "-m", "tests.gpu.vllm_process", str(asked), str(answer)], log)
        name, text = f"{model.name}-{mode}-{tp}-{mutant}", log.read_text(errors="replace")
        kept = os.environ.get("ENGINE_RESULTS")
        if kept:
            Path(kept, f"{name}.log").write_text(text)
        if not answer.exists():
            raise RuntimeError(f"the engine of {model.name} ended with {ended}:\n{text[-12000:]}")
        result: dict[str, Any] = json.loads(answer.read_text())
        if kept:
            Path(kept, f"{name}.json").write_text(json.dumps(result))
        if "error" in result:
            print(text[-12000:])
        return result


def _run(command: list[str], log: Path) -> str:
    """Run `command` and whatever it starts; return how it ended. Stacks of a run that is too slow are in the log.

    The output goes to a file and not through a pipe, which the engine's own processes would hold open after their
    parent has ended.
    """
    environment = os.environ | {"PYTHONFAULTHANDLER": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            return f"exit code {process.wait(SECONDS)}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGABRT)  # every Python process writes the stacks of all its threads
            time.sleep(1)
            return f"no result in {SECONDS:.0f} s"
        finally:
            end(process)


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a process that leads its session, and those that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def reference(folder: Path, asked: list[list[int]], responses: list[list[int]], segments: int = 1) -> list[str]:
    """What the reference decoder says on the CPU about the same tokens under sm90, as hexadecimal bytes."""
    law = Decoder.open(folder, model_contract("sm90", segments=segments))
    tokens = [np.array(p + r, np.int64) for p, r in zip(asked, responses, strict=True)]
    return [x.tobytes().hex() for x in law.logprobs(tokens, [len(p) for p in asked], TEMPERATURE)]
