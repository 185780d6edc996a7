"""The network between job and auditor is cut, by resets and by silence: records wait, and arrive once."""

import threading
import time
from pathlib import Path

import pytest

from auditor.client import AuditClient
from auditor.storage.chain import verify
from auditor.storage.database import open_database
from tests.auditor.network import Network, network
from tests.auditor.processes import running_auditor
from tests.auditor.test_survival import check_totals, submit_pairs


def cut(folder: Path, state: str, seconds: float, samples: int) -> tuple[int, float]:
    """Records spooled at the end of the cut, and the longest that the producer ever waited in `submit`."""
    longest = [0.0]
    with running_auditor(folder / "a") as auditor, network(auditor.grpc) as between:
        with AuditClient(between.address, "run", spool_dir=folder / "s", queue_size=256) as client:
            submit_pairs(client, range(samples // 4))
            assert client.flush(20).accepted == samples // 2
            producer = threading.Thread(
                target=_produce, args=(client, range(samples // 4, samples), seconds / 2, longest)
            )
            between.set(state)
            time.sleep(0.1)
            producer.start()
            time.sleep(seconds)
            producer.join()
            compared = auditor.get("/api/v1/runs/run")["samples"]
            assert compared == samples // 4, "nothing got through while the network was cut"
            waiting = client.counts
            assert waiting.accepted == samples // 2
            between.set("up")
            counts = client.flush(60)
            assert (counts.queued, counts.spooled, counts.dropped, counts.refused) == (0, 0, 0, 0)
            assert counts.accepted + counts.duplicate == 2 * samples
        check_totals(auditor, samples)
        assert auditor.stop() == 0
        assert verify(open_database(str(auditor.ledger), writer=False)).entries == 3 * samples
    return waiting.spooled, longest[0]


def _produce(client: AuditClient, samples: range, seconds: float, longest: list[float]) -> None:
    for i in samples:
        started = time.perf_counter()
        submit_pairs(client, range(i, i + 1))
        longest[0] = max(longest[0], time.perf_counter() - started)
        time.sleep(seconds / len(samples))


@pytest.mark.parametrize("state", ["down", "silent"])
def test_a_cut_of_three_seconds_loses_nothing_counts_nothing_twice_and_holds_nobody_up(
    tmp_path: Path, state: str
) -> None:
    _, longest = cut(tmp_path, state, 3.0, 40)
    # A call that waited for the network would wait for the cut's end; a busy machine may hold up any call a little.
    assert longest < 1.0


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("state", ["down", "silent"])
def test_a_cut_of_a_minute_loses_nothing_counts_nothing_twice_and_holds_nobody_up(tmp_path: Path, state: str) -> None:
    spooled, longest = cut(tmp_path, state, 60.0, 2000)
    assert spooled > 0
    assert longest < 1.0


def test_a_network_that_drops_and_doubles_in_turn_delivers_each_record_once(tmp_path: Path) -> None:
    """Cut at random in the middle of calls: what was stored and not acknowledged comes again and is known."""
    with running_auditor(tmp_path / "a") as auditor, network(auditor.grpc) as between:
        flicker = threading.Thread(target=_flicker, args=(between,))
        with AuditClient(between.address, "run", spool_dir=tmp_path / "s") as client:
            flicker.start()
            for i in range(0, 300, 10):
                submit_pairs(client, range(i, i + 10))
                time.sleep(0.05)
            flicker.join()
            counts = client.flush(60)
            assert (counts.queued, counts.spooled, counts.dropped, counts.refused) == (0, 0, 0, 0)
        check_totals(auditor, 300)


def _flicker(between: Network) -> None:
    for i in range(10):
        between.set("down" if i % 2 else "silent")
        time.sleep(0.1)
        between.set("up")
        time.sleep(0.15)
