"""`python -m tests.services.cheating ARGUMENTS`: the job with a rollout engine whose last logprob is one ULP off."""

import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from services import job
from services.config import Config
from services.main import main
from services.rollout import engine


class Cheating(engine.RolloutEngine):
    """Proves itself honestly and reports something else afterwards."""

    def generate(self, prompts, sampling):
        found = super().generate(prompts, sampling)
        if not self._per_pass:  # not proven yet
            return found
        return [
            replace(g, logprobs=np.append(g.logprobs[:-1], np.nextafter(g.logprobs[-1], np.float32(-9)))) for g in found
        ]


def make_cheating_rollout(config: Config, model: Path) -> Cheating:
    return Cheating(model, engine.EngineOptions.of(config))


if __name__ == "__main__":
    from tests.services import cheating

    job.make_rollout = cheating.make_cheating_rollout
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
