"""The demo, strict and native, one after the other: seconds and peak memory of each: `python -m tests.bench demo`.

Each is the whole command of the README in a process of its own, on the same seeds. Exit code 1 if one of them takes
more than six minutes or 8 GiB, if the strict run is not clean, or if the native run shows no mismatch.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MOST_SECONDS = 360.0
MOST_BYTES = 8 << 30


def run(mode: str, steps: int, directory: Path) -> tuple[int, dict[str, Any]]:
    """Run the demo; return its exit code and its summary."""
    command = [sys.executable, "-m", "services.main", "--config", "deploy/configs/demo.yaml", "--numerics", mode]
    settings = {"run.steps": steps, "run.directory": directory}
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    code = subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode
    return code, json.loads((directory / "latest" / "summary.json").read_text())


def faults(mode: str, code: int, summary: dict[str, Any]) -> list[str]:
    """What is not as it should be."""
    differ = summary["mismatched_tokens"]
    checks = [
        (code != 0, f"exit code {code}"),
        (summary["total_seconds"] > MOST_SECONDS, f"took more than {MOST_SECONDS:.0f} s"),
        (summary["peak_memory_bytes"] > MOST_BYTES, "took more than 8 GiB"),
        ((differ == 0) != (mode == "strict"), f"{differ} tokens differ"),
    ]
    return [f"{mode}: {text}" for wrong, text in checks if wrong]


def main() -> int:
    """Print a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write both summaries here")
    arguments = parser.parse_args()
    summaries, found = {}, []
    for mode in ("strict", "native"):
        with tempfile.TemporaryDirectory() as directory:
            code, summaries[mode] = run(mode, arguments.steps, Path(directory))
        it = summaries[mode]
        phases = "  ".join(f"{name} {seconds:.1f}" for name, seconds in it["seconds_by_phase"].items())
        memory = "  ".join(f"{name} {size / 2**30:.2f}" for name, size in it["peak_memory_by_process"].items())
        print(
            f"{mode}: {it['total_seconds']:.0f} s (set-up {it['setup_seconds']:.1f}  {phases}); "
            f"peak {it['peak_memory_bytes'] / 2**30:.2f} GiB ({memory}); "
            f"{it['mismatched_tokens']} of {it['compared_tokens']} differ",
            flush=True,
        )
        found += faults(mode, code, it)
    for fault in found:
        print(f"MISSED: {fault}")
    if arguments.json:
        arguments.json.write_text(json.dumps(summaries, indent=1) + "\n")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
