"""vLLM's tokens a second on one GPU, strict against native and batch-invariant, compiled and captured all three.

`python -m tests.gpu.engine_speed MODEL RESULT.json [MODE…]`: one engine at a time, 128 prompts of 128 random tokens,
128 new tokens each, with logprobs; the third run of three counts. MODEL is a folder, or `qwen3-0.6b` for random weights
of that shape. Native and batch-invariant choose their own attention.
"""

import json
import sys
import tempfile
from pathlib import Path

from rl_kernel.reference.config import DecoderConfig
from tests.gpu.engines import run_engine
from tests.models import TinyModel, write_tiny_model

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 128, 128, 128
MODES = ("native", "strict", "invariant")
QWEN3 = TinyModel(
    "qwen3", tied=True, layers=28, hidden=1024, intermediate=3072, heads=16, kv_heads=8, head_dim=128, vocab=151936,
    rope_theta=1e6, eps=1e-6, max_position=4096,
)  # fmt: skip
ARGUMENTS = {
    "max_num_seqs": PROMPTS,
    "max_num_batched_tokens": 8192,
    "gpu_memory_utilization": 0.5,
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]},
}


def measure(folder: Path, mode: str) -> dict[str, object]:
    """What the engine's jobs returned: `facts`, and the speed of `many` prompts at once and of `one`."""
    how = {"prompts": PROMPTS, "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS}
    how["vocab"] = DecoderConfig.read(folder).vocab
    jobs = [["facts", "facts", {}], ["many", "speed", how], ["one", "speed", how | {"prompts": 1}]]
    return {"mode": mode} | run_engine(folder, jobs, mode=mode, arguments=ARGUMENTS)


def main() -> None:
    """Print a table and write it as JSON."""
    with tempfile.TemporaryDirectory() as scratch:
        named, result = sys.argv[1], Path(sys.argv[2])
        folder = write_tiny_model(Path(scratch, named), QWEN3) if named == "qwen3-0.6b" else Path(named)
        rows = []
        for mode in sys.argv[3:] or MODES:
            found = measure(folder, mode)
            if "error" in found:
                print(f"{mode}: {found['error']}", flush=True)
                continue
            rows.append(found)
            result.write_text(json.dumps(rows, indent=1))
            many, one = found["many"], found["one"]
            print(
                f"{folder.name} {mode:9} {many['tokens_per_second']:8.0f} tok/s ({PROMPTS} at once) "
                f"{one['tokens_per_second']:7.1f} (one), start {found['start_seconds']:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
