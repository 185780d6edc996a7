"""RL job: phases, tokens, reward, and the finding beside them."""

from grafana_foundation_sdk.builders import dashboard

from deploy.grafana.panels import AUDITOR, RAY, Query, board, lines


def build() -> dashboard.Dashboard:
    """The dashboard."""
    each = "max by (run_id, numerics) (ray_rl_{}{{{}}})"
    return (
        board("rlk-job", "RL job", "What the job says of itself, through Ray's metrics, with the auditor's finding.")
        .with_row(dashboard.Row("Learning"))
        .with_panel(lines("Reward", [Query(each.format("reward", RAY), "{{numerics}} {{run_id}}")], "Mean of a step."))
        .with_panel(
            lines(
                "Mismatched tokens",
                [
                    Query(
                        f'sum by (run_id) (auditor_mismatched_tokens_total{{{AUDITOR}, side="pair"}})'
                        f" or 0 * sum by (run_id) (auditor_compared_tokens_total{{{AUDITOR}}})"
                    )
                ],
                "Since the run began, by the auditor.",
            )
        )
        .with_row(dashboard.Row("Speed"))
        .with_panel(
            lines(
                "Seconds of a step by phase",
                [Query(f"max by (run_id, phase) (ray_rl_step_seconds{{{RAY}}})", "{{phase}} {{run_id}}")],
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
                        f"sum by (run_id, numerics) (rate(ray_rl_response_tokens_total{{{RAY}}}[$__rate_interval]))",
                        "{{numerics}} {{run_id}}",
                    )
                ],
                "Sampled, all phases included.",
                unit="cps",
            )
        )
        .with_panel(lines("Step", [Query(each.format("step", RAY), "{{numerics}} {{run_id}}")], "Last finished."))
        .with_panel(
            lines(
                "Weight version",
                [Query(each.format("weight_version", RAY), "{{numerics}} {{run_id}}")],
                "That the next step samples from.",
            )
        )
        .with_row(dashboard.Row("Records for the auditor"))
        .with_panel(
            lines(
                "Records by what became of them",
                [
                    Query(
                        f"max by (run_id, side, state) (ray_rl_audit_records{{{RAY}}})", "{{side}} {{state}} {{run_id}}"
                    )
                ],
                "spooled: wait on disk. dropped: lost, and an alert.",
                span=24,
            )
        )
    )
