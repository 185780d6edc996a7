"""vLLM's tokens a second on one GPU, strict against native and batch-invariant, compiled and captured all three.

`python -m tests.gpu.engine_speed MODEL RESULT.json`: one engine at a time, 128 prompts of 128 random tokens, 128 new
tokens each; the third run of three counts. Native and batch-invariant choose their own attention.
"""

import json
import sys
from pathlib import Path

from rl_kernel.reference.config import DecoderConfig
from tests.gpu.engines import run_engine

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 128, 128, 128
MODES = ("native", "strict", "invariant", "native")  # native twice: what lies between its runs is noise


def main() -> None:
    """Print a table and write it as JSON."""
    folder, result = Path(sys.argv[1]), Path(sys.argv[2])
    vocab = DecoderConfig.read(folder).vocab
    arguments = {
        "max_num_seqs": PROMPTS,
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.5,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]},
    }
    how = {"prompts": PROMPTS, "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS, "vocab": vocab}
    alone = how | {"prompts": 1}
    rows = []
    for mode in MODES:
        jobs = [["facts", "facts", {}], ["many", "speed", how], ["one", "speed", alone]]
        found = run_engine(folder, jobs, mode=mode, arguments=arguments)
        if "error" in found:
            print(f"{mode}: {found['error']}")
            continue
        rows.append({"mode": mode} | found)
        many, one = found["many"], found["one"]
        print(
            f"{mode:10} {many['tokens_per_second']:9.0f} tok/s ({PROMPTS} at once)  "
            f"{one['tokens_per_second']:7.1f} tok/s (one)  "
            f"start {found['start_seconds']:.0f} s  {found['facts']['backend']}",
            flush=True,
        )
        result.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
