"""A token opens the runs that it is for and no other, over gRPC and HTTP; it is withdrawn without a restart."""

import hashlib
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from auditor.client import AuditClient
from auditor.codec import to_wire
from auditor.errors import ConfigError
from auditor.grants import EVERYTHING, Grants
from auditor.proto import audit_pb2 as pb
from auditor.proto.audit_pb2_grpc import AuditServiceStub
from tests.auditor.processes import AuditorProcess, running_auditor
from tests.auditor.samples import pair

ONE, TWO = "5ecret-a", "5ecret-b"


def write(path: Path, *entries: dict[str, Any]) -> Path:
    """Whole or not at all, as an operator's tools do it."""
    draft = path.with_suffix(".draft")
    draft.write_text(yaml.safe_dump(list(entries)))
    os.replace(draft, path)
    return path


def entry(name: str, token: str, *runs: str) -> dict[str, Any]:
    return {"name": name, "sha256": hashlib.sha256(token.encode()).hexdigest(), "runs": list(runs)}


def test_a_token_covers_its_patterns_and_nothing_else(tmp_path: Path) -> None:
    grants = Grants(None, write(tmp_path / "t", entry("a", "one", "a.*", "x"), entry("b", "two", "*")))
    found = grants("Bearer one")
    assert found is not None
    assert [found.covers(run) for run in ("a.1", "a.", "x", "b.1", "xx", "ba.1", "")] == [True, True, True] + [
        False
    ] * 4
    everything = grants(b"bearer two")
    assert everything is not None
    assert everything.covers_all
    for nothing in ("", "one", "Bearer", "Bearer ", "Bearer three", "Basic one", "Bearer one two"):
        assert grants(nothing) is None


def test_without_any_file_everybody_is_granted_everything() -> None:
    assert Grants()("") is EVERYTHING


def test_tokens_are_read_again_and_a_broken_file_leaves_the_last_good_ones(tmp_path: Path) -> None:
    path = write(tmp_path / "t", entry("a", "one", "a"))
    grants = Grants(None, path)
    write(path, entry("a", "another", "a"))
    assert grants("Bearer one") is None
    assert grants("Bearer another") is not None
    for broken in ("- {name: a, token", "- {name: 2026-99-99, token: one, runs: [a]}"):
        path.write_text(broken)
        assert grants("Bearer another") is not None
    path.unlink()
    assert grants("Bearer another") is not None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "a list of tokens is expected"),
        ("a: b", "a list of tokens is expected"),
        ("- {name: a, token: s3cret", "line 1: not YAML"),
        ("- name: a\n  token: s3cret\n  runs: [a]\n  runs: ['*']", "line 4: a key is there again"),
        ("- {name: 2026-99-99, token: s3cret, runs: [a]}", "cannot be read; put it in quotes"),
        ("- {token: s3cret, runs: [a]}", "entry 1: name is missing"),
        ("- {name: a, token: s3cret}", "entry 1: runs must be a list"),
        ('- {name: a, token: "s3cret\\u00e9", runs: [a]}', "entry 1: the token must be one line of printable ASCII"),
        ("- {name: a, token: s3cret, runs: []}", "entry 1: runs must be a list"),
        ("- {name: a, runs: [a]}", "give either sha256 or token"),
        ("- {name: a, sha256: abc, runs: [a]}", "64 hex digits"),
        ("- {name: a, token: s3cret, runs: [a], may: write}", "a mapping with name"),
        ("- {name: a, token: s3cret, runs: [a]}\n- {name: b, token: s3cret, runs: [b]}", "the same token as 'a' has"),
    ],
)
def test_a_file_that_says_nothing_clear_is_refused_in_one_line_without_the_token(
    tmp_path: Path, content: str, said: str
) -> None:
    (tmp_path / "t").write_text(content)
    with pytest.raises(ConfigError, match=said) as refused:
        Grants(None, tmp_path / "t")
    assert "s3cret" not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_token_that_no_header_can_carry_is_one_line_and_costs_no_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="one line of printable ASCII"):
        AuditClient("127.0.0.1:9", "run", spool_dir=tmp_path, token="s3cret\nmore")
    with running_auditor(tmp_path / "a") as auditor:
        client = AuditClient(auditor.grpc, "run", spool_dir=tmp_path / "s", token=lambda: "s3cr\u00e9t")
        client.submit_rollout(pair()[0])
        assert client.close(10).accepted == 1, "this auditor asks for none"
    assert {record.getMessage() for record in caplog.records} == {
        "the auditor's token cannot be read now: the token must be one line of printable ASCII"
    }


