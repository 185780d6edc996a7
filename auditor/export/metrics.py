"""The board as Prometheus metrics. Names, labels and meanings are in docs/metrics.md, checked against this table."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client import Counter as LiveCounter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from auditor.compare import ULP_EDGES
from auditor.drift import statistics
from auditor.export.board import Board, Snapshot
from auditor.ingest.clients import Waiting
from auditor.storage.unit import Counter

# In this format they are gauges beside each counter, which no rule or dashboard asks for.
disable_created_metrics()  # type: ignore[no-untyped-call]

_RUN: Final = re.compile(r'[{,]run_id="([^"]*)"')

# name in the ledger → (labels, help); exported as auditor_<name>_total
COUNTERS: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    "records": (("run_id", "side", "outcome"), "Records by what became of them: accepted, duplicate, refused."),
    "refusals": (("code",), "Refused records by reason."),
    "compared_tokens": (("run_id",), "Active tokens compared bit by bit between rollout and trainer."),
    "mismatched_tokens": (
        ("run_id", "side"),
        "Active tokens whose bits differ: side=pair between the two, side=rollout|trainer from the reference.",
    ),
    "mismatched_samples": (("run_id", "side", "cause"), "Samples with a mismatch, by the side that is wrong."),
    "other_arithmetic_tokens": (("run_id",), "Tokens that differ between sides of two different MMA models."),
    "not_comparable_samples": (("run_id", "condition"), "Samples by the first precondition that failed."),
    "nonfinite_logprobs": (("run_id", "side"), "Active tokens with a NaN or an infinity."),
    "recomputed_tokens": (("run_id", "mma"), "Active tokens recomputed by the reference."),
    "retired_records": ((), "Records whose content was dropped by age; digests and verdicts stay."),
    "recompute_errors": (("run_id", "code"), "Samples that the reference could not recompute, by reason."),
    "recompute_skipped_samples": (
        ("run_id", "chosen"),
        "Samples that were to be recomputed and found no room to wait.",
    ),
    "evidence_samples": ((), "Samples whose token rows were written to evidence_place."),
    "evidence_rows": ((), "Token rows that were written to evidence_place."),
    "unpaired_samples": (("run_id", "side"), "Samples that were given up, for this side had not come in time."),
    "late_samples": (("run_id", "side"), "Samples that were given up and whose side came after all: judged then."),
}


@dataclass(frozen=True, slots=True)
class Live:
    """Gauges that are asked for at the scrape: queue lengths, seconds and bytes. None of them may ask the ledger."""

    write_queue: Callable[[], int]
    recompute_queue: Callable[[], int]
    recompute_lag: Callable[[], float]
    search_queue: Callable[[], int]
    search_lag: Callable[[], float]
    ledger_bytes: Callable[[], int]
    clock: Callable[[], float]
    clock_jumped: Callable[[], float]
    clients: Callable[[], Mapping[tuple[str, str], Waiting]]


class AuditCollector(Collector):
    """Turns the board into metric families."""

    def __init__(self, board: Board, live: Live) -> None:
        self._board = board
        self._live = live

    def collect(self) -> Iterable[Metric]:
        """Every family, the empty ones too, so that a dashboard finds its names."""
        snapshot = self._board.snapshot()
        yield from _counters(snapshot.counters)
        yield _ulp_histogram(snapshot.counters)
        yield from _gauges(snapshot)
        for name, help_text, read in (
            ("write_queue_batches", "Batches that wait for the ledger.", self._live.write_queue),
            ("recompute_queue_samples", "Samples that wait for the reference.", self._live.recompute_queue),
            ("recompute_lag_seconds", "Longest wait in the reference's queue.", self._live.recompute_lag),
            ("search_queue_samples", "Mismatches that wait for a search for causes.", self._live.search_queue),
            ("search_lag_seconds", "Longest wait for a search for causes.", self._live.search_lag),
            ("ledger_bytes", "Size of the ledger.", self._live.ledger_bytes),
            ("clock_timestamp_seconds", "Unix time by the clock that stamps records.", self._live.clock),
            (
                "clock_jumped_seconds",
                "How far the machine's clock was set since the start; no record's age follows it.",
                self._live.clock_jumped,
            ),
        ):
            yield GaugeMetricFamily(f"auditor_{name}", help_text, value=read())
        yield from _of_clients(self._live.clients())


class Metrics:
    """The registry of one auditor, with what only this process knows."""

    def __init__(self, board: Board, live: Live, version: str) -> None:
        self.registry = CollectorRegistry()
        build = Gauge("auditor_build_info", "Constant 1; the version is a label.", ["version"], registry=self.registry)
        build.labels(version).set(1)
        self.registry.register(AuditCollector(board, live))
        ProcessCollector(registry=self.registry)
        self.receipt_seconds = Histogram(
            "auditor_receipt_seconds",
            "From a batch's arrival to its receipts.",
            registry=self.registry,
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10),
        )
        self.recompute_seconds = Histogram(
            "auditor_recompute_seconds",
            "One sample by the reference.",
            registry=self.registry,
            buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
        )
        self.search_seconds = Histogram(
            "auditor_search_seconds",
            "The search for the causes of one sample, after its verdict.",
            registry=self.registry,
            buckets=(0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600),
        )
        self._errors = LiveCounter(
            "auditor_errors",
            "Calls, requests and work in the background that failed since the start, by part and code.",
            ["part", "code"],
            registry=self.registry,
        )
        self._left = LiveCounter(
            "auditor_left_runs", "Runs that left the exposition, by why.", ["reason"], registry=self.registry
        )
        self._worker_ends = LiveCounter(
            "auditor_recompute_worker_ends",
            "Recompute workers that died or were killed over a sample, and were replaced.",
            ["reason"],
            registry=self.registry,
        )

    def count_error(self, part: str, code: str) -> None:
        """Count a failure. part: grpc, http, judge, causes, retention, evidence or upkeep."""
        self._errors.labels(part, code).inc()

    def count_left(self, reason: str, runs: int) -> None:
        """Count runs that left. reason: silent or crowded."""
        self._left.labels(reason).inc(runs)

    def count_worker_end(self, reason: str) -> None:
        """Count a worker that was replaced. reason: died or timed_out."""
        self._worker_ends.labels(reason).inc()

    def text(self) -> bytes:
        """The exposition that a scrape gets."""
        return generate_latest(self.registry)

    def text_of(self, covers: Callable[[str], bool]) -> bytes:
        """The series of some runs, and nothing that is about the auditor as a whole. covers: whether a run is shown."""
        kept = []
        for line in self.text().decode().splitlines(keepends=True):
            run = _RUN.search(line)
            if line.startswith("#") or (run and covers(run[1])):
                kept.append(line)
        return "".join(kept).encode()


def _of_clients(waiting: Mapping[tuple[str, str], Waiting]) -> Iterable[Metric]:
    for name, help_text, read in (
        ("client_spooled_records", "Records in the spools of a run's clients.", attrgetter("spooled_records")),
        ("client_spooled_bytes", "Bytes in the spools of a run's clients.", attrgetter("spooled_bytes")),
        (
            "client_dropped_records",
            "Records that a run's clients lost since they began.",
            attrgetter("dropped_records"),
        ),
    ):
        family = GaugeMetricFamily(f"auditor_{name}", help_text, labels=("run_id", "side"))
        for labels, said in sorted(waiting.items()):
            family.add_metric(labels, read(said))
        yield family


def _counters(counters: Mapping[Counter, float]) -> Iterable[Metric]:
    by_name: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
    for (name, pairs), value in sorted(counters.items()):
        by_name[name].append((dict(pairs), value))
    for name, (labels, help_text) in COUNTERS.items():
        family = CounterMetricFamily(f"auditor_{name}", help_text, labels=labels)
        for given, value in by_name[name]:
            family.add_metric([given[label] for label in labels], value)
        yield family


def _ulp_histogram(counters: Mapping[Counter, float]) -> Metric:
    family = HistogramMetricFamily(
        "auditor_ulp_diff",
        "Distance between the two sides in units of the last place; −0 and +0 are 1 apart.",
        labels=("run_id",),
    )
    buckets: dict[str, dict[str, float]] = defaultdict(dict)
    sums: dict[str, float] = {}
    for (name, pairs), value in counters.items():
        labels = dict(pairs)
        if name == "ulp_diff_bucket":
            buckets[labels["run_id"]][labels["le"]] = value
        elif name == "ulp_diff_sum":
            sums[labels["run_id"]] = value
    for run_id, total in sorted(sums.items()):
        running, cumulative = 0.0, []
        for edge in (*map(str, ULP_EDGES), "+Inf"):
            running += buckets[run_id].get(edge, 0)
            cumulative.append((edge, running))
        family.add_metric([run_id], cumulative, total)
    return family


def _gauges(snapshot: Snapshot) -> Iterable[Metric]:
    step = GaugeMetricFamily("auditor_step", "Last step in which no sample waits for a side.", labels=("run_id",))
    max_abs = GaugeMetricFamily(
        "auditor_max_abs_logprob_diff", "Largest |trainer − rollout| of the last complete step.", labels=("run_id",)
    )
    differing = GaugeMetricFamily(
        "auditor_step_mismatched_tokens",
        "Active tokens of the last complete step whose bits differ between the two sides.",
        labels=("run_id",),
    )
    drift = GaugeMetricFamily(
        "auditor_drift",
        "Statistics of the last complete step; absent where nothing was compared.",
        labels=("run_id", "statistic"),
    )
    for run_id, row in sorted(snapshot.last_complete.items()):
        step.add_metric([run_id], row.step)
        if row.totals.compared_tokens:
            differing.add_metric([run_id], row.totals.mismatched_tokens)
        found = asdict(statistics(row.totals.drift))
        if found["max_abs_diff"] is not None:
            max_abs.add_metric([run_id], found["max_abs_diff"])
        for name, value in found.items():
            if value is not None:
                drift.add_metric([run_id, name], value)
    yield from (step, max_abs, differing, drift)
    newest = {name: step for name, (step, _) in snapshot.sides.items()}
    last = {name: at for name, (_, at) in snapshot.sides.items()}
    by_side: tuple[tuple[str, str, Mapping[tuple[str, str], float]], ...] = (
        ("missing_pairs", "Samples that wait for this side.", snapshot.missing),
        ("overdue_pairs", "Samples that wait for this side although it has reported a later step.", snapshot.overdue),
        ("newest_step", "Highest step that this side reported for.", newest),
        ("last_record_timestamp_seconds", "Unix time of the last record of this side.", last),
    )
    for name, help_text, values in by_side:
        family = GaugeMetricFamily(f"auditor_{name}", help_text, labels=("run_id", "side"))
        for labels, value in sorted(values.items()):
            family.add_metric(labels, value)
        yield family
