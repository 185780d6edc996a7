"""What a log of measurements begins with: what was called, when, on what, with which versions and of which commit."""

import importlib.util
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata

import torch

PACKAGES = {
    "torch": "torch",
    "triton": "triton",
    "vllm": "vllm",
    "megatron-core": "megatron",
    "liger-kernel": "liger_kernel",
}


def provenance(module: str) -> dict[str, str]:
    """Facts by name; module: what `python -m` ran. COMMIT in the environment names the commit where there is no git."""
    facts = {
        "command": " ".join(["python -m", module, *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": os.environ.get("COMMIT") or _said("git", "describe", "--always", "--dirty", "--abbrev=12"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU",
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda or "none",
        "python": platform.python_version(),
    }
    return facts | {name: _version(name, module) for name, module in PACKAGES.items()}


def _version(package: str, module: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of no stated version" if importlib.util.find_spec(module) else "not installed"


def _said(*command: str) -> str:
    """The first line that a program prints; "unknown" where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return (done.stdout.splitlines() or ["unknown"])[0].strip()
