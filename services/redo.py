"""What may change when a run is resumed: nothing that a record depends on, if a step is done again.

A run that ended a step past its checkpoint does that step again, under the same names. The auditor keeps the first
record of a sample and refuses another one, and a published version of weights is never rewritten, so the step must come
out as it was. From a checkpoint past which nothing was begun, the same keys may change.
"""

from collections.abc import Iterator
from typing import Any

from rl_kernel.contracts import model_contract
from rl_kernel.environment import read_environment
from services.config import Config
from services.errors import ConfigError
from services.stored import Stored

_IN_RECORDS: dict[str, Any] = {
    "rollout": True,
    "trainer": True,
    "numerics": {"threads"},
    "auditor": {"layer_digests"},
}
# By contract these change no bit, and no record states them.
_FREE_IN_STRICT = {
    *("rollout.max_model_len", "rollout.max_num_seqs", "rollout.kv_cache_mb", "rollout.prefix_caching"),
    "numerics.threads",
}
# What steps had that an earlier version of this program began.
_BEFORE_THERE_WAS = {"auditor.layer_digests": False}
_FREE_IN_FMA32 = {"trainer.micro_batch_tokens"}  # other MMA models add tokens in groups, which a cut may split


class UnderWay(Stored):
    """A step that was begun, and what its records and the weights after it depend on, as JSON has it.

    settings: key → value. environment: package → version, and `arch`; empty where the engines run on another machine.
    """

    step: int
    settings: dict[str, Any]
    environment: dict[str, str]

    @classmethod
    def now(cls, step: int, config: Config, *, local: bool) -> "UnderWay":
        """Of this config in this process. local: the engines run on this machine, on what is installed here."""
        environment = read_environment("")
        found = {"arch": environment.arch, **dict(environment.versions)} if local else {}
        return cls(step=step, settings=dict(_settings(config)), environment=found)


def check_redone(was: UnderWay | None, now: UnderWay, next_step: int) -> None:
    """Raise ConfigError if a step from `next_step` on was begun otherwise than `now`; it names the first difference."""
    if was is None or was.step < next_step:
        return
    steps = f"step {was.step} was" if was.step == next_step else f"steps {next_step} to {was.step} were"
    pairs = [(key, was.settings.get(key, _BEFORE_THERE_WAS.get(key)), value) for key, value in now.settings.items()]
    if was.environment and now.environment:
        names = sorted(was.environment.keys() | now.environment.keys())
        pairs += [(name, was.environment.get(name), now.environment.get(name)) for name in names]
    for key, before, after in pairs:
        if before != after:
            raise ConfigError(
                f"{key} = {after!r}: {steps} begun with {before!r} and must be done again to the same bits; leave it "
                f"so, or resume with it and run.steps={was.step + 1}, and change it from the checkpoint at that end"
            )


def _settings(config: Config) -> Iterator[tuple[str, Any]]:
    free: set[str] = set()
    if config.numerics.mode == "strict":
        fma32 = model_contract(config.numerics.profile, segments=config.numerics.segments).profile.mma == "fma32"
        free = _FREE_IN_STRICT | (_FREE_IN_FMA32 if fma32 else set())
    tree = config.model_dump(mode="json", include=_IN_RECORDS)
    for section, values in tree.items():
        for name, value in values.items():
            if f"{section}.{name}" not in free:
                yield f"{section}.{name}", value
