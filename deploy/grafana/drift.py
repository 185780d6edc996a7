"""Drift: whether the two sides compute the same numbers, and by how much they do not."""

from grafana_foundation_sdk.builders import dashboard

from deploy.grafana.panels import AUDITOR, Query, board, by_step, distribution, lines, number

_JUDGED = f'sum by (cluster, run_id) (auditor_records_total{{{AUDITOR}, side="trainer", outcome="accepted"}})'
_SHARE = (
    f"sum by (cluster, run_id) (auditor_recomputed_tokens_total{{{AUDITOR}}})"
    f" / sum by (cluster, run_id) (auditor_compared_tokens_total{{{AUDITOR}}})"
)
_RATE = "[$__rate_interval]"
_SKIPPED = "Steps faster than a scrape are skipped here; the auditor's page and API have them all."


def _by(label: str, metric: str) -> str:
    return f"sum by (cluster, run_id, {label}) (increase({metric}{{{AUDITOR}}}{_RATE}))"


def _drift(name: str) -> Query:
    return Query(
        f'max by (cluster, run_id) (auditor_drift{{{AUDITOR}, statistic="{name}"}})',
        f"{name} {{{{run_id}}}} {{{{cluster}}}}",
    )


def build() -> dashboard.Dashboard:
    """The dashboard."""
    page = board(
        "rlk-drift",
        "RL drift",
        "Rollout against trainer, bit by bit, and both against the reference. Choose a strict and a native run to"
        " overlay them. An empty panel means that nothing was compared: it is not a zero.",
    )
    for part in (_verdict, _curves, _breakdown, _breakdown_of_values, _dialects, _coverage):
        page = part(page)
    return page


def _verdict(page: dashboard.Dashboard) -> dashboard.Dashboard:
    total = f"sum(auditor_{{}}_total{{{{{AUDITOR}}}}})"
    return (
        page.with_row(dashboard.Row("Verdict"))
        .with_panel(number("Tokens compared", total.format("compared_tokens"), "Every pair is compared."))
        .with_panel(
            number(
                "Tokens mismatched",
                f'(sum(auditor_mismatched_tokens_total{{{AUDITOR}, side="pair"}}) or vector(0))'
                f" and on () sum(auditor_compared_tokens_total{{{AUDITOR}}}) > 0",
                "Whose bits differ between rollout and trainer. No number: nothing was compared.",
                bad_from=1,
            )
        )
        .with_panel(
            number(
                "Tokens off the reference",
                [
                    Query(
                        f'(sum(auditor_mismatched_tokens_total{{{AUDITOR}, side="{side}"}}) or vector(0))'
                        f" and on () sum(auditor_recomputed_tokens_total{{{AUDITOR}}}) > 0",
                        side,
                    )
                    for side in ("rollout", "trainer")
                ],
                "On which the rollout, and on which the trainer differs from it. No number: nothing was recomputed.",
                bad_from=1,
            )
        )
        .with_panel(
            number(
                "Samples not comparable",
                f"({total.format('not_comparable_samples')} or vector(0)) and on () {total.format('records')} > 0",
                "A precondition failed: neither match nor mismatch.",
                bad_from=1,
            )
        )
        .with_panel(number("Tokens recomputed", total.format("recomputed_tokens"), "By the reference."))
        .with_panel(number("Last complete step", f"max(auditor_step{{{AUDITOR}}})", "No sample waits for a side."))
    )


def _curves(page: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        page.with_row(dashboard.Row("Strict and native, overlaid"))
        .with_panel(
            by_step(
                "Mismatched tokens by step",
                f"max by (cluster, run_id) (auditor_step_mismatched_tokens{{{AUDITOR}}})",
                f"Of each step. A strict run lies on zero. {_SKIPPED}",
            )
        )
        .with_panel(
            by_step(
                "Largest |Δ log-probability| by step",
                f"max by (cluster, run_id) (auditor_max_abs_logprob_diff{{{AUDITOR}}})",
                f"Of each step; none where nothing was compared. {_SKIPPED}",
                log=True,
            )
        )
        .with_row(dashboard.Row("Over time"))
        .with_panel(
            lines(
                "Mismatched tokens",
                [
                    Query(
                        "sum by (cluster, run_id)"
                        f' (increase(auditor_mismatched_tokens_total{{{AUDITOR}, side="pair"}}{_RATE}))'
                        f" or 0 * sum by (cluster, run_id) (auditor_compared_tokens_total{{{AUDITOR}}})"
                    )
                ],
                "Gained in each interval. A strict run lies on zero.",
            )
        )
        .with_panel(
            lines(
                "Largest |Δ log-probability| of a step",
                [Query(f"max by (cluster, run_id) (auditor_max_abs_logprob_diff{{{AUDITOR}}})")],
                "Of the last complete step; a gap where nothing was compared.",
                log=True,
            )
        )
    )


