"""Put load on a running auditor and measure it: `python -m auditor.load --address HOST:PORT`.

Sends pairs of records of `--tokens` response tokens each, whose bits agree, in batches over `--streams` streams, as
fast as receipts come back. Prints token pairs a second and the latency from a batch to its receipts.
"""

import argparse
import json
import math
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import grpc
import numpy as np

from auditor.channel import MAX_MESSAGE_BYTES
from auditor.codec import to_wire, varint
from auditor.command import end
from auditor.contracts import known_contracts
from auditor.errors import ConfigError
from auditor.proto import audit_pb2 as pb
from auditor.records import Environment, Layout, Positions, RolloutRecord, Sampling, TrainerRecord

_PROMPT = 64
_VOCAB = 32_768
_BYTES_A_TOKEN = 12  # of the two records of a sample: a token id and two log-probabilities
_METHOD = "/audit.v1.AuditService/Submit"


def main(arguments: list[str]) -> int:
    """Run the load; the exit code: 1 where a record was not accepted, 2 where the flags are wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m auditor.load", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--address", required=True, help="host:port of the auditor's gRPC")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8, help="samples a batch, two records each")
    parser.add_argument("--tokens", type=int, default=4096, help="response tokens a record")
    parser.add_argument(
        "--apart", action="store_true", help="a batch of one side, then one of the other, as from two processes"
    )
    parser.add_argument("--samples-per-step", type=int, default=512)
    parser.add_argument("--run", default="load", help="run_id; another one each time, for names are taken once")
    given = parser.parse_args(arguments)
    try:
        _check(given)
    except ConfigError as error:
        print(f"load: {error}", file=sys.stderr)
        return 2
    latencies: list[float] = []
    failures: list[str] = []
    threads = [
        threading.Thread(target=_stream, args=(given, i, latencies, failures), name=f"stream-{i}", daemon=True)
        for i in range(given.streams)
    ]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - started
    samples = len(latencies) * given.batch // (2 if given.apart else 1)
    pairs = samples * given.tokens
    p50, p99 = (float(np.quantile(latencies, q)) * 1e3 for q in (0.5, 0.99)) if latencies else (0.0, 0.0)
    print(json.dumps({
        "token_pairs_per_second": round(pairs / seconds),
        "samples": samples,
        "seconds": round(seconds, 2),
        "receipt_p50_ms": round(p50, 1),
        "receipt_p99_ms": round(p99, 1),
        "failures": failures[:3],
    }))  # fmt: skip
    return 1 if failures or not latencies else 0


def _check(given: Any) -> None:
    for name in ("streams", "batch", "tokens", "samples_per_step"):
        if getattr(given, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(given, name)}: it must be 1 or more")
    if not (math.isfinite(given.seconds) and given.seconds > 0):
        raise ConfigError(f"--seconds {given.seconds:g}: a number above 0 is expected")
    size = given.batch * _BYTES_A_TOKEN * given.tokens
    if size > MAX_MESSAGE_BYTES:
        raise ConfigError(
            f"--batch {given.batch} of --tokens {given.tokens} makes a message of {size} bytes; the limit is"
            f" {MAX_MESSAGE_BYTES}"
        )


def _stream(given: Any, number: int, latencies: list[float], failures: list[str]) -> None:
    channel = grpc.insecure_channel(given.address, (("grpc.max_send_message_length", MAX_MESSAGE_BYTES),))
    # Requests are put together as bytes: what is measured is the auditor, on cores that it shares with this program.
    submit = channel.unary_unary(_METHOD, lambda request: request, pb.SubmitResponse.FromString)
    templates = [record.SerializeToString() for record in _records(given.run, given.tokens, number)]
    deadline = time.monotonic() + given.seconds
    sent = 0
    while time.monotonic() < deadline and not failures:
        for sides in ((0,), (1,)) if given.apart else ((0, 1),):
            request = _request(given, number, sent, templates, sides)
            begun = time.monotonic()
            try:
                receipts = submit(request, timeout=60).receipts.receipts
            except grpc.RpcError as error:
                failures.append(f"{error.code()}: {error.details()}")
                return
            latencies.append(time.monotonic() - begun)
            failures += filter(None, (_failure(receipt, given.run) for receipt in receipts))
        sent += given.batch
    channel.close()


def _failure(receipt: pb.Receipt, run: str) -> str:
    if receipt.outcome == pb.OUTCOME_DUPLICATE:
        return f"duplicate: run {run!r} holds these records; choose another --run"
    return "" if receipt.outcome == pb.OUTCOME_ACCEPTED else f"{receipt.code}: {receipt.detail}"


def _request(given: Any, number: int, sent: int, templates: list[bytes], sides: Sequence[int]) -> bytes:
    """The same arrays under new names: in protobuf, what comes later in a message is merged over what came before."""
    records = []
    for i in range(sent, sent + given.batch):
        common = pb.Common(step=i // given.samples_per_step, sample_id=f"{number}-{i}")
        names = (
            pb.Record(rollout=pb.RolloutRecord(common=common)),
            pb.Record(trainer=pb.TrainerRecord(common=common)),
        )
        for side in sides:
            record = templates[side] + names[side].SerializeToString()
            records.append(_field(pb.Batch.RECORDS_FIELD_NUMBER, len(record)) + record)
    batch = b"".join(records)
    return _field(pb.SubmitRequest.BATCH_FIELD_NUMBER, len(batch)) + batch


def _field(number: int, length: int) -> bytes:
    """Tag and length of a message inside a message."""
    return bytes([number << 3 | 2]) + varint(length)


def _records(run_id: str, tokens: int, seed: int) -> tuple[pb.Record, pb.Record]:
    random = np.random.default_rng(seed)
    ids = random.integers(0, _VOCAB, _PROMPT + tokens).astype(np.uint32)
    common: dict[str, Any] = {
        "run_id": run_id,
        "step": 0,
        "sample_id": "0",
        "prompt_len": _PROMPT,
        "logprobs": -random.exponential(1.0, tokens).astype(np.float32),
        "mask": np.ones(tokens, np.bool_),
        "sampling": Sampling(seed=seed),
        "weight_version": 1,
        "weight_digest": "00" * 32,
        "contract_digest": next(iter(known_contracts())),
        "environment": Environment("load", "fma32", "00" * 32),
        "layout": Layout(1, 1, _VOCAB, _VOCAB, (0, _VOCAB)),
        "positions": Positions("00" * 32),
    }
    rollout = RolloutRecord(engine_id="load", tokens=ids, **common)
    trainer = TrainerRecord(trainer_id="load", token_count=len(ids), tokens=ids, **common)
    return to_wire(rollout), to_wire(replace(trainer, tokens=None))


if __name__ == "__main__":
    end("load", main)
