"""vLLM's tokens a second on one GPU, strict against native and batch-invariant, compiled and captured all three.

`python -m tests.gpu.engine_speed MODEL RESULT.json [MODE…]`: 128 prompts of 128 random tokens, 128 new tokens each,
with logprobs; the third run of three counts. All engines start together, and measure one at a time once all are there:
none compiles meanwhile, and all have the same machine. MODEL is a folder, or `qwen3-0.6b` for random weights of that
shape. Native and batch-invariant choose their own attention.
"""

import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
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
    "gpu_memory_utilization": 0.25,
    "kv_cache_memory_bytes": 2**33,  # room for all sequences at once, for either model
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]},
}


def measure(folder: Path, mode: str, meeting: Path, engines: int) -> dict[str, object]:
    """What the engine's jobs returned: `facts`, and the speed of `many` prompts at once and of `one`, each twice."""
    how = {"prompts": PROMPTS, "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS, "turn": str(meeting / "turn")}
    how["vocab"] = DecoderConfig.read(folder).vocab
    one = how | {"prompts": 1}
    jobs = [["facts", "facts", {}], ["met", "meet", {"folder": str(meeting), "name": mode, "engines": engines}]]
    jobs += [["many", "speed", how], ["one", "speed", one], ["many again", "speed", how], ["one again", "speed", one]]
    jobs += [["host", "host", one], ["host of many", "host", how]]
    try:
        return {"mode": mode} | run_engine(folder, jobs, mode=mode, arguments=ARGUMENTS)
    finally:
        (meeting / f"{mode}.here").touch()  # nobody waits for an engine that ended


def main() -> None:
    """Print a table and write it as JSON."""
    with tempfile.TemporaryDirectory() as scratch:
        named, result = sys.argv[1], Path(sys.argv[2])
        folder = write_tiny_model(Path(scratch, named), QWEN3) if named == "qwen3-0.6b" else Path(named)
        modes, meeting = sys.argv[3:] or list(MODES), Path(scratch, "meeting")
        meeting.mkdir()
        with ThreadPoolExecutor(len(modes)) as pool:
            rows = list(pool.map(lambda mode: measure(folder, mode, meeting, len(modes)), modes))
    result.write_text(json.dumps(rows, indent=1))
    for row in rows:
        if "error" in row:
            print(f"{row['mode']}: {row['error']}")
            continue
        many, one = ([row[name + turn]["tokens_per_second"] for turn in ("", " again")] for name in ("many", "one"))
        first = row["many"]["before"][0]
        print(
            f"{folder.name} {row['mode']:9} {many[0]:8.0f} {many[1]:8.0f} tok/s ({PROMPTS} at once)"
            f" {one[0]:7.1f} {one[1]:7.1f} (one), start {row['start_seconds']:.0f} s, first run {first:.1f} s"
        )


if __name__ == "__main__":
    main()
