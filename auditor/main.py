"""Composition root: `python -m auditor.main --config auditor.yaml`, or the same settings as flags.

Exit code 0 after SIGTERM or SIGINT, 1 after a failure of its own, 2 where it cannot start, with one line that says why.
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while the rest is imported: there is nothing to unwind yet

import argparse
import gc
import json
import logging
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import uvicorn

from auditor.clock import SteadyClock
from auditor.config import (
    Config,
    join_address,
    left_open,
    load_config,
    split_address,
    store_access,
    tls_files,
    weights_place,
)
from auditor.contracts import known_contracts
from auditor.errors import AuditorError, ConfigError
from auditor.export.api import Facts, make_api
from auditor.export.board import Board
from auditor.export.connections import HEAD_BYTES, bounded
from auditor.export.leaving import Leaving
from auditor.export.metrics import Live, Metrics
from auditor.file_place import FilePlace
from auditor.grants import Grants
from auditor.ingest.admission import Admission
from auditor.ingest.clients import Clients
from auditor.ingest.limits import Limits
from auditor.ingest.service import AuditService, start_server
from auditor.outcomes import Outcomes
from auditor.periodic import Periodic
from auditor.pipeline import Incoming, Pipeline, Receipt, Refused
from auditor.rates import Rate
from auditor.recompute import Patience, RecomputePool
from auditor.recompute_queue import RecomputeQueue
from auditor.retention import ParquetArchive, Retirement
from auditor.sampling import Policy, make_policy
from auditor.search_queue import SearchQueue
from auditor.storage.database import open_database
from auditor.storage.ledger import Ledger
from auditor.storage.reader import Reader
from auditor.tls import Renewal, TlsFiles, grpc_credentials, http_context
from auditor.token_evidence import TokenEvidence, Wanted
from auditor.unpaired import Unpaired
from auditor.workers import find
from auditor.writer import Writer

log = logging.getLogger("auditor")
_UPKEEP_S = 30.0
_EVIDENCE_S = 2.0
_OPEN_FILES = 65536


class Auditor:
    """Everything running. `addresses` are what was bound."""

    def __init__(self, config: Config) -> None:
        self._parts = ExitStack()
        self._stopping = threading.Event()
        try:
            self._start(config)
        except BaseException:
            self.close()
            raise

    def _start(self, config: Config) -> None:
        grants = Grants(config.token_file, config.tokens_file)
        clock = SteadyClock()
        ledger = Ledger(open_database(config.ledger, writer=True), clock)
        self._parts.callback(ledger.close)
        self._reader = Reader(lambda: open_database(config.ledger, writer=False))
        self._measure()
        self._board = Board.rebuilt(ledger.counters(), self._reader, config.shown_runs)
        self._ledger = ledger
        self._writer = Writer(ledger, self._board.commit, self._recover, config.write_queue)
        self._parts.callback(self._writer.close)
        self._clients = Clients(config.shown_runs)
        live = Live(
            lambda: self._writer.waiting,
            lambda: self._queue.waiting,
            lambda: self._queue.lag_seconds,
            lambda: self._searches.waiting,
            lambda: self._searches.lag_seconds,
            lambda: self._ledger_bytes,
            clock,
            lambda: clock.jumped_seconds,
            self._clients.waiting,
        )
        version = metadata.version("rl-kernel")
        self._metrics = Metrics(self._board, live, version)
        self._queue = RecomputeQueue(config.recompute_queue)
        contracts = known_contracts()
        ask = self._queue.put if config.weights_root is not None else None
        self._searches = SearchQueue(config.diagnose_per_step)
        self._pipeline = Pipeline(
            contracts, _policy(config), self._board, ask, self._queue.room, self._metrics.count_error, self._searches
        )
        self._outcomes = Outcomes(self._reader, self._writer, self._pipeline, self._metrics, self._stopping)
        self._parts.callback(self._outcomes.forgive_search)
        self._start_upkeep(config, clock)
        self._recomputes = self._start_pools(config)
        names = {digest: f"{c.profile.name}/segments={c.segments}" for digest, c in contracts.items()}
        reads = Rate("requests", config.rate_reads, config.rate_burst_s)
        api = make_api(self._reader, self._metrics, grants, reads, Facts(version, names, self._why_not_ready))
        http = self._start_http(api, config.http, tls_files(config))
        self.addresses = {"grpc": self._start_grpc(config, grants), "http": http}
        self._requeue()
        if not self._recomputes:
            self._outcomes.give_searches_up(config.recompute_retry_s)

    def _start_upkeep(self, config: Config, clock: SteadyClock) -> None:
        """What is done now and then: runs leave the exposition, samples that wait in vain and old evidence go."""
        leaving = Leaving(self._board, self._writer, config.shown_idle_s, config.shown_runs, self._metrics.count_left)
        self._every(_UPKEEP_S, "the ledger's size", self._measure)
        self._every(_often(config.shown_idle_s), "runs that leave /metrics", leaving.look)
        if config.pair_wait_s:
            unpaired = Unpaired(self._reader, self._writer, self._pipeline, clock, config.pair_wait_s, self._stopping)
            self._every(_often(config.pair_wait_s), "samples that wait for a side", unpaired.look)
        if config.weights_root is None:
            end = partial(self._outcomes.end_queued, config.recompute_retry_s)
            self._every(_often(config.recompute_retry_s), "samples that wait for a reference", end)
        unexported = None
        if config.evidence != "none":
            tokens = self._token_evidence(config, config.evidence)
            self._every(_EVIDENCE_S, "token rows that are to be written", tokens.look, "evidence")
            unexported = tokens.unexported
        if config.retain_days:
            archive = ParquetArchive(config.archive, store_access(config)) if config.archive else None
            failed = partial(self._metrics.count_error, "retention")
            old = Retirement(
                self._reader, self._writer, config.retain_days, archive, clock, self._stopping, unexported, failed
            )
            self._every(config.retain_look_s, "evidence that is to be retired", old.look, "retention")

    def _token_evidence(self, config: Config, wanted: Wanted) -> TokenEvidence:
        place = config.evidence_place
        files = FilePlace("evidence_place", place, store_access(config))
        failed = partial(self._metrics.count_error, "evidence")
        return TokenEvidence(self._reader, self._writer, wanted, place, files, self._stopping, failed)

    def _every(self, period_s: float, name: str, look: Callable[[], None], part: str = "upkeep") -> None:
        self._parts.callback(Periodic(name, period_s, look, partial(self._metrics.count_error, part)).close)

    def _measure(self) -> None:
        self._ledger_bytes = self._reader.size_bytes()

    def _start_grpc(self, config: Config, grants: Grants) -> str:
        """Serve; returns the bound host:port."""
        limits = Limits(message_bytes=config.message_bytes, tokens=config.sample_tokens)
        admission = Admission(
            grants,
            Rate("records", config.rate_records, config.rate_burst_s),
            Rate("bytes", config.rate_bytes, config.rate_burst_s),
        )
        host, port = split_address("grpc", config.grpc)
        # gRPC would say on stderr, in its own words, what `_listen` says in one line.
        _listen("gRPC", config.grpc).close()
        tls = tls_files(config)
        failed = partial(self._metrics.count_error, "grpc")
        service = AuditService(self._accept, limits, admission, failed, hear=self._clients.hear)
        credentials = grpc_credentials(tls) if tls else None
        server, port = start_server(service, join_address(host, port), limits, credentials)
        self._parts.callback(lambda: server.stop(grace=5).wait())
        return join_address(host, port)

    def _why_not_ready(self) -> str:
        """Without a database's own words, which name hosts and paths: nobody is asked for a token. The log has them."""
        if not self._reader.ready():
            return "the ledger does not answer"
        return "the ledger cannot be written; the log says why" if self._writer.trouble() else ""

    def close(self) -> None:
        """Stop taking records, write what was taken, let go of everything. In reverse order of the start."""
        self._stopping.set()
        self._parts.close()

    def _recover(self) -> None:
        """After a commit of which nobody knows whether it happened."""
        self._board.rebuild(self._ledger.counters(), self._reader)
        self._requeue()

    def _requeue(self) -> None:
        """Take up what the ledger says is queued; what is recomputed twice is recorded once."""
        if self._recomputes:
            for key, urgent in self._reader.queued():
                self._queue.put(key, urgent)
            for key in self._reader.searching():
                self._searches.put(key, urgent=False)

    def _accept(self, batch: Sequence[Incoming | Refused]) -> list[Receipt]:
        with self._metrics.receipt_seconds.time():
            return self._writer.submit(lambda unit: self._pipeline.receive(unit, batch)).result()

    def _start_pools(self, config: Config) -> bool:
        """One for verdicts and one for causes; whether there is a reference to ask."""
        weights = weights_place(config)
        if weights is None:
            return False
        weights.open().versions()  # a place that cannot be read fails the start and not the first mismatch
        pool, idle, told = config.recompute_pool, config.recompute_idle, self._metrics.count_worker_end
        waits, limit, seconds = config.recompute_retry_s, config.recompute_timeout_s, config.diagnose_seconds
        said = self._outcomes
        verdicts = (config.recompute_workers, self._queue, Patience(limit, waits), said.load, said.conclude)
        # A search recomputes the sample first, and then has its seconds for each side.
        causes = (1, self._searches, Patience(limit + 2 * seconds, waits), said.begin_search, said.explain)
        self._parts.callback(RecomputePool(weights, find(pool, idle), *verdicts, told).close)
        beside = find(pool, idle, beside=True)
        self._parts.callback(RecomputePool(weights, beside, *causes, told, seconds, said.search_answered).close)
        return True

    def _start_http(self, api: Any, address: str, tls: TlsFiles | None) -> str:
        """Serve in a thread; returns the bound host:port."""
        settings = uvicorn.Config(
            api,
            http=bounded(partial(self._metrics.count_error, "http")),
            ws="none",
            h11_max_incomplete_event_size=HEAD_BYTES,
            log_config=None,  # its own would write lines of another form to the same stream
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=2,
        )
        if tls is not None:
            settings.load()
            settings.ssl = http_context(tls)
            self._parts.callback(Renewal(tls, settings.ssl).close)
        listener = _listen("HTTP", address)
        server = uvicorn.Server(settings)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="http")
        thread.start()

        def stop() -> None:
            server.should_exit = True
            thread.join()
            listener.close()

        self._parts.callback(stop)
        return join_address(*listener.getsockname()[:2])


