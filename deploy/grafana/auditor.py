"""Auditor: whether the referee itself keeps up."""

from grafana_foundation_sdk.builders import dashboard

from deploy.grafana.panels import AUDITOR, Query, board, lines, number

_CLUSTER = 'cluster=~"$Cluster"'
_PROCESS = f'job=~"(.*-)?auditor", {_CLUSTER}'
# Seconds, of each auditor: set since its start; behind or before Prometheus.
_CLOCK_SET = f"max by (cluster, instance) (auditor_clock_jumped_seconds{{{_CLUSTER}}})"
_CLOCK_OFF = (
    f"max by (cluster, instance) (auditor_clock_timestamp_seconds{{{_CLUSTER}}}"
    f" - timestamp(auditor_clock_timestamp_seconds{{{_CLUSTER}}}))"
)
_RATE = "[$__rate_interval]"
_EACH = "{{instance}} {{cluster}}"


def build() -> dashboard.Dashboard:
    """The dashboard."""
    page = board("rlk-auditor", "RL auditor", "Ingest, lag, recompute and storage of the auditor itself.")
    for part in (_state, _ingest, _sides, _clients, _recompute, _recompute_failures, _storage, _process):
        page = part(page)
    return page


def _quantiles(metric: str) -> list[Query]:
    rate = f"sum by (le) (rate({metric}_bucket{{{_CLUSTER}}}{_RATE}))"
    return [Query(f"histogram_quantile({q}, {rate})", f"p{round(q * 100)}") for q in (0.5, 0.99)]


def _state(page: dashboard.Dashboard) -> dashboard.Dashboard:
    version = [Query(f"count by (version) (auditor_build_info{{{_CLUSTER}}})", "{{version}}")]
    lag, ledger = f"max(auditor_recompute_lag_seconds{{{_CLUSTER}}})", f"sum(auditor_ledger_bytes{{{_CLUSTER}}})"
    clock = [Query(f"max(abs({_CLOCK_SET}))", "set"), Query(f"max(abs({_CLOCK_OFF}))", "off")]
    return (
        page.with_row(dashboard.Row("State"))
        .with_panel(number("Auditors up", f"sum(up{{{_PROCESS}}})", "Targets that answer."))
        .with_panel(number("Auditors by version", version, "As each says of itself."))
        .with_panel(number("Runs", f"count(count by (cluster, run_id) (auditor_newest_step{{{AUDITOR}}}))", "Shown."))
        .with_panel(number("Recompute lag", lag, "Longest wait for the reference.", unit="s", bad_from=600))
        .with_panel(number("Ledger", ledger, "Bytes on disk.", unit="bytes"))
        .with_panel(number("Clock off by", clock, "Set since the start, or against Prometheus.", unit="s", bad_from=60))
    )


# A count that appears with its first failure is shown as it is: no rate and no increase would show that one.
def _ingest(page: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        page.with_row(dashboard.Row("Ingest"))
        .with_panel(
            lines(
                "Records by outcome",
                [
                    Query(
                        f"sum by (side, outcome) (rate(auditor_records_total{{{AUDITOR}}}{_RATE}))",
                        "{{side}} {{outcome}}",
                    )
                ],
                "Duplicates are sent again after a lost receipt and change nothing.",
                unit="cps",
                stacked=True,
            )
        )
        .with_panel(
            lines(
                "Tokens compared",
                [Query(f"sum by (cluster, run_id) (rate(auditor_compared_tokens_total{{{AUDITOR}}}{_RATE}))")],
                "Token pairs a second.",
                unit="cps",
            )
        )
        .with_panel(lines("Receipt latency", _quantiles("auditor_receipt_seconds"), "Arrival to durable.", unit="s"))
        .with_panel(
            lines(
                "Batches before the ledger",
                [Query(f"sum(auditor_write_queue_batches{{{_CLUSTER}}})", "batches")],
                "Where this stays up, the disk is the limit.",
            )
        )
        .with_panel(
            lines(
                "Refused records by reason",
                [Query(f"sum by (code) (auditor_refusals_total{{{_CLUSTER}}})", "{{code}}")],
                "Since the ledger began. docs/audit-protocol.md explains each code.",
                stacked=True,
            )
        )
        .with_panel(
            lines(
                "Failed calls and requests",
                [Query(f"sum by (part, code) (auditor_errors_total{{{_CLUSTER}}})", "{{part}} {{code}}")],
                "Since the start. grpc: whole batches, http: reads, judge: samples without a verdict, retention,"
                " upkeep: work in the background.",
                stacked=True,
            )
        )
    )