def submit(auditor: AuditorProcess, token: str, run_id: str, sample: str) -> Any:
    records = [to_wire(record) for record in pair(sample, run_id=run_id)]
    with grpc.insecure_channel(auditor.grpc) as channel:
        call = AuditServiceStub(channel).Submit
        return call(pb.SubmitRequest(batch=pb.Batch(records=records)), metadata=(("authorization", f"Bearer {token}"),))


def status(auditor: AuditorProcess, token: str, path: str) -> tuple[int, str]:
    request = urllib.request.Request(f"http://{auditor.http}{path}", headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status), answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_job_writes_and_reads_its_own_runs_and_no_others(tmp_path: Path) -> None:
    tokens = write(tmp_path / "tokens", entry("a", ONE, "a.*"), entry("b", TWO, "b"))
    (tmp_path / "admin").write_text("all\n")
    flags = ("--tokens-file", str(tokens), "--token-file", str(tmp_path / "admin"))
    with running_auditor(tmp_path / "a", *flags) as auditor:
        for token, run in ((ONE, "a.1"), (TWO, "b")):
            assert len(submit(auditor, token, run, "0").receipts.receipts) == 2
        with pytest.raises(grpc.RpcError) as denied:
            submit(auditor, ONE, "b", "1")
        assert denied.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert denied.value.details() == "forbidden_run: the token of 'a' is for runs a.*, not 'b'"
        for path in ("", "/steps", "/steps/0", "/curve", "/steps/0/samples", "/samples/0/0", "/capsules",
                     "/capsules/0/0", "/samples/0/0/capsule"):  # fmt: skip
            assert status(auditor, ONE, f"/api/v1/runs/a.1{path}")[0] == 200, path
            code, body = status(auditor, ONE, f"/api/v1/runs/b{path}")
            assert (code, '"code":"forbidden_run"' in body) == (403, True), path
        assert '"run_id":"b"' not in status(auditor, ONE, "/api/v1/runs")[1]
        assert '"run_id":"b"' in status(auditor, "all", "/api/v1/runs")[1]
        code, shown = status(auditor, ONE, "/metrics")
        series = [line for line in shown.splitlines() if not line.startswith("#")]
        assert (code, len(series) > 10) == (200, True)
        assert all('run_id="a.1"' in line for line in series)
        code, metrics = status(auditor, "all", "/metrics")
        assert code == 200
        assert 'auditor_errors_total{code="forbidden_run",part="grpc"} 1.0' in metrics
        assert 'auditor_errors_total{code="forbidden_run",part="http"} 9.0' in metrics
        assert 'auditor_records_total{outcome="accepted",run_id="b",side="rollout"} 1.0' in metrics
        write(tokens, entry("a", ONE, "b"))
        assert len(submit(auditor, ONE, "b", "1").receipts.receipts) == 2
        with pytest.raises(grpc.RpcError) as denied:
            submit(auditor, TWO, "b", "2")
        assert denied.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert auditor.stop() == 0
        log = (auditor.folder / "auditor.log").read_text()
        assert not any(token in log for token in (ONE, TWO))


def test_records_of_a_job_whose_token_is_wrong_wait_until_it_is_right_and_hold_up_no_other(tmp_path: Path) -> None:
    """Two jobs share a spool; the one whose token does not cover its run loses nothing."""
    tokens, spool = write(tmp_path / "tokens", entry("b", "two", "b")), tmp_path / "spool"
    with running_auditor(tmp_path / "a", "--tokens-file", str(tokens)) as auditor:
        early = AuditClient(auditor.grpc, "a", spool_dir=spool, token="two")
        for record in pair("0", run_id="a"):
            (early.submit_rollout if record.side == "rollout" else early.submit_trainer)(record)  # type: ignore[arg-type]
        assert early.close(2).spooled == 2
        held = tmp_path / "held"
        held.write_text("two")
        other = AuditClient(auditor.grpc, "b", spool_dir=spool, token=held.read_text)
        for record in pair("0", run_id="b"):
            (other.submit_rollout if record.side == "rollout" else other.submit_trainer)(record)  # type: ignore[arg-type]
        counts = other.flush(2)
        assert (counts.accepted, counts.spooled) == (2, 2)
        write(tokens, entry("b", "three", "b"))
        held.write_text("three")
        for record in pair("1", run_id="b"):
            (other.submit_rollout if record.side == "rollout" else other.submit_trainer)(record)  # type: ignore[arg-type]
        assert other.flush(2).accepted == 4, "a rotated token is taken up by a client that runs"
        other.close(0.5)
        write(tokens, entry("a", "two", "a"))
        with AuditClient(auditor.grpc, "a", spool_dir=spool, token="two") as late:
            assert late.flush(10).accepted == 2