def main(arguments: Sequence[str]) -> int:
    """Run until a signal; the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    started = time.monotonic()
    stop = threading.Event()
    failed: list[threading.ExceptHookArgs] = []

    def give_up(failure: threading.ExceptHookArgs) -> None:
        """A thread that ends by an error must not leave a process behind that looks alive."""
        failed.append(failure)
        log.critical("thread %s failed", failure.thread and failure.thread.name, exc_info=failure.exc_value)
        stop.set()

    threading.excepthook = give_up
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    _raise_open_files()
    try:
        config = _configure(arguments)
        auditor = Auditor(config)
    except AuditorError as error:
        print(f"auditor: {error}", file=sys.stderr)
        return 2
    if config.stop_at_eof:
        threading.Thread(target=_wait_for_eof, args=(stop,), name="stdin", daemon=True).start()
    try:
        # What lives now lives to the end: it need not be looked through again and again.
        gc.freeze()
        for said in left_open(config, auditor.addresses):
            log.warning("%s", said)
        if config.ports_file is not None:
            _write_ports(config.ports_file, auditor.addresses)
        log.info("ready after %.2f s: %s", time.monotonic() - started, auditor.addresses)
        stop.wait()
    except ConfigError as error:
        print(f"auditor: {error}", file=sys.stderr)
        return 2
    finally:
        auditor.close()
    return 1 if failed else 0


def _raise_open_files() -> None:
    """Connections are files; the usual soft limit of 1,024 is for programs that use select."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _wait_for_eof(stop: threading.Event) -> None:
    # Not sys.stdin: an interpreter that ends while a thread waits in its buffer aborts.
    while os.read(0, 4096):
        pass
    stop.set()


