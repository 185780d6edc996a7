"""Faults that people really had, put into a real step: each is not comparable, or a mismatch with the side named."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.errors import TrainingError
from services.records import WeightVersion
from tests.models import write_tiny_model
from tests.services.conftest import SAMPLES

pytestmark = pytest.mark.slow


class Engine:
    """An engine that does everything as the one inside, except what a subclass changes."""

    def __init__(self, inside):
        self._inside = inside

    def __getattr__(self, name):
        return getattr(self._inside, name)


def with_samples(batch, change):
    return replace(batch, samples=tuple(change(sample) for sample in batch.samples))


def at_temperature(batch, temperature):
    def change(sample):
        sampling = replace(sample.rollout.sampling, temperature=temperature)
        return replace(sample, rollout=replace(sample.rollout, sampling=sampling))

    return with_samples(batch, change)


def test_an_honest_step_matches_to_the_last_bit_on_both_sides_and_in_the_reference(bench):
    scene = bench.open()
    batch = scene.batch()
    scene.trainer.train(batch)
    found = scene.verdicts()
    assert found.by_verdict == {"match": SAMPLES}
    assert found.compared_tokens == found.recomputed_tokens == batch.response_tokens > 0
    assert (found.mismatched_tokens, found.recomputed_mismatched, found.max_abs) == (0, 0, 0.0)


def test_a_temperature_that_only_the_trainer_states_is_not_comparable(bench):
    scene = bench.open()
    scene.trainer.train(at_temperature(scene.batch(), 1.0))
    found = scene.verdicts()
    assert found.by_verdict == {"not_comparable": SAMPLES}
    assert found.by_condition == {"random_state": SAMPLES}


def test_a_trainer_that_forgets_the_temperature_and_does_not_say_so_is_named(bench):
    class Forgetful(Engine):
        def train(self, batch):
            return self._inside.train(at_temperature(batch, 1.0))

    scene = bench.open(wrap_trainer=Forgetful)
    scene.trainer.train(scene.batch())
    found = scene.verdicts()
    assert found.by_verdict == {"mismatch": SAMPLES}
    assert found.by_side == {"trainer": SAMPLES}


def test_a_rollout_that_forgets_the_temperature_in_its_logprobs_is_named(bench):
    class Forgetful(Engine):
        def generate(self, prompts, sampling):
            drawn = self._inside.generate(prompts, sampling)
            hot = [replace(s, temperature=1.0) for s in sampling]
            return [
                replace(g, logprobs=h.logprobs) for g, h in zip(drawn, self._inside.generate(prompts, hot), strict=True)
            ]

    scene = bench.open(wrap_rollout=Forgetful)
    scene.trainer.train(scene.batch())
    found = scene.verdicts()
    assert found.by_side == {"rollout": found.by_verdict["mismatch"]}
    assert found.by_verdict["mismatch"] > 0


def test_a_mask_shifted_by_one_is_not_comparable(bench):
    """The prompt's last token is counted and the response's last is not: shifted to the left, from one side's view."""

    def shifted(sample):
        whole = (False,) * len(sample.rollout.prompt) + sample.mask
        moved = (*whole[1:], False)
        return replace(sample, mask=moved[len(sample.rollout.prompt) :])

    scene = bench.open()
    batch = scene.batch()
    scene.trainer.train(with_samples(batch, shifted))
    found = scene.verdicts()
    assert found.by_condition == {"inputs": SAMPLES}


def test_a_cut_between_prompt_and_response_that_is_off_by_one_is_not_comparable(bench):
    def shift(sample):
        it = sample.rollout
        moved = replace(it, prompt=it.prompt[:-1], response=it.prompt[-1:] + it.response)
        padded = replace(moved, logprobs=np.concatenate([np.zeros(1, np.float32), it.logprobs]))
        return replace(sample, rollout=padded, mask=(False, *sample.mask))

    scene = bench.open()
    scene.trainer.train(with_samples(scene.batch(), shift))
    found = scene.verdicts()
    assert found.by_condition == {"inputs": SAMPLES}


