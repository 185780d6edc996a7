"""How a client is: said with each batch, seen in the auditor's metrics, forgotten when it is gone."""

import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from auditor.client import AuditClient
from auditor.codec import to_wire
from auditor.ingest.clients import Clients, Waiting
from auditor.proto import audit_pb2 as pb
from auditor.self_report import SelfReport
from auditor.spool import Spool
from tests.auditor.processes import AuditorProcess, running_auditor
from tests.auditor.samples import pair
from tests.auditor.test_forks import in_a_child
from tests.auditor.test_ledger import wait_until

NOBODY = "127.0.0.1:9"


def state(instance: str = "a", side: str = "rollout", run: str = "run", **numbers: int) -> pb.ClientState:
    return pb.ClientState(instance_id=instance, run_id=run, side=side, **numbers)


class Steady:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_clients_of_a_run_and_side_are_added_up_and_forgotten_those_that_left_something_last() -> None:
    steady = Steady()
    clients = Clients(1000, steady)
    assert clients.hear(state("a", spooled_records=3, spooled_bytes=70, dropped_records=1))
    assert clients.hear(state("b", spooled_records=4, dropped_records=2))
    assert clients.hear(state("c", side=""))
    assert clients.hear(state("a", side="trainer", run="other"))
    both = Waiting(2, 7, 70, 3)
    sums = {("run", "rollout"): both, ("run", "both"): Waiting(1), ("other", "trainer"): Waiting(1)}
    assert clients.waiting() == sums
    steady.now += 100
    assert clients.hear(state("b", spooled_records=1))
    assert clients.waiting()["run", "rollout"] == Waiting(2, 4, 70, 1)
    steady.now += 21
    assert clients.waiting() == {("run", "rollout"): Waiting(2, 4, 70, 1)}
    steady.now += 780
    assert clients.waiting() == {("run", "rollout"): Waiting(1, 1)}


def test_names_that_no_label_takes_are_refused_and_no_flood_of_names_is_kept() -> None:
    clients = Clients(1000, Steady())
    for wrong in (state(""), state("a", run=""), state("a\n"), state("a", side="referee"), state("a" * 129)):
        assert not clients.hear(wrong)
    for number in range(5000):
        assert clients.hear(state(str(number), run=f"run-{number % 50}"))
    assert sum(said.clients for said in clients.waiting().values()) == 4096


def test_invented_runs_make_no_more_series_than_runs_are_shown() -> None:
    clients = Clients(3, Steady())
    for number in range(100):
        assert clients.hear(state("a", run=f"run-{number}"))
    assert clients.hear(state("b", run="run-5", side="trainer"))
    assert clients.hear(state("c", run="run-99"))
    expected = {("run-99", "rollout"): 2, ("run-5", "trainer"): 1, ("run-5", "rollout"): 1, ("run-98", "rollout"): 1}
    assert {name: said.clients for name, said in clients.waiting().items()} == expected


def test_a_client_says_again_what_is_amiss_and_nothing_while_all_is_well() -> None:
    steady, disk = Steady(), [(0, 0)]
    report = SelfReport("run", lambda: disk[0], steady)
    assert report.state(0) is None, "nothing was handed in"
    report.of_side("rollout")

    def says(dropped: int = 0) -> pb.ClientState:
        found = report.state(dropped)
        assert found is not None
        report.told(found)
        return found

    assert not report.due(0)
    assert says().side == "rollout"
    steady.now += 3600
    assert not report.due(0)
    disk[0] = (2, 900)
    steady.now += 1
    assert report.due(0)
    assert (says().spooled_records, says().spooled_bytes) == (2, 900)
    steady.now += 29
    assert not report.due(0)
    steady.now += 1
    assert report.due(0)
    says()
    report.of_side("trainer")
    assert says(5).side == ""
    disk[0] = (0, 0)
    steady.now += 1
    assert says(5).spooled_records == 0
    assert not report.due(5)
    assert report.due(6)


def test_a_disk_that_cannot_be_looked_at_and_a_client_of_many_runs_say_nothing_wrong() -> None:
    def broken() -> tuple[int, int]:
        raise PermissionError("no")

    report = SelfReport("run", broken)
    report.of_side("trainer")
    said = report.state(0)
    assert said is not None
    assert (said.spooled_records, said.run_id) == (0, "run")
    many = SelfReport("", lambda: (1, 1))
    many.of_side("trainer")
    assert many.state(1) is None


def test_what_is_spooled_is_the_batch_alone_and_what_was_spooled_before_is_sent(tmp_path: Path) -> None:
    rollout, trainer = pair()
    early = AuditClient(NOBODY, "run", spool_dir=tmp_path / "s")
    early.submit_rollout(rollout)
    wait_until(lambda: early.counts.spooled == 1)
    early.close(0)
    (file,) = (tmp_path / "s").glob("*.batch")
    as_before = pb.SubmitRequest(batch=pb.Batch(records=[to_wire(rollout)])).SerializeToString()
    assert file.read_bytes() == as_before
    Spool(tmp_path / "s", 1 << 20).put(
        pb.SubmitRequest(batch=pb.Batch(records=[to_wire(trainer)])).SerializeToString(), 1
    )
    with (
        running_auditor(tmp_path / "a") as auditor,
        AuditClient(auditor.grpc, "run", spool_dir=tmp_path / "s") as later,
    ):
        assert later.flush(10).accepted == 2


