"""Send dumped log-probabilities to an auditor: `python -m auditor.submit FILE --address HOST:PORT --run NAME`.

FILE is JSON lines or Parquet, see `auditor.dumps`; or the folder in which a client that has ended left records that the
auditor did not get (a run's `spool/rollout-0`), which name their own run. Exit code 0 where everything was taken, 1
where something was refused or not delivered, 2 where the file or the flags are wrong.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from auditor.client import AuditClient, Counts
from auditor.dumps import read_dump
from auditor.errors import AuditorError, ConfigError
from auditor.records import RolloutRecord


def main(arguments: list[str]) -> int:
    """Send the file; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m auditor.submit", description=__doc__)
    parser.add_argument("file", type=Path, help="a dump, or the folder of a client's spool")
    parser.add_argument("--address", required=True, help="host:port of the auditor's gRPC")
    parser.add_argument("--run", help="run_id of every record of a dump")
    parser.add_argument("--defaults", type=Path, help="JSON object with fields that every row shares")
    parser.add_argument("--token-file", type=Path)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for the auditor at the end")
    given = parser.parse_args(arguments)
    try:
        if not 0 <= given.timeout <= 1e9:
            raise ConfigError(f"--timeout {given.timeout:g}: seconds are expected")
        token = given.token_file.read_text("utf-8").strip() if given.token_file else None
        if given.file.is_dir():
            counts = _send_spool(given.file, given.address, token, given.timeout)
        else:
            counts = _send_dump(given, token)
    except (AuditorError, OSError) as error:
        print(f"submit: {error}", file=sys.stderr)
        return 2
    waiting = counts.queued + counts.spooled + counts.dropped
    print(
        f"accepted {counts.accepted}, duplicate {counts.duplicate}, refused {counts.refused},"
        f" not delivered {waiting}{': send it again, what was taken is not counted twice' if waiting else ''}"
    )
    return 0 if counts.refused + waiting == 0 else 1


def _send_spool(folder: Path, address: str, token: str | None, timeout: float) -> Counts:
    client = AuditClient(address, "", spool_dir=folder, token=token)
    if not client.counts.spooled:
        client.close(0)
        raise ConfigError(f"{folder} holds no batch of a client's spool")
    return client.close(timeout)


def _send_dump(given: argparse.Namespace, token: str | None) -> Counts:
    if given.run is None:
        raise ConfigError(f"--run is needed for a dump such as {given.file}: the run_id of its records")
    defaults = _defaults(given.defaults, given.run)
    with tempfile.TemporaryDirectory() as spool:
        client = AuditClient(given.address, given.run, spool_dir=spool, queue_size=1 << 20, token=token)
        try:
            for record in read_dump(given.file, defaults):
                if isinstance(record, RolloutRecord):
                    client.submit_rollout(record)
                else:
                    client.submit_trainer(record)
        except AuditorError as error:
            counts = client.close(given.timeout)
            taken = counts.accepted + counts.duplicate
            raise type(error)(f"{error}; {taken} records before it were taken") from None
        counts = client.close(given.timeout)
    return counts


def _defaults(path: Path | None, run: str) -> dict[str, Any]:
    if path is None:
        return {"run_id": run}
    try:
        values = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: an object is expected")
    return {**values, "run_id": run}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
