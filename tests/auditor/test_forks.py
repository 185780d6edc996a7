"""What workers do that are forked off from the process that has the client: hand in, and end in any way."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from auditor.client import AuditClient
from auditor.forks import Losses
from auditor.spool import Spool
from tests.auditor.processes import REPOSITORY
from tests.auditor.samples import pair
from tests.auditor.test_spool import NOBODY, payload, server, spooled

RECORDS = 5


def in_a_child(work: Callable[[], None], seconds: float = 30.0) -> int:
    """Its exit code, −1 where it hangs."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


def hand_in(client: AuditClient, worker: int) -> None:
    for i in range(RECORDS):
        client.submit_rollout(pair(f"{worker}-{i}")[0])


def test_what_forked_workers_hand_in_arrives_while_their_parent_is_sending(tmp_path: Path) -> None:
    """No worker closes the client, and none waits; forks fall into all that a sending thread does."""
    workers, stop = 40, threading.Event()
    with server() as address:
        client = AuditClient(address, "run", spool_dir=tmp_path)
        client.submit_rollout(pair("before")[0])
        own = [1]

        def keep_sending() -> None:
            while not stop.wait(0.001):
                client.submit_trainer(pair(f"own-{own[0]}")[1])
                own[0] += 1

        thread = threading.Thread(target=keep_sending)
        thread.start()
        ends = [in_a_child(lambda n=n: hand_in(client, n)) for n in range(workers)]  # type: ignore[misc]
        stop.set()
        thread.join()
        counts = client.close(timeout=60)
    assert ends == [0] * workers
    assert (counts.accepted, counts.spooled, counts.dropped) == (own[0] + workers * RECORDS, 0, 0)


def _worker(client: AuditClient, number: int) -> None:
    hand_in(client, number)
    counts = client.close(timeout=20)
    sys.exit(0 if (counts.queued, counts.spooled, counts.dropped) == (0, 0, 0) else 1)


def test_a_worker_that_closes_the_client_waits_until_its_parent_has_sent_all(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    with server() as address, AuditClient(address, "run", spool_dir=tmp_path) as client:
        workers = [fork.Process(target=_worker, args=(client, n)) for n in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(30)
        assert [worker.exitcode for worker in workers] == [0, 0, 0]
        assert client.counts.accepted == 3 * RECORDS


def test_a_worker_takes_nothing_of_its_parents_and_waits_for_none_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What waits in memory is sent once; what waits on disk is no worker's to wait for."""
    spooled(tmp_path)
    client = AuditClient(NOBODY, "run", spool_dir=tmp_path)
    client.submit_rollout(pair("own")[0])

    def work() -> None:
        began = time.monotonic()
        assert client.close(timeout=20).queued == 0
        assert time.monotonic() - began < 5
        assert "is incomplete" not in caplog.text

    assert in_a_child(work) == 0
    counts = client.close(timeout=0)
    assert (counts.spooled, counts.dropped) == (7, 0)


def test_a_worker_says_what_nobody_sends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    client = AuditClient(NOBODY, "run", spool_dir=tmp_path)

    def work() -> None:
        hand_in(client, 0)
        assert client.close(timeout=0.2).spooled == RECORDS
        assert f"{RECORDS} records wait in" in caplog.text

    assert in_a_child(work) == 0
    client.close(timeout=0)


@pytest.fixture
def lives_on() -> Iterator[Callable[[], int]]:
    """Forks off a child that does nothing until the test ends; its process."""
    children: list[int] = []

    def fork() -> int:
        child = os.fork()
        while child == 0:
            signal.pause()
        children.append(child)
        return child

    yield fork
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def put(spool: Spool) -> None:
    assert spool.put(payload(3), 6)


def claim(spool: Spool) -> None:
    with spool.claim_oldest() as claimed:
        assert claimed is not None


def at(moment: str, action: Callable[[], object], patch: pytest.MonkeyPatch) -> None:
    """Do it once, in the midst of what the spool does: `opened`, and nobody knows of it yet, or all but `stored`."""
    once = iter([action])

    def opened(*given: Any) -> FileIO:
        file = FileIO(*given)
        next(once, bool)()
        return file

    def fsync(descriptor: int, real: Callable[[int], None] = os.fsync) -> None:
        next(once, bool)()
        real(descriptor)

    patch.setattr(*("auditor.spool.FileIO", opened) if moment == "opened" else ("os.fsync", fsync))


@pytest.mark.parametrize(("work", "moment"), [(put, "opened"), (put, "stored"), (claim, "opened")])
def test_a_worker_that_lives_on_keeps_no_batch_from_being_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lives_on: Callable[[], int], work: Callable[[Spool], None],
    moment: str,
) -> None:  # fmt: skip
    """A lock on a file lasts until every process that inherited it has let go, or one of them lets go for all."""
    if work is claim:
        spooled(tmp_path)
    at(moment, lives_on, monkeypatch)
    work(Spool(tmp_path, 1 << 30))
    with Spool(tmp_path, 1 << 30).claim_oldest() as again:
        assert again is not None, "the child holds what the parent has let go of"


@pytest.mark.parametrize("work", [put, claim])
def test_a_worker_that_outlives_its_parent_holds_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: Callable[[Spool], None]
) -> None:
    """The parent is killed while it holds a file, and lets go of nothing by itself."""
    if work is claim:
        spooled(tmp_path)
    told, tells = os.pipe()

    def die() -> None:
        child = os.fork()
        if child == 0:
            os.write(tells, b"%d\n" % os.getpid())
            while True:
                signal.pause()
        os.kill(os.getpid(), signal.SIGKILL)

    def hold() -> None:
        if work is put:
            at("stored", die, monkeypatch)
            put(Spool(tmp_path, 1 << 30))
        with Spool(tmp_path, 1 << 30).claim_oldest():
            die()

    assert in_a_child(hold) == -signal.SIGKILL
    child = int(os.read(told, 16))
    try:
        (file,) = tmp_path.iterdir()
        os.utime(file, (1.0, 1.0))
        after = Spool(tmp_path, 1 << 30)
        if work is claim:
            claim(after)
        assert file.exists() is (work is claim), "a draft that nobody holds is cleared"
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(told)
        os.close(tells)