def _breakdown(page: dashboard.Dashboard) -> dashboard.Dashboard:
    samples = "Samples gained in each interval."
    return (
        page.with_row(dashboard.Row("Which side, and why"))
        .with_panel(
            lines(
                "Mismatched tokens by side",
                [
                    Query(_by("side", "auditor_mismatched_tokens_total"), "{{side}} {{run_id}} {{cluster}}"),
                ],
                "pair: between the two. rollout, trainer: against the reference.",
                span=8,
                stacked=True,
            )
        )
        .with_panel(
            lines(
                "Mismatched samples by cause",
                # Not its increase: a cause is first seen with its first samples, and those would be missing.
                [
                    Query(
                        f"sum by (cluster, run_id, cause) (auditor_mismatched_samples_total{{{AUDITOR}}})",
                        "{{cause}} {{run_id}} {{cluster}}",
                    )
                ],
                "Samples since the run began.",
                span=8,
                stacked=True,
            )
        )
        .with_panel(
            lines(
                "Not comparable by condition",
                [
                    Query(
                        _by("condition", "auditor_not_comparable_samples_total"), "{{condition}} {{run_id}} {{cluster}}"
                    )
                ],
                samples,
                span=8,
                stacked=True,
            )
        )
    )


def _breakdown_of_values(page: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        page.with_panel(
            distribution(
                "ULP between the sides",
                f"sum by (le) (increase(auditor_ulp_diff_bucket{{{AUDITOR}}}{_RATE}))",
                "Units in the last place; all weight in the lowest bucket is equal bits.",
                span=8,
            )
        )
        .with_panel(
            lines(
                "NaN and infinite log-probabilities",
                [Query(_by("side", "auditor_nonfinite_logprobs_total"), "{{side}} {{run_id}} {{cluster}}")],
                "Counted apart; they enter no mean.",
                span=8,
                stacked=True,
            )
        )
        .with_panel(
            lines(
                "Tokens explained by arithmetic",
                [Query(f"sum by (cluster, run_id) (auditor_other_arithmetic_tokens_total{{{AUDITOR}}})")],
                "Two MMA models, and each side keeps its own: no mismatch. Since the run began.",
                span=8,
            )
        )
    )


def _dialects(page: dashboard.Dashboard) -> dashboard.Dashboard:
    groups = (
        (
            "KL estimators",
            ("k1", "k3"),
            "verl kl, OpenRLHF vllm_kl = k1; prime-rl mismatch_kl = k3. Alerts: 0.1, 0.015.",
        ),
        ("Effective sample size", ("ess_ratio",), "slime, verl. Alert below 0.3."),
        ("Importance ratio", ("ratio_mean", "ratio_max", "ratio_min"), "Trainer over rollout."),
        ("Mean and largest |Δ|", ("mean_abs_diff", "max_abs_diff"), "slime, TRL, SkyRL. slime's CI fails above 0.1."),
        ("Probability difference", ("prob_diff_mean", "prob_diff_max"), "verl rollout_probs_diff."),
        ("Chi-square", ("chi2_token", "chi2_seq"), "verl rollout_corr. Alert above 1."),
        (
            "Multiplicative error, perplexity ratio",
            ("token_mult_prob_error", "ppl_ratio"),
            "NeMo-RL. Alert above 1.05.",
        ),
        ("Pearson correlation", ("pearson",), "verl. Hides a constant factor: read it last."),
        ("Share outside the clip band", ("outside_clip_share",), "Ratio below 0.8 or above 1.2."),
    )
    page = page.with_row(dashboard.Row("In the words of other frameworks (last complete step)"))
    for title, names, description in groups:
        page = page.with_panel(lines(title, [_drift(name) for name in names], description, span=8))
    return page


def _coverage(page: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        page.with_row(dashboard.Row("Coverage and detection power"))
        .with_panel(lines("Share of tokens recomputed", [Query(_SHARE)], "Of the compared ones.", unit="percentunit"))
        .with_panel(
            lines(
                "Chance to miss a fault that both sides share",
                [
                    Query(
                        f"(1 - {share}) ^ (({_SHARE}) * ({_JUDGED}))", f"touching {name} {{{{run_id}}}} {{{{cluster}}}}"
                    )
                    for share, name in ((0.001, "1 in 1000"), (0.01, "1 in 100"), (0.1, "1 in 10"))
                ],
                "(1 − f)ⁿ for n recomputed samples and a fault that touches a share f of them. Faults of one side"
                " alone are never missed: every pair is compared.",
                unit="percentunit",
            )
        )
    )