def test_a_logprob_list_rolled_by_one_is_a_mismatch_of_the_side_that_rolled_it(bench):
    class Rolled(Engine):
        def train(self, batch):
            outcome = self._inside.train(batch)
            return replace(outcome, logprobs=tuple(np.roll(values, 1) for values in outcome.logprobs))

    scene = bench.open(wrap_trainer=Rolled)
    scene.trainer.train(scene.batch())
    found = scene.verdicts()
    assert found.by_side == {"trainer": SAMPLES}


def test_rollout_weights_changed_without_a_version_are_a_mismatch_of_the_rollout(bench, tmp_path):
    scene = bench.open()
    bench.rollout_engine.load(write_tiny_model(tmp_path / "other", seed=9))
    scene.trainer.train(scene.batch())
    found = scene.verdicts()
    assert found.by_verdict == {"mismatch": SAMPLES}
    assert found.by_side == {"rollout": SAMPLES}


def test_trainer_weights_changed_without_a_version_are_a_mismatch_of_the_trainer(bench):
    scene = bench.open()
    name, weight = next((n, p) for n, p in bench.trainer_engine._model.parameters.items() if "layernorm" in n)
    with torch.no_grad():
        weight.mul_(1.5)
    scene.trainer.train(scene.batch())
    found = scene.verdicts()
    assert found.by_side == {"trainer": SAMPLES}, name


def test_other_weights_under_the_same_version_are_not_comparable(bench, tmp_path):
    scene = bench.open()
    scene.rollout.load(WeightVersion(1, bench.first.digest, write_tiny_model(tmp_path / "other", seed=9)))
    scene.trainer.train(scene.batch())
    found = scene.verdicts()
    assert found.by_condition == {"weights": SAMPLES}


def test_a_second_step_without_publishing_is_not_comparable(bench):
    scene = bench.open()
    scene.trainer.train(scene.batch(0))
    scene.trainer.train(scene.batch(1))
    found = scene.verdicts(2 * SAMPLES)
    assert found.by_verdict == {"match": SAMPLES, "not_comparable": SAMPLES}
    assert found.by_condition == {"weights": SAMPLES}


def test_a_rollout_one_version_behind_that_claims_the_new_one_is_named(bench, tmp_path):
    class Sleeper(Engine):
        """Says that it loaded, and keeps what it had."""

        def load(self, folder):
            from rl_kernel.reference.weights import weight_digest

            return weight_digest(folder)

    scene = bench.open()
    scene.trainer.train(scene.batch())
    version = 100 + len(bench.runs)
    new = bench.store.publish(version, lambda f: scene.trainer.export(version, f, bench.store.folder(version)))
    late = bench.open(wrap_rollout=Sleeper)
    late.rollout.load(new)
    late.trainer.load(new)
    late.trainer.train(late.batch())
    found = late.verdicts()
    assert found.by_side == {"rollout": SAMPLES}


def test_a_logprob_that_is_not_a_number_stops_the_step_but_reaches_the_auditor(bench):
    class Broken(Engine):
        def train(self, batch):
            raise TrainingError("the trainer's logprob of token 0 is nan; a loss needs finite ones")

        def score_batch(self, batch):
            return [np.full(len(s.rollout.response), np.nan, np.float32) for s in batch.samples]

    scene = bench.open(wrap_trainer=Broken)
    with pytest.raises(TrainingError, match="is nan"):
        scene.trainer.train(scene.batch())
    found = scene.verdicts()
    assert found.by_verdict == {"mismatch": SAMPLES}
    assert found.by_side == {"trainer": SAMPLES}
    assert found.mismatched_tokens == found.compared_tokens


def test_a_trainer_that_never_reports_leaves_its_samples_pending_never_matched(bench):
    scene = bench.open()
    scene.sample()
    found = scene.verdicts(seconds=3.0)
    assert found.by_verdict == {"pending": SAMPLES}
    assert found.compared_tokens == 0
