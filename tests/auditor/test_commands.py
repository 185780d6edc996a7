"""The commands for people: submit dumps, verify a ledger."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from auditor.client import AuditClient
from auditor.dumps import read_dump, record_of
from auditor.errors import RecordError
from auditor.records import Record, RolloutRecord
from tests.auditor.processes import REPOSITORY, running_auditor
from tests.auditor.samples import one_ulp_off, pair

OFF = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)


def row_of(record: Record, bits: bool) -> dict[str, Any]:
    """A record as somebody would dump it."""
    row: dict[str, Any] = {"side": record.side, "step": record.step, "sample_id": record.sample_id}
    row |= {"prompt_len": record.prompt_len, "tokens": record.tokens.tolist() if record.tokens is not None else None}
    row |= {name: getattr(record, name) for name in ("weight_version", "weight_digest", "contract_digest")}
    row |= {name: asdict(getattr(record, name)) for name in ("sampling", "environment", "layout", "positions")}
    if bits:
        row["logprob_bits"] = [f"{b:08x}" for b in record.logprobs.view(np.uint32)]
    else:
        row["logprobs"] = [float(v) for v in record.logprobs]
    return row


def dump(path: Path, samples: int) -> Path:
    rows = []
    for i in range(samples):
        rollout, trainer = pair(str(i))
        rows += [row_of(rollout, bits=False), row_of(one_ulp_off(trainer) if i == 0 else trainer, bits=True)]
    if path.suffix == ".parquet":
        parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
        columns = {name: [row.get(name) for row in rows] for name in {**rows[0], **rows[1]}}
        parquet.write_table(arrow.table(columns), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return path


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_dump_is_audited(tmp_path: Path, kind: str) -> None:
    file = dump(tmp_path / f"dump.{kind}", 5)
    with running_auditor(tmp_path) as auditor:
        done = run("auditor.submit", str(file), "--address", auditor.grpc, "--run", "dumped")
        assert (done.returncode, done.stdout) == (0, "accepted 10, duplicate 0, refused 0, not delivered 0\n"), (
            done.stderr
        )
        again = run("auditor.submit", str(file), "--address", auditor.grpc, "--run", "dumped")
        assert again.stdout.startswith("accepted 0, duplicate 10")
        assert auditor.get("/api/v1/runs/dumped")["by_verdict"] == {"match": 4, "mismatch": 1}


def test_every_row_of_a_pipe_is_counted(tmp_path: Path) -> None:
    content = dump(tmp_path / "dump.jsonl", 3).read_bytes()
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(content,), daemon=True)
    writer.start()
    with running_auditor(tmp_path) as auditor:
        done = run("auditor.submit", str(tmp_path / "pipe"), "--address", auditor.grpc, "--run", "dumped")
        assert (done.returncode, done.stdout) == (0, "accepted 6, duplicate 0, refused 0, not delivered 0\n"), (
            done.stderr
        )
    writer.join(10)


def test_what_a_client_that_ended_left_on_disk_is_delivered_by_a_command(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    early = AuditClient("127.0.0.1:9", "run", spool_dir=spool)
    for i in range(3):
        early.submit_rollout(pair(str(i))[0])
        early.submit_trainer(pair(str(i))[1])
    assert early.close(timeout=2).spooled == 6
    with running_auditor(tmp_path / "auditor") as auditor:
        done = run("auditor.submit", str(spool), "--address", auditor.grpc)
        assert (done.returncode, done.stdout) == (0, "accepted 6, duplicate 0, refused 0, not delivered 0\n"), (
            done.stderr
        )
        assert auditor.get("/api/v1/runs/run")["by_verdict"] == {"match": 3}
        again = run("auditor.submit", str(spool), "--address", auditor.grpc)
        assert (again.returncode, again.stderr) == (2, f"submit: {spool} holds no batch of a client's spool\n")


def test_what_is_not_delivered_is_said_to_wait_nowhere_that_is_gone_when_one_looks(tmp_path: Path) -> None:
    file = dump(tmp_path / "d.jsonl", 1)
    done = run("auditor.submit", str(file), "--address", "127.0.0.1:9", "--run", "r", "--timeout", "0.2")
    assert done.returncode == 1
    assert "not delivered 2: send it again, what was taken is not counted twice" in done.stdout
    assert "2 records wait in a temporary folder that goes when this command ends" in done.stderr
    assert [path for path in re.findall(r"/[\w./-]+", done.stderr) if "tmp" in path] == []


def test_a_dump_needs_the_name_of_its_run(tmp_path: Path) -> None:
    done = run("auditor.submit", str(dump(tmp_path / "d.jsonl", 1)), "--address", "127.0.0.1:9")
    assert done.returncode == 2
    assert "--run is needed" in done.stderr


def test_decimal_numbers_keep_their_bits(tmp_path: Path) -> None:
    rollout, _ = pair()
    (record, *_) = read_dump(dump(tmp_path / "d.jsonl", 1), {"run_id": "run"})
    assert isinstance(record, RolloutRecord)
    assert record.logprobs.tobytes() != rollout.logprobs[::-1].tobytes()
    assert record.logprobs.tobytes() == rollout.logprobs.tobytes()


def test_a_row_with_the_least_is_a_record_of_unknowns() -> None:
    row = {"side": "rollout", "run_id": "r", "step": 0, "sample_id": "1", "tokens": [1, 2, 3], "prompt_len": 1}
    row |= {"logprobs": [-1.0, -2.0], "sampling": {"temperature": 0.5, "top_p": 1.0, "top_k": 0, "min_p": 0.0}}
    record = record_of(row)
    assert (record.weight_version, record.weight_digest, record.sampling.seed) == (-1, "", None)
    assert (record.sampling.logprobs_mode, record.positions.attention) == ("", "")
    assert record.sampling.temperature == 0.5
    assert record.mask.tolist() == [True, True]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"side": "both"}, "side is 'both'"),
        ({"tokenz": [1]}, "'tokenz' is no field of a rollout record"),
        ({"step": None}, "'step' is missing"),
        ({"sampling": 3}, "sampling is 3"),
        ({"sampling.heat": 3}, "'sampling.heat' is no field"),
        ({"sampling": {"temperature": 1.0}}, "'sampling.top_p' is missing; 1 says that there is none"),
        ({"logprobs": [-1.0]}, "logprobs has 1 values"),
        ({"logprobs": None, "logprob_bits": ["zz"]}, "logprob_bits holds 'zz'; each is eight hex digits"),
        ({"logprobs": None, "logprob_bits": ["1bf800000"]}, "each is eight hex digits"),
        ({"logprob_bits": ["3f800000"]}, "logprobs and logprob_bits are both there; give one of them"),
        ({"logprobs": None, "logprob_bits": 5}, "logprob_bits is no list of single values"),
        ({"logprobs": -1.0}, "logprobs is no list of single values"),
        ({"tokens": [[1, 2], [3]]}, "tokens is no list of single values"),
        ({"tokens": [1.5] * 40}, "tokens is float64"),
        ({"tokens": [2**70] * 40}, "tokens is object"),
        ({"logprobs": [None] * 32}, "logprobs holds something that is no number"),
        ({"logprobs": ["-1.0"] * 32}, "logprobs holds something that is no number"),
        ({"logprobs": [True] + [-1.0] * 31}, "logprobs holds something that is no number"),
        ({"tokens": [True] + [1] * 39}, "tokens holds true or false"),
        ({"run_id": "other"}, "run_id is 'other'; the records that are sent are of run 'r'"),
        ({"logprobs": [-1e39] * 32}, "beyond fp32"),
        ({"mask": ["false"] * 32}, "mask holds something other than true, false, 1 and 0"),
        ({"step": 1.5}, "step is 1.5; it must be a whole number"),
        ({"step": True}, "step is True; it must be a whole number"),
        ({"sampling.temperature": "1.0"}, "sampling.temperature is '1.0'; it must be a number"),
        ({"sampling.top_k": -1}, "sampling.top_k is -1; it lies in 0.."),
        ({"layout": {"vocab_shards": 5}}, "layout.vocab_shards is 5; it must be a sequence"),
        ({"sample_id": 7}, "sample_id is 7; it must be text"),
        ({"layer_digests": "ab"}, "layer_digests is 'ab'; it must be a list"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    row = row_of(pair()[0], bits=False)
    file = tmp_path / "d.jsonl"
    file.write_text(json.dumps(row) + "\n" + json.dumps({**row, **change}) + "\n")
    with pytest.raises(RecordError, match="row 2") as error:
        list(read_dump(file, {"run_id": "r"}))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("d.jsonl", b'{"side": "rollout", "side": "trainer"}', "line 1: not JSON: key 'side' is there twice"),
        ("d.jsonl", b"[" * 100_000, "line 1: not JSON"),
        ("d.jsonl", b"\n\n", "d.jsonl holds no row"),
        ("d.jsonl", b"\xff\xfe\x00", "line 1: not JSON"),
        ("d.jsonl.gz", b"\x1f\x8b\x08\x00", "is compressed; unpack it first"),
        ("d.parquet", b"PAR1 and more", "not a Parquet file that can be read"),
        ("d.parquet", b"", "not a Parquet file that can be read"),
    ],
)
def test_a_file_that_holds_no_rows_is_named(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    pytest.importorskip("pyarrow")
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(RecordError) as error:
        list(read_dump(file, {"run_id": "r"}))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    names = ["side", "logprobs", "logprobs"]
    table = arrow.Table.from_arrays([arrow.array(["rollout"]), arrow.array([[-1.0]]), arrow.array([[-2.0]])], names)
    parquet.write_table(table, tmp_path / "d.parquet")
    with pytest.raises(RecordError, match="column 'logprobs' is there twice"):
        list(read_dump(tmp_path / "d.parquet", {"run_id": "r"}))


def test_a_parquet_file_is_known_whatever_it_is_called(tmp_path: Path) -> None:
    written = dump(tmp_path / "dump.parquet", 1).read_bytes()
    for name in ("dump.pq", "dump.PARQUET", "dump"):
        (tmp_path / name).write_bytes(written)
        assert len(list(read_dump(tmp_path / name, {"run_id": "r"}))) == 2


@pytest.mark.parametrize(
    ("defaults", "row", "said"),
    [
        ({"engine": "x"}, {}, "shared.json: 'engine' is no field of a rollout record"),
        ({"step": "x"}, {"step": None}, "dump.jsonl, row 1: "),
        ({"weight_version": "x"}, {}, "shared.json: weight_version is 'x'"),
        ({"sampling": 3}, {}, "shared.json: sampling is 3; it must be an object"),
        ({"weight_version": "x"}, {"weight_version": "y"}, "dump.jsonl, row 1: weight_version is 'y'"),
        ({"engine_id": "e"}, {"weight_version": "y"}, "dump.jsonl, row 1: weight_version is 'y'"),
    ],
)
def test_what_is_wrong_in_the_defaults_is_said_of_them(
    tmp_path: Path, defaults: dict[str, Any], row: dict[str, Any], said: str
) -> None:
    least = {"side": "rollout", "step": 0, "sample_id": "a", "tokens": [1, 2], "prompt_len": 1, "logprobs": [-1.0]}
    file = tmp_path / "dump.jsonl"
    sampling = {} if "sampling" in defaults else {f"sampling.{name}": off for name, off in OFF.items()}
    file.write_text(json.dumps({**least, **sampling, **row}))
    with pytest.raises(RecordError) as error:
        list(read_dump(file, {"run_id": "r", **defaults}, "shared.json"))
    assert said in str(error.value)


def test_what_is_null_or_left_out_of_an_object_is_unknown() -> None:
    row = {**row_of(pair()[0], bits=False), "layout": {"tp_size": 2}, "sampling.seed": None, "run_id": "r"}
    record = record_of(row)
    assert (record.layout.tp_size, record.layout.vocab_size, record.sampling.seed) == (2, 0, 7)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("auditor.capsule {folder}/l.db run 99999999999999999999 s --out {folder}/c", "steps lie in 0..2**53"),
        ("auditor.faults --model {folder}", "faults: {folder}/config.json does not exist"),
        ("auditor.faults --engines --model {folder}", "faults: {folder}/config.json does not exist"),
        ("auditor.replay {folder} --weights-root {folder}", "Is a directory"),
        ("auditor.verify {folder}", "verify: ledger {folder}"),
        ("auditor.verify \udcff", "verify: argument '\\udcff' is not UTF-8 text"),
        ("auditor.load --address 127.0.0.1:9 --batch 0", "load: --batch 0: it must be 1 or more"),
        ("auditor.load --address 127.0.0.1:9 --seconds nan", "load: --seconds nan: a number above 0"),
        ("auditor.load --address 127.0.0.1:9 --tokens 1000000", "load: --batch 8 of --tokens 1000000 makes a message"),
        ("auditor.submit {folder}/d --run r --address http://a:1", "--address 'http://a:1' is no host:port"),
        ("auditor.submit {folder}/d --run r --address a:1 --token-file {folder}/d", "must be one line of printable"),
        ("auditor.submit {folder}/d --run r --address a:1 --tls-key {folder}/d", "need --tls-ca"),
    ],
)
def test_a_wrong_argument_is_one_line_and_exit_code_2(tmp_path: Path, command: str, said: str) -> None:
    (tmp_path / "d").write_bytes(b"\xff\n")
    done = run(*command.format(folder=tmp_path).split())
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert said.format(folder=tmp_path) in done.stderr


def test_a_file_that_is_not_there_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = run("auditor.submit", str(tmp_path / "none.jsonl"), "--address", "127.0.0.1:9", "--run", "r")
    assert done.returncode == 2
    assert "none.jsonl" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_says_so_in_one_line(tmp_path: Path, number: signal.Signals) -> None:
    """It waits for an auditor that is not there, and leaves no folder behind."""
    file = dump(tmp_path / "d.jsonl", 1)
    command = [sys.executable, "-m", "auditor.submit", str(file), "--address", "127.0.0.1:9", "--run", "r"]
    process = subprocess.Popen(
        command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert process.stderr is not None
    assert "takes no records" in process.stderr.readline()
    # An exception of a signal between the taking of a lock and its `with` leaves the lock taken (one time in hundreds):
    # whoever sends the signal again, as people do, is heard.
    for _ in range(4):
        process.send_signal(number)
        try:
            process.wait(5)
            break
        except subprocess.TimeoutExpired:
            continue
    assert process.wait(1) == 130
    assert process.stderr.read().splitlines()[-1] == "submit: interrupted"
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_verify_says_yes_and_no(tmp_path: Path) -> None:
    import sqlite3

    file = dump(tmp_path / "dump.jsonl", 3)
    with running_auditor(tmp_path) as auditor:
        run("auditor.submit", str(file), "--address", auditor.grpc, "--run", "dumped")
        assert auditor.stop() == 0
        ledger = str(auditor.ledger)
    good = run("auditor.verify", ledger)
    assert good.returncode == 0
    assert good.stdout.startswith("9 entries verify (0 with content retired), head ")
    head = good.stdout.split()[-1]
    assert run("auditor.verify", ledger, "--head", head).returncode == 0
    assert run("auditor.verify", ledger, "--head", "00" * 32).returncode == 1
    assert run("auditor.verify", str(tmp_path / "none.db")).returncode == 2
    with sqlite3.connect(ledger) as database:
        database.execute("UPDATE records SET payload = x'00' WHERE seq = 1")
    bad = run("auditor.verify", ledger)
    assert (bad.returncode, "entry 1: the record" in bad.stderr) == (1, True)
