"""The loop on real engines in one process: fifty steps without a differing bit, and weights that engines confirm."""

import numpy as np
import pytest

from services.errors import PublishError
from services.loop import Parts, run_steps
from services.trainer.actor import TrainerActor
from tests.services.conftest import SAMPLES

pytestmark = pytest.mark.slow

STEPS = 50


class LocalTrainer:
    """What `services.cluster.TrainerHandle` is to the loop, without Ray."""

    def __init__(self, actor: TrainerActor) -> None:
        self.train = actor.train
        self._actor = actor

    def publish(self, store, version):
        return store.publish(version, lambda scratch: self._actor.export(version, scratch, store.folder(version)))


def _run(bench, scene, first, steps, rollout=None):
    """Steps from version `first` on, in the store that the bench's auditor looks into."""
    config = bench.config.model_copy(update={"run": bench.config.run.model_copy(update={"steps": steps})})
    parts = Parts(bench.task, rollout or scene.rollout, LocalTrainer(scene.trainer), bench.store)
    weights = bench.store.import_model(first, bench.model)
    scene.rollout.load(weights)
    scene.trainer.load(weights)
    return list(run_steps(config, parts, 0, weights))


def test_fifty_steps_pass_without_one_differing_bit_and_the_weights_move(bench):
    scene = bench.open()
    results = _run(bench, scene, 1000, STEPS)
    samples = STEPS * SAMPLES
    found = scene.verdicts(samples, seconds=300)
    assert found.by_verdict == {"match": samples}
    assert found.compared_tokens == found.recomputed_tokens == sum(r.response_tokens for r in results)
    assert (found.mismatched_tokens, found.recomputed_mismatched, found.max_abs) == (0, 0, 0.0)
    assert len({r.weights.digest for r in results}) == STEPS
    assert [r.weights.version for r in results] == list(range(1001, 1001 + STEPS))
    assert all(np.isfinite(r.outcome.grad_norm) for r in results)


def test_a_step_gives_the_same_bits_whenever_it_is_done(bench):
    once, again = _run(bench, bench.open(), 2000, 2), _run(bench, bench.open(), 3000, 2)
    assert [r.weights.digest for r in once] == [r.weights.digest for r in again]
    for one, other in zip(once, again, strict=True):
        for left, right in zip(one.outcome.logprobs, other.outcome.logprobs, strict=True):
            np.testing.assert_array_equal(left.view(np.uint32), right.view(np.uint32))


def test_an_engine_that_keeps_its_old_weights_stops_the_run(bench):
    class Deaf:
        """Loads nothing, and says honestly what it holds."""

        def __init__(self, inside):
            self.generate = inside.generate

        def load(self, weights):
            return bench.first.digest

    scene = bench.open()
    with pytest.raises(PublishError, match=f"the rollout engine holds weights {bench.first.digest} after loading"):
        _run(bench, scene, 4000, 1, rollout=Deaf(scene.rollout))
