"""The auditor starts at once, or says in one line why not, with exit code 2."""

import gzip
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest

from auditor.client import AuditClient
from auditor.codec import to_wire
from auditor.config import Config, load_config
from auditor.errors import ConfigError
from auditor.proto import audit_pb2 as pb
from auditor.proto.audit_pb2_grpc import AuditServiceStub
from auditor.storage.database import open_database
from auditor.workers import find
from tests.auditor.processes import REPOSITORY, running_auditor
from tests.auditor.samples import pair
from tests.auditor.test_survival import submit_pairs


def refused(*flags: str) -> str:
    """The one line of an auditor that does not start."""
    command = [sys.executable, "-m", "auditor.main", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", *flags]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


def test_an_unknown_key_names_its_nearest_neighbour(tmp_path: Path) -> None:
    config = tmp_path / "auditor.yaml"
    config.write_text("recompute_rat: 1\n")
    assert "unknown key 'recompute_rat'; did you mean 'recompute_rate'?" in refused("--config", str(config))


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    assert "none.yaml: No such file" in refused("--config", str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a list", "a mapping of settings"),
        ("{", "not YAML"),
        ("recompute_rate: 1\nledger: l\nrecompute_rate: 0\n", "line 3: a key is there again; keep one"),
        ("ledger: 2026-99-99", "cannot be read; put it in quotes"),
        ("ledger: " + "[" * 2000, "nested too deeply"),
        ("recompute_rate: 2", "recompute_rate: Input should be less than or equal to 1"),
        ("recompute_workers: true", "recompute_workers: a value is expected, not true"),
        ("recompute_workers: yes", "recompute_workers: Input should be a valid integer"),
        ("recompute_timeout_s: .inf", "recompute_timeout_s: Input should be a finite number"),
        ("retain_look_s: 1.0e+10", "retain_look_s: 1e+10 s is longer than 1e+09, 30 years"),
        ("grpc: nowhere", "no host:port"),
        ("grpc: 127.0.0.1:99999", "no host:port"),
        (f"grpc: 127.0.0.1:{'9' * 5000}", "no host:port"),
        ("http: 0.0.0.0:1", "can be reached from other machines"),
        ("weights_root: /no/such", "is no folder"),
        ("recompute_pool: foo:bar", "recompute_pool 'foo:bar': No module named 'foo'; give process,"),
        ("recompute_pool: ray\nrecompute_idle: true", "recompute_idle is for recompute_pool process, not ray"),
        ("ledger: /no/such/ledger.db", "folder /no/such does not exist"),
        ("grpc: 127.0.0.1:\u00b2", "grpc: '127.0.0.1:\u00b2' is no host:port"),
        ("token_file: /no/such", "token_file /no/such: No such file"),
    ],
)
def test_a_config_that_cannot_be_used_says_which_setting(tmp_path: Path, text: str, said: str) -> None:
    config = tmp_path / "auditor.yaml"
    config.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(config, {})
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert f"cannot listen on {address} for gRPC" in refused("--ledger", str(tmp_path / "l"), "--grpc", address)
        assert f"cannot listen on {address} for HTTP" in refused("--ledger", str(tmp_path / "l"), "--http", address)


def test_it_serves_an_ipv6_address_and_says_it_as_others_can_use_it(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET6) as six:
        try:
            six.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
    with running_auditor(tmp_path, "--grpc", "[::1]:0", "--http", "[::1]:0") as auditor:
        with AuditClient(auditor.grpc, "run", spool_dir=tmp_path / "s") as client:
            submit_pairs(client, range(2))
            assert client.flush(10).accepted == 4
        assert auditor.get("/api/v1/runs/run")["samples"] == 2


def test_a_ledger_has_one_auditor(tmp_path: Path) -> None:
    with running_auditor(tmp_path) as auditor:
        assert "is in use by another auditor" in refused("--ledger", str(auditor.ledger))


