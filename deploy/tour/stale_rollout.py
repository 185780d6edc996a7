"""The fault of the tour: a rollout engine that, from one version on, keeps its weights and says that it took the new.

    python -m deploy.tour.stale_rollout --from-version 4 -- --config FILE …

Everything else is the job as it is, `services.main`. A sync that fails without a word is the commonest fault of all:
both sides then report the same version and digest, and only the numbers tell.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rl_kernel.reference.weights import weight_digest
from services.config import Config
from services.engines import EngineFacts, Generated, RolloutEngine
from services.records import Sampling


class StaleEngine:
    """A rollout engine that loads nothing from version `first` on."""

    def __init__(self, engine: RolloutEngine, first: int) -> None:
        self._engine = engine
        self._first = first

    def facts(self) -> EngineFacts:
        """As the engine."""
        return self._engine.facts()

    def load(self, folder: Path) -> str:
        """Take the weights, or only claim so: the digest is that of the files, not of what is held."""
        if int(folder.name.removeprefix("v")) < self._first:
            return self._engine.load(folder)
        return weight_digest(folder)

    def generate(self, prompts: Sequence[tuple[int, ...]], sampling: Sequence[Sampling]) -> list[Generated]:
        """As the engine, with the weights that it holds."""
        return self._engine.generate(prompts, sampling)


def make_stale_rollout(first: int, config: Config, model: Path) -> StaleEngine:
    """Build the real engine in the actor's process, and put the fault around it."""
    from services.job import make_rollout  # noqa: PLC0415  it imports Ray

    return StaleEngine(make_rollout(config, model), first)


def main(arguments: Sequence[str]) -> int:
    """Run the job with the fault; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from-version", type=int, required=True, help="first weight version that is not loaded")
    parser.add_argument("job", nargs=argparse.REMAINDER, help="-- and arguments of services.main")
    options = parser.parse_args(arguments)
    # Ray reads this when it is imported, as `services.main` says.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    from services import job  # noqa: PLC0415
    from services import main as services_main  # noqa: PLC0415

    job.make_rollout = partial(make_stale_rollout, options.from_version)
    return services_main.main(options.job[1:] if options.job[:1] == ["--"] else options.job)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