def of_clients(auditor: AuditorProcess) -> dict[str, float]:
    """Series about clients, by name and side."""
    found = {}
    for series, value in auditor.metrics().items():
        name, _, labels = series.partition("{")
        if name.startswith("auditor_client_"):
            found[f"{name.removeprefix('auditor_')} {labels.split('side=')[1].strip(chr(34) + '}')}"] = value
    return found


@contextmanager
def slow_auditor(folder: Path) -> Iterator[AuditorProcess]:
    """It takes a record in a second or two, and refuses the rest until later."""
    with running_auditor(folder, "--rate-records", "0.7", "--rate-burst-s", "1") as auditor:
        yield auditor


def test_a_client_outside_of_ray_is_seen_while_its_records_wait_and_when_it_lost_some(tmp_path: Path) -> None:
    with slow_auditor(tmp_path / "a") as auditor:
        client = AuditClient(auditor.grpc, "run", spool_dir=tmp_path / "s", queue_size=1, spool_limit_bytes=1800)
        for sample in range(8):
            client.submit_rollout(pair(str(sample))[0])
            time.sleep(0.05)
        lost = client.counts.dropped
        assert lost > 0
        seen = auditor.wait_for_metrics(lambda m: any(v for s, v in m.items() if "client_spooled_records" in s))
        assert seen['auditor_client_spooled_records{run_id="run",side="rollout"}'] >= 1
        assert seen['auditor_client_spooled_bytes{run_id="run",side="rollout"}'] >= 600
        counts = client.flush(60)
        assert (counts.spooled, counts.queued) == (0, 0)
        wait_until(lambda: of_clients(auditor)["client_spooled_records rollout"] == 0)
        last = {"client_spooled_records rollout": 0.0, "client_spooled_bytes rollout": 0.0}
        assert of_clients(auditor) == {**last, "client_dropped_records rollout": counts.dropped}
        client.close()
        assert of_clients(auditor)["client_dropped_records rollout"] == counts.dropped


def call(auditor: AuditorProcess, batch: pb.Batch, token: str = "") -> Any:
    with grpc.insecure_channel(auditor.grpc) as channel:
        submit = channel.unary_unary(
            "/audit.v1.AuditService/Submit", pb.SubmitRequest.SerializeToString, pb.SubmitResponse.FromString
        )
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        return submit(pb.SubmitRequest(batch=batch), timeout=10, metadata=metadata)


def test_what_a_client_says_of_another_ones_run_is_not_heard_and_nonsense_costs_no_record(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text("- {name: mine, token: aaaaaaaaaaaaaaaa, runs: [mine.*]}\n")
    tokens.chmod(0o600)
    records = [to_wire(replace(pair()[0], run_id="mine.1"))]
    with running_auditor(tmp_path / "a", "--tokens-file", str(tokens)) as auditor:
        for said in (state(run="other.1"), state(run="mine.1", side="referee"), state("b", run="mine.1")):
            (receipt,) = call(auditor, pb.Batch(records=records, client=said), "aaaaaaaaaaaaaaaa").receipts.receipts
            assert receipt.outcome in (pb.OUTCOME_ACCEPTED, pb.OUTCOME_DUPLICATE)
        with pytest.raises(grpc.RpcError):
            call(auditor, pb.Batch(client=state(run="mine.2")))
        text = auditor_text(auditor, "aaaaaaaaaaaaaaaa")
    assert 'auditor_client_spooled_records{run_id="mine.1",side="rollout"} 0.0' in text
    assert "other.1" not in text
    assert "mine.2" not in text


def auditor_text(auditor: AuditorProcess, token: str) -> str:
    request = urllib.request.Request(f"http://{auditor.http}/metrics", headers={"authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def test_what_forked_workers_spool_and_lose_is_said_by_their_parent_that_hands_in_nothing(tmp_path: Path) -> None:
    rollout, trainer = pair()
    with running_auditor(tmp_path / "auditor") as auditor:
        spools = AuditClient(auditor.grpc, "run", spool_dir=tmp_path / "a")
        assert in_a_child(lambda: spools.submit_rollout(rollout)) == 0
        of_rollout = '{run_id="run",side="rollout"}'
        auditor.wait_for_metrics(lambda series: f"auditor_client_spooled_records{of_rollout}" in series)
        loses = AuditClient(auditor.grpc, "run", spool_dir=tmp_path / "b", spool_limit_bytes=0)
        for _ in range(3):
            assert in_a_child(lambda: loses.submit_trainer(trainer)) == 0
        name = 'auditor_client_dropped_records{run_id="run",side="trainer"}'
        auditor.wait_for_metrics(lambda series: series.get(name) == 3)
        assert (spools.close().dropped, loses.close().dropped) == (0, 3)