def _by_side(what: str, note: str = "") -> Query:
    return Query(f"sum by (cluster, run_id, side) ({what})", f"{{{{side}}}} {{{{run_id}}}} {{{{cluster}}}}{note}")


def _clients(page: dashboard.Dashboard) -> dashboard.Dashboard:
    return page.with_panel(
        lines(
            "Records with the clients",
            [
                _by_side(f"auditor_client_spooled_records{{{AUDITOR}}}", ", on disk"),
                _by_side(f"auditor_client_dropped_records{{{AUDITOR}}}", ", lost"),
            ],
            "As they say themselves, on Ray or not. On disk for five minutes is an alert, lost is one at once.",
        )
    ).with_panel(
        lines(
            "Bytes with the clients",
            [_by_side(f"auditor_client_spooled_bytes{{{AUDITOR}}}")],
            "In their spools; each has a bound (spool_limit_bytes), beyond which records are lost.",
            unit="bytes",
        )
    )


def _sides(page: dashboard.Dashboard) -> dashboard.Dashboard:
    silent = f"time() - max by (cluster, run_id, side) (auditor_last_record_timestamp_seconds{{{AUDITOR}}})"
    waiting = [
        _by_side(f"auditor_missing_pairs{{{AUDITOR}}}"),
        _by_side(f"auditor_overdue_pairs{{{AUDITOR}}}", ", overdue"),
    ]
    given_up = [
        _by_side(f"auditor_unpaired_samples_total{{{AUDITOR}}}"),
        _by_side(f"auditor_late_samples_total{{{AUDITOR}}}", ", came after all"),
    ]
    return (
        page.with_row(dashboard.Row("The two sides"))
        .with_panel(
            lines(
                "Seconds since a side reported",
                [Query(silent, "{{side}} {{run_id}} {{cluster}}")],
                "Two lines that part are a side that has gone silent.",
                unit="s",
            )
        )
        .with_panel(
            lines(
                "Newest step of a side",
                [_by_side(f"auditor_newest_step{{{AUDITOR}}}")],
                "Three steps apart for ten minutes are an alert.",
            )
        )
        .with_panel(
            lines(
                "Samples that wait for a side",
                waiting,
                "Overdue: the side has reported later steps already.",
            )
        )
        .with_panel(
            lines(
                "Samples given up",
                given_up,
                "Whose side had not come within pair_wait_s, since the run began.",
            )
        )
    )


def _recompute(page: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        page.with_row(dashboard.Row("Recompute"))
        .with_panel(
            lines(
                "Samples that wait for the reference",
                [
                    Query(f"sum(auditor_recompute_queue_samples{{{_CLUSTER}}})", "for a verdict"),
                    Query(f"sum(auditor_search_queue_samples{{{_CLUSTER}}})", "for a search for causes"),
                ],
                "Mismatches go first; causes are searched for after the verdict, beside it.",
            )
        )
        .with_panel(
            lines(
                "Longest wait",
                [
                    Query(f"max(auditor_recompute_lag_seconds{{{_CLUSTER}}})", "for a verdict"),
                    Query(f"max(auditor_search_lag_seconds{{{_CLUSTER}}})", "for a search for causes"),
                ],
                "Of the samples that wait now; ten minutes are an alert.",
                unit="s",
            )
        )
        .with_panel(
            lines(
                "Tokens recomputed",
                [
                    Query(
                        f"sum by (cluster, run_id, mma) (rate(auditor_recomputed_tokens_total{{{AUDITOR}}}{_RATE}))",
                        "{{mma}} {{run_id}} {{cluster}}",
                    )
                ],
                "By the arithmetic that was followed.",
                unit="cps",
            )
        )
        .with_panel(lines("Seconds a sample", _quantiles("auditor_recompute_seconds"), "By the reference.", unit="s"))
        .with_panel(
            lines("Seconds a search", _quantiles("auditor_search_seconds"), "For one mismatch's causes.", unit="s")
        )
    )


