"""The job's own numbers as Ray metrics: Ray's agent offers them to Prometheus with the prefix `ray_`.

docs/operations/operate.md lists them; the RL job dashboard and two alerts read them. Set from the driver, after each
step, so they outlive no run: Ray drops a process's series with the process.
"""

from ray.util.metrics import Counter, Gauge

from auditor.client import Counts
from services.loop import StepResult

_TAGS = ("run_id", "numerics")


class JobMetrics:
    """Every metric of a run. Made after Ray is up."""

    def __init__(self, run_id: str, numerics: str) -> None:
        self._run_id = run_id
        tags = {"run_id": run_id, "numerics": numerics}
        self._step = Gauge("rl_step", "Last finished RL step.", _TAGS)
        self._reward = Gauge("rl_reward", "Mean reward of the last step.", _TAGS)
        self._seconds = Gauge("rl_step_seconds", "Seconds of the last step, by phase.", (*_TAGS, "phase"))
        self._tokens = Counter("rl_response_tokens", "Response tokens sampled.", _TAGS)
        self._version = Gauge("rl_weight_version", "Version that the next step samples from.", _TAGS)
        for metric in (self._step, self._reward, self._seconds, self._tokens, self._version):
            metric.set_default_tags(tags)
        self._records = Gauge(
            "rl_audit_records", "Records for the auditor by what became of them.", ("run_id", "side", "state")
        )

    def step(self, result: StepResult) -> None:
        """Take in a finished step."""
        self._step.set(result.step)
        self._reward.set(result.reward)
        self._version.set(result.weights.version)
        if result.response_tokens:
            self._tokens.inc(result.response_tokens)
        for phase, seconds in result.seconds.items():
            self._seconds.set(seconds, {"phase": phase})

    def records(self, side: str, counts: Counts) -> None:
        """Take in what became of one side's records so far."""
        for state in Counts.__slots__:
            self._records.set(getattr(counts, state), {"run_id": self._run_id, "side": side, "state": state})