ENDS_BY_SYS_EXIT = """
import os, sys
from auditor.client import AuditClient
import grpc._channel
from tests.auditor.processes import REPOSITORY
from tests.auditor.samples import pair

parent = os.getpid()
torn_down = grpc._channel.Channel.__del__
grpc._channel.Channel.__del__ = lambda channel: os._exit(98) if os.getpid() != parent else torn_down(channel)


def work(n):
    with AuditClient(sys.argv[1], "run", spool_dir=sys.argv[2]) as client:
        client.submit_trainer(pair("own")[1])
        workers = []
        for _ in range(n):
            workers.append(os.fork())
            if workers[-1] == 0:
                client.submit_rollout(pair(str(os.getpid()))[0])
                sys.exit(0)
        assert [os.waitpid(worker, 0)[1] for worker in workers] == [0] * n
    print(client.counts.accepted)


work(20)
"""


def test_a_worker_may_end_by_sys_exit_and_tears_down_nothing_of_grpc(tmp_path: Path) -> None:
    """It leaves the frames of its parent's script, and all that they hold, as the interpreter ends."""
    with server() as address:
        command = [sys.executable, "-c", ENDS_BY_SYS_EXIT, address, str(tmp_path)]
        environment = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stdout) == (0, "21\n"), done.stderr
    assert "fork" not in done.stderr, "gRPC's own handlers of a fork kill one of 200 workers, and say so of others"


def test_what_workers_lose_is_heard_once_and_none_waits_for_its_parent_to_listen() -> None:
    losses, many = Losses(), 200_000

    def work() -> None:
        for _ in range(many):
            losses.say("trainer")

    assert in_a_child(work) == 0, "it waits until somebody listens"
    assert 0 < losses.heard()["trainer"] < many
    work()  # as a worker that goes on
    heard = losses.heard()["trainer"]
    assert in_a_child(lambda: losses.say("rollout")) == 0
    assert losses.heard() == {"rollout": 1}, "a worker's own worker says what was not said yet, too"
    while heard < many:
        losses.say("trainer")
        many += 1
        heard += losses.heard()["trainer"]
    assert (heard, losses.heard()) == (many, {})
    losses.close()
    losses.say("rollout")
    assert losses.heard() == {}


def test_a_worker_that_loses_a_record_outlives_its_parent_whatever_a_broken_pipe_does(tmp_path: Path) -> None:
    client = AuditClient(NOBODY, "run", spool_dir=tmp_path, spool_limit_bytes=0)
    go, goes = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.read(go, 1)
        hand_in(client, 0)
        os._exit(client.counts.dropped)
    client.close(0)
    os.write(goes, b"!")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == RECORDS
    os.close(go)
    os.close(goes)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_a_thread_that_died_leaves_in_memory_is_stored_at_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(client: AuditClient) -> None:
        raise MemoryError

    monkeypatch.setattr(AuditClient, "_gather", dies)
    client = AuditClient(NOBODY, "run", spool_dir=tmp_path)
    hand_in(client, 0)
    counts = client.close(timeout=0)
    assert (counts.queued, counts.spooled) == (0, RECORDS)
