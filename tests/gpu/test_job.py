"""A whole run on a GPU, vLLM compiled and captured, refereed by the reference on the CPU: no bit differs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.gpu.engines import needs
from tests.models import TINY_MODELS, write_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.slow, needs("vllm", "megatron.core", "ray")]
STEPS, PROMPTS, SAMPLES = 3, 4, 4


@pytest.mark.parametrize("mode", ["strict", "native"])
def test_a_run_on_the_gpu(mode, tmp_path):
    model = os.environ.get("JOB_MODEL") or str(write_tiny_model(tmp_path / "model", TINY_MODELS["qwen3-tied"]))
    tree = {
        "run": {"steps": STEPS, "directory": str(tmp_path / "runs")},
        "model": {"path": model},
        "numerics": {"mode": mode, "profile": "sm90", "segments": 1, "threads": 4},
        "task": {"name": "tokens", "prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES},
        "rollout": {"max_new_tokens": 24, "max_model_len": 128, "kv_cache_mb": 256},
        "trainer": {"learning_rate": 1e-3},
        "auditor": {"recompute_rate": 1.0},
    }
    config = tmp_path / "gpu.yaml"
    config.write_text(yaml.safe_dump(tree))
    command = [sys.executable, "-m", "services.main", "--config", str(config)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(done.stdout)
    for log in Path(tmp_path).rglob("*.log"):
        print(f"== {log}\n{log.read_text()[-3000:]}")
    summary = json.loads((tmp_path / "runs" / "latest" / "summary.json").read_text())
    print(json.dumps(summary))
    assert summary["steps"] == STEPS
    if mode == "native":  # the control: the comparison can fail
        assert summary["mismatched_tokens"] > 0
        return
    assert done.returncode == 0
    assert summary["verdicts"] == {"match": STEPS * PROMPTS * SAMPLES}
    assert summary["compared_tokens"] == summary["recomputed_tokens"] > 0
    assert (summary["mismatched_tokens"], summary["recomputed_mismatched"]) == (0, 0)