def _often(wait_s: float) -> float:
    """Seconds between two looks for what has waited for so long; 0: for ever."""
    return min(_UPKEEP_S, max(0.1, wait_s / 10)) if wait_s else _UPKEEP_S


def _policy(config: Config) -> Policy:
    return make_policy(
        config.recompute_rate, config.recompute_every, config.recompute_first, config.recompute_per_stratum
    )


def _configure(arguments: Sequence[str]) -> Config:
    parser = argparse.ArgumentParser(
        prog="python -m auditor.main", description="Compares rollout and trainer, bit by bit."
    )
    parser.add_argument("--config", type=Path, help="YAML file with the settings below")
    for name, field in Config.model_fields.items():
        flag = "--" + name.replace("_", "-")
        switch: dict[str, Any] = {"action": "store_true"} if field.annotation is bool else {}
        default = "" if field.default in (None, "") else f" (default: {field.default})"
        parser.add_argument(flag, dest=name, help=f"{field.description}{default}", default=None, **switch)
    given = vars(parser.parse_args(arguments))
    path = given.pop("config")
    return load_config(path, {name: value for name, value in given.items() if value is not None})


def _listen(what: str, address: str) -> socket.socket:
    host, port = split_address(what, address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {address} for {what}: {error.strerror}") from None
    return listener


def _write_ports(path: Path, addresses: dict[str, str]) -> None:
    """Whole or not at all, for somebody waits for it."""
    draft = path.with_name(path.name + ".part")
    try:
        draft.write_text(json.dumps(addresses), "utf-8")
        draft.rename(path)
    except OSError as error:
        raise ConfigError(f"ports_file {path}: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
