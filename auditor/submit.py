"""Send dumped log-probabilities to an auditor: `python -m auditor.submit FILE --address HOST:PORT --run NAME`.

FILE is JSON lines or Parquet, a row a sample and side, with what records have as fields:

    {"side": "rollout", "step": 0, "sample_id": "a", "tokens": [5, 17, 2, 9], "prompt_len": 2,
     "logprobs": [-1.5, -0.25], "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}}

A top_p of 1, a top_k and a min_p of 0 say that there is no such filter. What all rows share comes from --defaults; what
is not known is left out. `auditor.dumps` has the rules, `auditor.records` each field. Or FILE is the folder in which a
client that has ended left records that the auditor did not get (a run's `spool/rollout-0`), which name their own run.

Exit code 0: everything was taken. 1: something was refused or not delivered. 2: the file or the flags are wrong. 130:
interrupted. What was taken is not counted twice when it is sent again.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import grpc

from auditor.bearer import bearer
from auditor.channel import require_host_port
from auditor.client import AuditClient, Counts
from auditor.command import end
from auditor.dumps import read_dump
from auditor.errors import AuditorError, ConfigError
from auditor.records import RolloutRecord

# What a dump's client puts aside: a log that named the folder would name one that is gone.
_FOR_NOW: Final = "a temporary folder that goes when this command ends"


def main(arguments: list[str]) -> int:
    """Send the file; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m auditor.submit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="a dump, or the folder of a client's spool")
    parser.add_argument("--address", required=True, help="host:port of the auditor's gRPC")
    parser.add_argument("--run", help="run_id of every record of a dump")
    parser.add_argument("--defaults", type=Path, metavar="FILE", help="a JSON object: fields that every row shares")
    parser.add_argument("--token-file", type=Path, help="file with the bearer token, where the auditor asks for one")
    parser.add_argument("--tls-ca", type=Path, help="PEM authority of the auditor's certificate; without it plain text")
    parser.add_argument("--tls-certificate", type=Path, help="PEM certificate to show, where the auditor wants one")
    parser.add_argument("--tls-key", type=Path, help="PEM key of that certificate")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for the auditor at the end")
    given = parser.parse_args(arguments)
    try:
        if not 0 <= given.timeout <= 1e9:
            raise ConfigError(f"--timeout {given.timeout:g}: seconds are expected")
        counts = _send_spool(given) if given.file.is_dir() else _send_dump(given)
    except (AuditorError, OSError) as error:
        print(f"submit: {error}", file=sys.stderr)
        return 2
    waiting = counts.queued + counts.spooled + counts.dropped
    print(
        f"accepted {counts.accepted}, duplicate {counts.duplicate}, refused {counts.refused},"
        f" not delivered {waiting}{': send it again, what was taken is not counted twice' if waiting else ''}"
    )
    return 0 if counts.refused + waiting == 0 else 1


def _send_spool(given: argparse.Namespace) -> Counts:
    client = _client(given, "", given.file)
    if not client.counts.spooled:
        client.close(0)
        raise ConfigError(f"{given.file} holds no batch of a client's spool")
    return client.close(given.timeout)


def _send_dump(given: argparse.Namespace) -> Counts:
    if given.run is None:
        raise ConfigError(f"--run is needed for a dump such as {given.file}: the run_id of its records")
    defaults = _defaults(given.defaults, given.run)
    with tempfile.TemporaryDirectory() as spool:
        client = _client(given, given.run, Path(spool), _FOR_NOW)
        try:
            error = _hand_in(client, given.file, defaults, f"--defaults {given.defaults}")
            counts = client.close(given.timeout)
        except KeyboardInterrupt:
            client.close(0)  # its thread writes to a folder that goes now
            raise
    if error:
        taken = counts.accepted + counts.duplicate
        raise type(error)(f"{error}; {taken} records before it were taken")
    return counts


def _hand_in(client: AuditClient, dump: Path, defaults: dict[str, Any], defaults_of: str) -> AuditorError | None:
    """Every record of the dump, up to one that is wrong; what is wrong with it."""
    try:
        for record in read_dump(dump, defaults, defaults_of):
            if isinstance(record, RolloutRecord):
                client.submit_rollout(record)
            else:
                client.submit_trainer(record)
    except AuditorError as error:
        return error
    return None


def _client(given: argparse.Namespace, run: str, spool: Path, spool_name: str = "") -> AuditClient:
    require_host_port("--address", given.address)
    credentials = None
    if given.tls_ca is not None:
        files = (given.tls_ca, given.tls_key, given.tls_certificate)
        credentials = grpc.ssl_channel_credentials(*(file.read_bytes() if file else None for file in files))
    elif given.tls_certificate is not None or given.tls_key is not None:
        raise ConfigError("--tls-certificate and --tls-key need --tls-ca")
    if (given.tls_certificate is None) != (given.tls_key is None):
        raise ConfigError("--tls-certificate and --tls-key are given together or not at all")
    return AuditClient(
        given.address,
        run,
        spool_dir=spool,
        queue_size=1 << 20,
        token=_token(given.token_file),
        credentials=credentials,
        spool_name=spool_name,
    )


def _token(path: Path | None) -> str | None:
    if path is None:
        return None
    token = path.read_text("utf-8", "replace").strip()
    try:
        bearer(token)
    except ConfigError as error:
        raise ConfigError(f"--token-file {path}: {error}") from None
    return token


def _defaults(path: Path | None, run: str) -> dict[str, Any]:
    if path is None:
        return {"run_id": run}
    try:
        values = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"--defaults {str(path)[:80]}: {error.strerror}; it names a file with a JSON object"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: an object is expected")
    return {**values, "run_id": run}


if __name__ == "__main__":
    end("submit", main)
