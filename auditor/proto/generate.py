"""Make the Python stubs from audit.proto: `python -m auditor.proto.generate [--check]`.

Needs grpcio-tools and mypy-protobuf (the `dev` extra). With `--check` nothing is written; exit code 1 says which
committed stub is not what the .proto file gives.

The messages' stub loses the line that refuses every protobuf older than the compiler: all that it does is to hand a
descriptor to the pool, as each protobuf from 5 on can, and a trainer's environment has the one that it has.
"""

import re
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
_REFUSAL = re.compile(
    r"^from google\.protobuf import runtime_version as _runtime_version\n"
    r"|^_runtime_version\.ValidateProtobufRuntimeVersion\(\n(?: .*\n)+\)\n",
    re.MULTILINE,
)
_PLUGINS = ("mypy", "mypy_grpc")
STUBS = ("audit_pb2.py", "audit_pb2.pyi", "audit_pb2_grpc.py", "audit_pb2_grpc.pyi")


def generate(out: Path) -> None:
    """Write the four stubs under `out`/auditor/proto."""
    from grpc_tools import protoc  # noqa: PLC0415 - a build tool, absent at run time

    root = FOLDER.parent.parent
    status = protoc.main(
        [
            "protoc",
            *(f"--plugin=protoc-gen-{name}={Path(sys.executable).parent / f'protoc-gen-{name}'}" for name in _PLUGINS),
            f"--proto_path={root}",
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_out=quiet:{out}",
            f"--mypy_grpc_out=quiet:{out}",
            str(FOLDER / "audit.proto"),
        ]
    )
    if status != 0:
        raise SystemExit(f"protoc failed with status {status} on {FOLDER / 'audit.proto'}")
    messages = out / "auditor" / "proto" / "audit_pb2.py"
    text, found = _REFUSAL.subn("", messages.read_text("utf-8"))
    assert found == 2, "protoc writes another check of protobuf's version than is known here"
    messages.write_text(text, "utf-8")


def stale() -> list[str]:
    """Names of committed stubs that differ from what audit.proto gives now."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = Path(folder) / "auditor" / "proto"
        return [name for name in STUBS if _read(FOLDER / name) != _read(fresh / name)]


def main(arguments: list[str]) -> int:
    """Generate, or check with `--check`; returns the exit code."""
    if arguments == ["--check"]:
        names = stale()
        if names:
            print(f"stale: {', '.join(names)}; run `python -m auditor.proto.generate`", file=sys.stderr)
        return 1 if names else 0
    if arguments:
        print(f"unknown arguments {arguments}; the only one is --check", file=sys.stderr)
        return 2
    generate(FOLDER.parent.parent)
    return 0


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
