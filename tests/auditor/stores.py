"""An S3 service on this machine (moto), with a bucket in it, gone afterwards."""

import importlib.util
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_EC2_METADATA_DISABLED": "true"}


class Store:
    """endpoint: its URL. Objects are seen through pyarrow, as the auditor sees them."""

    def __init__(self, host_and_port: str) -> None:
        from pyarrow import fs

        self.endpoint = f"http://{host_and_port}"
        self.files = fs.S3FileSystem(
            endpoint_override=host_and_port,
            scheme="http",
            region="us-east-1",
            allow_bucket_creation=True,
            allow_bucket_deletion=True,
        )
        self.files.create_dir("bucket")

    def put(self, folder: Path, prefix: str) -> None:
        """Every file of a folder, its manifest last, as weights are published."""
        for file in sorted(folder.iterdir(), key=lambda f: f.name == "manifest.json"):
            with self.files.open_output_stream(f"bucket/{prefix}/{file.name}") as stream:
                stream.write(file.read_bytes())

    def names(self, prefix: str) -> list[str]:
        from pyarrow import fs

        found = self.files.get_file_info(fs.FileSelector(f"bucket/{prefix}", recursive=True, allow_not_found=True))
        return sorted(info.path for info in found if info.is_file)


@contextmanager
def running_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """In a process of its own: vLLM looks at every object of every loaded module, which those of Flask do not bear."""
    pytest.importorskip("pyarrow")
    if importlib.util.find_spec("moto") is None:
        pytest.skip("moto is missing: make setup")
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(server, port)
        yield Store(f"127.0.0.1:{port}")
    finally:
        server.terminate()
        server.wait(10)


def _wait_for(server: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert server.poll() is None, "moto ended before it listened"
            assert time.monotonic() < deadline, "moto does not listen"
            time.sleep(0.05)
