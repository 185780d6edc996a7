"""RL job: phases, tokens, reward, and the finding beside them."""

from grafana_foundation_sdk.builders import dashboard

from deploy.grafana.panels import AUDITOR, RAY, Query, board, lines


def build() -> dashboard.Dashboard:
    """The dashboard."""
    page = board("rlk-job", "RL job", "What the job says of itself, through Ray's metrics, with the auditor's finding.")
    for part in (_learning, _speed, _records):
        page = part(page)
    return page


def _each(name: str) -> list[Query]:
    return [
        Query(f"max by (cluster, run_id, numerics) (ray_rl_{name}{{{RAY}}})", "{{numerics}} {{run_id}} {{cluster}}")
    ]


def _learning(page: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        page.with_row(dashboard.Row("Learning"))
        .with_panel(lines("Reward", _each("reward"), "Mean of a step."))
        .with_panel(
            lines(
                "Mismatched tokens",
                [
                    Query(
                        f'sum by (cluster, run_id) (auditor_mismatched_tokens_total{{{AUDITOR}, side="pair"}})'
                        f" or 0 * sum by (cluster, run_id) (auditor_compared_tokens_total{{{AUDITOR}}})"
                    )
                ],
                "Since the run began, by the auditor.",
            )
        )
    )


def _speed(page: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        page.with_row(dashboard.Row("Speed"))
        .with_panel(
            lines(
                "Seconds of a step by phase",
                [
                    Query(
                        f"max by (cluster, run_id, phase) (ray_rl_step_seconds{{{RAY}}})",
                        "{{phase}} {{run_id}} {{cluster}}",
                    )
                ],
                "rollout, score, train, publish.",
                unit="s",
                stacked=True,
            )
        )
        .with_panel(
            lines(
                "Response tokens a second",
                [
                    Query(
                        "sum by (cluster, run_id, numerics)"
                        f" (rate(ray_rl_response_tokens_total{{{RAY}}}[$__rate_interval]))",
                        "{{numerics}} {{run_id}} {{cluster}}",
                    )
                ],
                "Sampled, all phases included.",
                unit="cps",
            )
        )
        .with_panel(lines("Step", _each("step"), "Last finished."))
        .with_panel(
            lines(
                "Weight version",
                _each("weight_version"),
                "That the next step samples from.",
            )
        )
    )


def _records(page: dashboard.Dashboard) -> dashboard.Dashboard:
    query = f"max by (cluster, run_id, side, state) (ray_rl_audit_records{{{RAY}}})"
    return page.with_row(dashboard.Row("Records for the auditor")).with_panel(
        lines(
            "Records by what became of them",
            [Query(query, "{{side}} {{state}} {{run_id}} {{cluster}}")],
            "spooled: wait on disk. dropped: lost, and an alert.",
            span=24,
        )
    )
