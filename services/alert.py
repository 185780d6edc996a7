"""The alert that a mismatch raises, for a run without a Prometheus: what deploy/prometheus/rules.yml says of it."""

import re

NAME = "MismatchedTokens"
SEVERITY = "critical"
_SUMMARY = "Run {run_id}: {value} log-probabilities differ in their bits"
_COUNTER = "auditor_mismatched_tokens_total"


def mismatch_alert(metrics: str, run_id: str) -> str | None:
    """What the rule says of these metrics (the auditor's /metrics), or None where it is silent."""
    series = re.compile(rf'^{_COUNTER}{{[^}}]*run_id="{re.escape(run_id)}"[^}}]*}} (\S+)$', re.MULTILINE)
    # As in the rule: a token that differs between the sides is counted again where it differs from the reference.
    value = max((float(number) for number in series.findall(metrics)), default=0.0)
    if not value:
        return None
    return f"alert {NAME} ({SEVERITY}): {_SUMMARY.format(run_id=run_id, value=f'{value:g}')}"
