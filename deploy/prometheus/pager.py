"""A webhook that stands in for a pager: prints what Alertmanager sends, and keeps it as JSON lines.

    python deploy/prometheus/pager.py --listen 127.0.0.1:9099 --log pages.jsonl

The path names the receiver (`/page`, `/notify`, `/heartbeat`). Replace it by your own receiver in alertmanager.yml.
"""

import argparse
import json
import sys
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_MAX_BYTES = 1 << 20


class Pager(ThreadingHTTPServer):
    """Keeps every notification with the Unix seconds of its arrival in `log`, one JSON object a line."""

    daemon_threads = True

    def __init__(self, host: str, port: int, log: Path | None) -> None:
        super().__init__((host, port), _Handler)
        self._log = log
        self._lock = threading.Lock()

    def take(self, receiver: str, body: dict[str, Any]) -> None:
        """Print and keep one notification."""
        now = time.time()
        with self._lock:
            for line in render(receiver, body):
                print(line, flush=True)
            if self._log is not None:
                with self._log.open("a", encoding="utf-8") as log:
                    log.write(json.dumps({"at": now, "receiver": receiver, **body}) + "\n")


def render(receiver: str, body: dict[str, Any]) -> list[str]:
    """The lines that a person reads, one alert after another."""
    lines = []
    for alert in body["alerts"]:
        labels, annotations = alert["labels"], alert["annotations"]
        lines.append(f"[{receiver}] {alert['status'].upper()} {labels['alertname']} ({labels.get('severity', '-')})")
        for name in ("summary", "description", "runbook_url"):
            if name in annotations:
                lines.append(f"    {name}: {annotations[name]}")
    return lines


class _Handler(BaseHTTPRequestHandler):
    server: Pager

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", "0"))
        if length > _MAX_BYTES:
            self.send_error(413)
            return
        try:
            self.server.take(self.path.strip("/"), json.loads(self.rfile.read(length)))
        except (ValueError, KeyError) as error:
            self.send_error(400, f"not a notification of Alertmanager: {error!r}")
            return
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: the notifications are the log."""


def main(arguments: Sequence[str]) -> int:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--listen", default="127.0.0.1:9099", help="host:port")
    parser.add_argument("--log", type=Path, help="file of JSON lines")
    options = parser.parse_args(arguments)
    host, _, port = options.listen.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 1 << 16):
        parser.error(f"--listen {options.listen!r} is no host:port")
    try:
        Pager(host, int(port), options.log).serve_forever()
    except OSError as error:
        print(f"error: cannot listen on {options.listen}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