def _recompute_failures(page: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        page.with_panel(
            lines(
                "Samples that could not be recomputed",
                [
                    Query(
                        f"sum by (cluster, run_id, code) (auditor_recompute_errors_total{{{AUDITOR}}})",
                        "{{code}} {{run_id}} {{cluster}}",
                    )
                ],
                "Weights gone, sampling without a reference, … Since the run began.",
                stacked=True,
            )
        )
        .with_panel(
            lines(
                "Samples without room to wait for the reference",
                [
                    Query(
                        f"sum by (cluster, run_id, chosen) (auditor_recompute_skipped_samples_total{{{AUDITOR}}})",
                        "{{chosen}} {{run_id}} {{cluster}}",
                    )
                ],
                "Passed over, since the run began: mismatch, or sampled by the policy.",
            )
        )
        .with_panel(
            lines(
                "Workers replaced",
                [
                    Query(
                        f"sum by (cluster, instance, reason) (auditor_recompute_worker_ends_total{{{_CLUSTER}}})",
                        f"{{{{reason}}}} {_EACH}",
                    )
                ],
                "Died or were killed over a sample, since the auditor's start.",
            )
        )
    )


def _storage(page: dashboard.Dashboard) -> dashboard.Dashboard:
    ledger = f"sum by (cluster, instance) (auditor_ledger_bytes{{{_CLUSTER}}})"
    retired = f"sum by (cluster, instance) (rate(auditor_retired_records_total{{{_CLUSTER}}}{_RATE}))"
    left = f"sum by (cluster, instance, reason) (auditor_left_runs_total{{{_CLUSTER}}})"
    size, dropped = "docs/operations/sizing.md says what to expect a token.", "Content dropped by age, archived first."
    written = [
        Query(
            f"sum by (cluster, instance) (rate(auditor_evidence_{what}_total{{{_CLUSTER}}}{_RATE}))", f"{what} {_EACH}"
        )
        for what in ("rows", "samples")
    ]
    gone = "Silent for shown_idle_s, or crowded out by shown_runs others, since the start."
    return (
        page.with_row(dashboard.Row("Storage"))
        .with_panel(lines("Ledger by auditor", [Query(ledger, _EACH)], size, unit="bytes", span=8))
        .with_panel(lines("Records retired", [Query(retired, _EACH)], dropped, unit="cps", span=8))
        .with_panel(lines("Token rows written", written, "For evidence_place.", unit="cps", span=8))
        .with_panel(lines("Runs that left /metrics", [Query(left, f"{{{{reason}}}} {_EACH}")], gone, span=8))
    )


def _process(page: dashboard.Dashboard) -> dashboard.Dashboard:
    cpu = f"sum by (cluster, instance) (rate(process_cpu_seconds_total{{{_PROCESS}}}{_RATE}))"
    memory = f"sum by (cluster, instance) (process_resident_memory_bytes{{{_PROCESS}}})"
    files = f"max by (cluster, instance) (process_open_fds{{{_PROCESS}}} / process_max_fds{{{_PROCESS}}})"
    clock = [Query(_CLOCK_SET, f"set {_EACH}"), Query(_CLOCK_OFF, f"off {_EACH}")]
    return (
        page.with_row(dashboard.Row("The process, without recompute workers"))
        .with_panel(lines("Cores in use", [Query(cpu, _EACH)], "Of the auditor itself.", span=6))
        .with_panel(lines("Memory", [Query(memory, _EACH)], "Resident.", unit="bytes", span=6))
        .with_panel(lines("Open files", [Query(files, _EACH)], "Share of its limit.", unit="percentunit", span=6))
        .with_panel(lines("Clock", clock, "Seconds set since the start; off against Prometheus.", unit="s", span=6))
    )
