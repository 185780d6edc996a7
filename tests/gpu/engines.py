"""Engines in processes of their own, and the requests that cross the boundaries of pages, chunks and prefixes."""

import json
import os
import subprocess
import sys
import tempfile
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
        asked, answer = Path(scratch, "spec.json"), Path(scratch, "result.json")
        asked.write_text(json.dumps(spec))
        command = [sys.executable, "-m", "tests.gpu.vllm_process", str(asked), str(answer)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ), timeout=500)
        log = f"{done.stdout[-3000:]}\n{done.stderr[-9000:]}"
        if not answer.exists():
            raise RuntimeError(f"the engine of {model.name} ended with {done.returncode}:\n{log}")
        result: dict[str, Any] = json.loads(answer.read_text())
        if kept := os.environ.get("ENGINE_RESULTS"):
            Path(kept, f"{model.name}-{mode}-{tp}-{mutant}.json").write_text(json.dumps(result))
        if "error" in result:
            print(log)
        return result


def reference(folder: Path, asked: list[list[int]], responses: list[list[int]], segments: int = 1) -> list[str]:
    """What the reference decoder says on the CPU about the same tokens under sm90, as hexadecimal bytes."""
    law = Decoder.open(folder, model_contract("sm90", segments=segments))
    tokens = [np.array(p + r, np.int64) for p, r in zip(asked, responses, strict=True)]
    return [x.tobytes().hex() for x in law.logprobs(tokens, [len(p) for p in asked], TEMPERATURE)]
