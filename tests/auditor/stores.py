"""An S3 service on this machine (moto), with a bucket in it, gone afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_EC2_METADATA_DISABLED": "true"}


class Store:
    """endpoint: its URL. Objects are seen through pyarrow, as the auditor sees them."""

    def __init__(self, server: Any) -> None:
        from pyarrow import fs

        host, port = server.get_host_and_port()
        self.endpoint = f"http://{host}:{port}"
        self.files = fs.S3FileSystem(
            endpoint_override=f"{host}:{port}",
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
    pytest.importorskip("pyarrow")
    server_of = pytest.importorskip("moto.server")
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    server = server_of.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        yield Store(server)
    finally:
        server.stop()
