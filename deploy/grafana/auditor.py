"""Auditor: whether the referee itself keeps up."""

from grafana_foundation_sdk.builders import dashboard

from deploy.grafana.panels import AUDITOR, Query, board, lines, number

_CLUSTER = 'cluster=~"$Cluster"'
_RATE = "[$__rate_interval]"


def build() -> dashboard.Dashboard:
    """The dashboard."""
    page = board("rlk-auditor", "RL auditor", "Ingest, lag, recompute and storage of the auditor itself.")
    for part in (_state, _ingest, _sides, _recompute, _storage):
        page = part(page)
    return page


def _quantiles(metric: str) -> list[Query]:
    rate = f"sum by (le) (rate({metric}_bucket{{{_CLUSTER}}}{_RATE}))"
    return [Query(f"histogram_quantile({q}, {rate})", f"p{round(q * 100)}") for q in (0.5, 0.99)]


def _state(page: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        page.with_row(dashboard.Row("State"))
        .with_panel(
            number("Auditors up", f'sum(up{{job=~"(.*-)?auditor", {_CLUSTER}}})', "Targets that answer.", span=6)
        )
        .with_panel(
            number("Runs", f"count(count by (cluster, run_id) (auditor_step{{{AUDITOR}}}))", "With gauges.", span=6)
        )
        .with_panel(
            number(
                "Recompute lag",
                f"max(auditor_recompute_lag_seconds{{{_CLUSTER}}})",
                "Longest wait for the reference.",
                unit="s",
                bad_from=600,
                span=6,
            )
        )
        .with_panel(
            number("Ledger", f"sum(auditor_ledger_bytes{{{_CLUSTER}}})", "Bytes on disk.", unit="bytes", span=6)
        )
    )


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
                [Query(f"sum by (code) (rate(auditor_refusals_total{{{_CLUSTER}}}{_RATE}))", "{{code}}")],
                "docs/audit-protocol.md explains each code.",
                unit="cps",
                stacked=True,
            )
        )
        .with_panel(
            lines(
                "Failed calls and requests",
                [Query(f"sum by (part, code) (rate(auditor_errors_total{{{_CLUSTER}}}{_RATE}))", "{{part}} {{code}}")],
                "grpc: whole batches, http: reads, retention: evidence that could not be written away.",
                unit="cps",
                stacked=True,
            )
        )
    )


def _sides(page: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        page.with_row(dashboard.Row("The two sides"))
        .with_panel(
            lines(
                "Seconds since a side reported",
                [
                    Query(
                        f"time() - max by (cluster, run_id, side) (auditor_last_record_timestamp_seconds{{{AUDITOR}}})",
                        "{{side}} {{run_id}} {{cluster}}",
                    )
                ],
                "Two lines that part are a side that has gone silent.",
                unit="s",
            )
        )
        .with_panel(
            lines(
                "Samples that wait for a side",
                [
                    Query(
                        f"sum by (cluster, run_id, side) (auditor_missing_pairs{{{AUDITOR}}})",
                        "{{side}} {{run_id}} {{cluster}}",
                    ),
                    Query(
                        f"sum by (cluster, run_id, side) (auditor_overdue_pairs{{{AUDITOR}}})",
                        "{{side}} {{run_id}} {{cluster}}, overdue",
                    ),
                ],
                "Overdue: the side has reported later steps already.",
            )
        )
    )


def _recompute(page: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        page.with_row(dashboard.Row("Recompute"))
        .with_panel(
            lines(
                "Samples that wait for the reference",
                [Query(f"sum(auditor_recompute_queue_samples{{{_CLUSTER}}})", "samples")],
                "Mismatches go first.",
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
            lines(
                "Samples that could not be recomputed",
                [
                    Query(
                        "sum by (cluster, run_id, code)"
                        f" (increase(auditor_recompute_errors_total{{{AUDITOR}}}{_RATE}))",
                        "{{code}} {{run_id}} {{cluster}}",
                    )
                ],
                "Weights gone, sampling without a reference, …",
                stacked=True,
            )
        )
    )


def _storage(page: dashboard.Dashboard) -> dashboard.Dashboard:
    return page.with_row(dashboard.Row("Storage")).with_panel(
        lines(
            "Ledger by auditor",
            [Query(f"sum by (instance) (auditor_ledger_bytes{{{_CLUSTER}}})", "{{instance}}")],
            "docs/operations/sizing.md says what to expect a token.",
            unit="bytes",
            span=24,
        )
    )