@pytest.mark.parametrize("how", ["terminated", "left by its parent"])
def test_it_ends_with_code_0_and_its_ledger_in_one_file(tmp_path: Path, how: str) -> None:
    ports, ledger = tmp_path / "ports.json", tmp_path / "ledger.db"
    command = [sys.executable, "-m", "auditor.main", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    command += ["--ledger", str(ledger), "--ports-file", str(ports), "--stop-at-eof"]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        while not ports.exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        addresses = json.loads(ports.read_text())
        with AuditClient(addresses["grpc"], "run", spool_dir=tmp_path / "spool") as client:
            submit_pairs(client, range(5))
        with urllib.request.urlopen(f"http://{addresses['http']}/api/v1/runs", timeout=5) as answer:
            assert answer.status == 200  # a reader has the file open too
        if how == "terminated":
            process.terminate()
            assert process.wait(20) == 0, process.stderr.read() if process.stderr else ""
        else:
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
    (tmp_path / "copy").mkdir()
    copy = shutil.copy(ledger, tmp_path / "copy" / "ledger.db")
    done = subprocess.run(
        [sys.executable, "-m", "auditor.verify", copy], cwd=REPOSITORY, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sqlite3.connect(copy).execute("SELECT count(*) FROM records").fetchone() == (10,)


def test_a_file_that_is_no_ledger_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes, long enough to be no SQLite file at all\n" * 100)
    assert "file is not a database" in refused("--ledger", str(path))
    assert path.read_text().startswith("my notes")


@pytest.mark.parametrize(
    ("ledger", "said"),
    [
        ("{folder}", "ledger {folder} is a folder; give a file in it"),
        ("", "ledger . is a folder"),
        ("mysql://me:s3cret@host/db", "a ledger cannot be at mysql://…; give a file or a postgresql:// URL"),
        ("{folder}/other.db", "other.db is the database of another program; give a path of its own"),
    ],
)
def test_what_can_hold_no_ledger_is_left_as_it_is(tmp_path: Path, ledger: str, said: str) -> None:
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE accounts (name TEXT)")
    before = other.read_bytes()
    with pytest.raises(ConfigError) as refused:
        open_database(ledger.format(folder=tmp_path), writer=True)
    assert said.format(folder=tmp_path) in str(refused.value)
    assert other.read_bytes() == before


def test_a_pool_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(ConfigError, match="recompute_pool 'os:path': it cannot be called"):
        find("os:path")


def test_it_is_ready_within_two_seconds_of_work_and_small(tmp_path: Path) -> None:
    """Seconds of this process on a core, so that what else the machine does changes nothing."""
    with running_auditor(tmp_path) as auditor:
        with urllib.request.urlopen(f"http://{auditor.http}/readyz", timeout=5) as answer:
            assert answer.status == 200
        assert auditor.process is not None
        fields = Path(f"/proc/{auditor.process.pid}/stat").read_text().rpartition(")")[2].split()
        assert (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") < 2.0
        status = Path(f"/proc/{auditor.process.pid}/status").read_text()
        (resident,) = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")]
        assert resident < 300 * 1024, f"{resident} KiB"
        assert f"whoever reaches {auditor.grpc} may write records" in auditor.log
        assert auditor.stop() == 0


def test_without_the_token_nothing_is_taken_or_shown(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    request = pb.SubmitRequest(batch=pb.Batch(records=[to_wire(pair()[0])]))
    with running_auditor(tmp_path / "a", "--token-file", str(token)) as auditor:
        with grpc.insecure_channel(auditor.grpc) as channel:
            submit = AuditServiceStub(channel).Submit
            for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", "s3cret"),)):
                with pytest.raises(grpc.RpcError) as error:
                    submit(request, metadata=metadata)
                assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(urllib.error.HTTPError) as denied:
            auditor.get("/api/v1/runs")
        assert denied.value.code == 401
        odd = urllib.request.Request(f"http://{auditor.http}/api/v1/runs", headers={"Authorization": "Bearer \xe9"})
        with pytest.raises(urllib.error.HTTPError) as denied:
            urllib.request.urlopen(odd, timeout=5)
        assert denied.value.code == 401
        assert denied.value.headers["content-type"] == "application/problem+json"
        with AuditClient(auditor.grpc, "run", spool_dir=tmp_path / "s", token="s3cret") as client:
            client.submit_rollout(pair()[0])
            assert client.flush(10).accepted == 1
        token.write_text("rotated\n")
        with AuditClient(auditor.grpc, "run", spool_dir=tmp_path / "s", token="rotated") as client:
            client.submit_trainer(pair()[1])
            assert client.flush(10).accepted == 1
        assert "s3cret" not in (auditor.folder / "auditor.log").read_text()


def test_metrics_are_compressed_for_who_asks(tmp_path: Path) -> None:
    with running_auditor(tmp_path) as auditor:
        request = urllib.request.Request(f"http://{auditor.http}/metrics", headers={"Accept-Encoding": "gzip;q=0.5"})
        with urllib.request.urlopen(request, timeout=5) as answer:
            assert (answer.headers["content-encoding"], answer.headers["vary"]) == ("gzip", "Accept-Encoding")
            text = gzip.decompress(answer.read()).decode()
        assert "# TYPE auditor_ulp_diff histogram" in text.splitlines()
        assert auditor.metrics(), "who does not ask gets text"


def test_every_setting_is_documented_as_a_flag() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "auditor.main", "--help"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    for name in Config.model_fields:
        assert f"--{name.replace('_', '-')}" in done.stdout


def test_errors_of_the_api_are_problems_with_a_code(tmp_path: Path) -> None:
    with running_auditor(tmp_path) as auditor:
        for path, status, code in (
            ("/api/v1/runs/none", 404, "not_found"),
            ("/api/v1/runs/none/steps", 404, "not_found"),
            ("/api/v1/runs/none/steps/0", 404, "not_found"),
            ("/api/v1/runs/none/samples/0/x", 404, "not_found"),
            ("/api/v1/runs/none/steps/-1", 422, "invalid_request"),
            ("/api/v1/runs?limit=0", 422, "invalid_request"),
            ("/nowhere", 404, "http"),
        ):
            with pytest.raises(urllib.error.HTTPError) as error:
                auditor.get(path)
            assert error.value.code == status
            assert error.value.headers["content-type"] == "application/problem+json"
            assert f'"code":"{code}"'.encode() in error.value.read()
        with pytest.raises(urllib.error.HTTPError) as error:
            auditor.get("/api/v1/runs/%21")
        assert error.value.read().count(b"path.run_id") == 1, "what two parts of a route find wrong is said once"
        with socket.create_connection(tuple(auditor.http.split(":"))) as caller:
            caller.sendall(b"\0\r\n\r\n")
            assert caller.recv(99).startswith(b"HTTP/1.1 400")
        log = (tmp_path / "auditor.log").read_text().splitlines()
        assert [line[:2] for line in log] == ["20"] * len(log), "every line has its time"
