"""The trainer engine on tiny models: what it returns, that it learns, resumes to the same bits, and what it refuses."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from auditor.facts import layer_digests
from rl_kernel.contracts import model_contract
from rl_kernel.errors import EvidenceError, ModelError
from rl_kernel.integrations.megatron.packing import Tokens
from rl_kernel.integrations.megatron.parallel import leave_tensor_parallel
from rl_kernel.ops.rope import cpu as rope
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.weights import weight_digest
from services.config import build_config
from services.errors import CheckpointError, TrainingError
from services.trainer.checkpoint import Progress
from services.trainer.engine import TrainerEngine, TrainerOptions
from services.trainer.optimizer import Schedule
from tests.models import LLAMA, QWEN3_TIED, write_tiny_model
from tests.services.training import OPTIONS, batch, with_rollout_logprobs


@pytest.fixture(scope="module", autouse=True)
def leave_the_process_as_it_was():
    yield
    leave_tensor_parallel()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), QWEN3_TIED, seed=3)


@pytest.fixture
def engine(folder):
    return TrainerEngine(folder, OPTIONS)


def digest(engine, tmp_path, name="weights"):
    (tmp_path / name).mkdir()
    return engine.export(tmp_path / name)


def bits(arrays):
    return np.concatenate(arrays).view(np.uint32)


def scored(engine, of):
    return engine.score([Tokens(s.rollout.prompt, s.rollout.response) for s in of.samples], 0.8)


def test_the_first_forwards_logprobs_have_the_reference_decoders_bits(engine, folder):
    of = batch()
    found = engine.train(of).logprobs
    law = Decoder.open(folder, model_contract(segments=2)).logprobs(
        [np.array(s.rollout.prompt + s.rollout.response) for s in of.samples],
        [len(s.rollout.prompt) for s in of.samples],
        0.8,
    )
    assert [len(a) for a in found] == [len(s.rollout.response) for s in of.samples]
    assert np.array_equal(bits(found), bits(law))


@pytest.mark.parametrize("numerics", ["strict", "native"])
def test_the_digests_of_layers_are_the_reference_decoders_where_the_numbers_are(folder, numerics):
    of = batch()
    options = replace(OPTIONS, numerics=numerics, layer_digests=True, updates_per_step=2)
    outcome = TrainerEngine(folder, options).train(of)
    decoder = Decoder.open(folder, model_contract(segments=2))
    law = []
    for s in of.samples:
        rows = []
        tokens = np.array(s.rollout.prompt + s.rollout.response)
        decoder.logprobs([tokens], [len(s.rollout.prompt)], layers=lambda _, out, rows=rows: rows.append(out[:-1]))
        law.append(layer_digests(rows))
    alike = [ours == theirs for ours, theirs in zip(outcome.layer_digests, law, strict=True)]
    assert [len(digests) for digests in outcome.layer_digests] == [decoder.config.layers] * len(of.samples)
    assert all(alike) if numerics == "strict" else not any(alike)


def test_layers_are_looked_at_only_where_that_is_asked_for_and_change_no_bit(engine, folder):
    plain, watched = engine.train(batch()), TrainerEngine(folder, replace(OPTIONS, layer_digests=True)).train(batch())
    assert plain.layer_digests == ()
    assert np.array_equal(bits(plain.logprobs), bits(watched.logprobs))
    assert (plain.loss, plain.grad_norm) == (watched.loss, watched.grad_norm)


def test_scoring_has_the_bits_of_the_first_forward(engine):
    of = batch()
    assert np.array_equal(bits(scored(engine, of)), bits(engine.train(of).logprobs))


def test_on_policy_the_loss_is_minus_the_mean_advantage_over_tokens(engine):
    of = batch()
    of = with_rollout_logprobs(of, tuple(scored(engine, of)))
    outcome = engine.train(of)
    lengths = np.array([len(s.rollout.response) for s in of.samples])
    mean = float((lengths * [s.advantage for s in of.samples]).sum() / lengths.sum())
    assert f"{outcome.loss:.12f}" == f"{-mean:.12f}"
    assert outcome.clip_fraction == 0
    assert outcome.grad_norm > 0


def test_a_supervised_objective_falls(engine):
    # Advantage 1 on every token is maximum likelihood; on-policy ratios, so nothing is clipped.
    of = batch(samples=3)
    of = replace(of, samples=tuple(replace(s, advantage=1.0) for s in of.samples))
    course = []
    for _ in range(8):
        logprobs = tuple(scored(engine, of))
        course.append(float(np.mean(np.concatenate(logprobs))))
        engine.train(with_rollout_logprobs(of, logprobs))
    assert course == sorted(course)
    assert course[-1] > course[0] + 1


def test_the_micro_batch_budget_changes_no_bit_of_the_weights(folder, tmp_path):
    found = []
    for budget in (16, 70, 4096):
        engine = TrainerEngine(folder, replace(OPTIONS, micro_batch_tokens=budget))
        outcomes = [engine.train(batch(step)) for step in (0, 1)]
        found.append((digest(engine, tmp_path, str(budget)), [(o.loss, o.grad_norm) for o in outcomes]))
    assert found[0] == found[1] == found[2]


def test_training_changes_the_weights_and_a_rate_of_zero_does_not(engine, folder, tmp_path):
    start = weight_digest(folder)
    engine.train(batch())
    assert digest(engine, tmp_path, "trained") != start
    still = TrainerEngine(folder, replace(OPTIONS, schedule=Schedule(peak=0.0)))
    still.train(batch())
    assert digest(still, tmp_path, "still") == start


def test_two_updates_a_step_return_the_logprobs_of_the_first(engine, folder):
    once = engine.train(batch())
    twice = TrainerEngine(folder, replace(OPTIONS, updates_per_step=2)).train(batch())
    assert np.array_equal(bits(once.logprobs), bits(twice.logprobs))
    assert once.loss == twice.loss


def test_masked_tokens_teach_nothing(engine, folder, tmp_path):
    of = batch()
    mask = (False,) * len(of.samples[0].rollout.response)
    for name, advantage in (("a", 5.0), ("b", -9.0)):
        masked = (replace(of.samples[0], mask=mask, advantage=advantage), *of.samples[1:])
        learner = TrainerEngine(folder, OPTIONS)
        learner.train(replace(of, samples=masked))
        digest(learner, tmp_path, name)
    assert weight_digest(tmp_path / "a") == weight_digest(tmp_path / "b")


def test_what_is_exported_is_a_model_folder_with_the_digest_that_was_returned(engine, folder, tmp_path):
    engine.train(batch())
    assert digest(engine, tmp_path) == weight_digest(tmp_path / "weights")
    assert (tmp_path / "weights" / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert TrainerEngine(folder, OPTIONS).load(tmp_path / "weights") == weight_digest(tmp_path / "weights")


def test_a_run_resumes_to_the_same_bits(engine, folder, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    engine.train(batch(0))
    engine.save_checkpoint(checkpoint)
    held = digest(engine, tmp_path, "held")
    straight = engine.train(batch(1))
    resumed_engine = TrainerEngine(folder, OPTIONS)
    assert resumed_engine.load_checkpoint(checkpoint) == held
    resumed = resumed_engine.train(batch(1))
    assert np.array_equal(bits(straight.logprobs), bits(resumed.logprobs))
    assert (straight.loss, straight.grad_norm) == (resumed.loss, resumed.grad_norm)
    assert digest(engine, tmp_path, "straight") == digest(resumed_engine, tmp_path, "resumed")


def test_resuming_without_the_moments_would_not_give_the_same_bits(engine, folder, tmp_path):
    # What the test above rests on: a fresh optimizer on the same weights goes elsewhere.
    engine.train(batch(0))
    digest(engine, tmp_path, "held")
    fresh = TrainerEngine(folder, OPTIONS)
    fresh.load(tmp_path / "held")
    engine.train(batch(1))
    fresh.train(batch(1))
    assert digest(engine, tmp_path, "straight") != digest(fresh, tmp_path, "fresh")


def test_native_trains_too_and_has_other_bits(engine, folder, tmp_path):
    native = TrainerEngine(folder, replace(OPTIONS, numerics="native"))
    assert native.facts().contract_digest == "native"
    assert native.evidence() is None
    found, strict = native.train(batch()), engine.train(batch())
    assert (bits(found.logprobs) != bits(strict.logprobs)).any()
    assert digest(native, tmp_path) == weight_digest(tmp_path / "weights")


def test_facts_state_contract_vocabulary_and_shards(engine):
    facts = engine.facts()
    assert facts.contract_digest == model_contract(segments=2).digest()
    assert (facts.vocab_size, facts.padded_vocab_size, facts.vocab_shards) == (331, 384, (0, 384))


def test_options_come_from_the_config():
    trainer = {"learning_rate": 3e-6, "warmup_updates": 7, "clip_high": 0.28}
    options = TrainerOptions.of(build_config({"trainer": trainer, "numerics": {"segments": 4}}), rank=1)
    assert (options.clip_high, options.segments, options.rank) == (0.28, 4, 1)
    assert options.schedule == Schedule(peak=3e-6, warmup=7)


def test_a_backend_that_is_wrong_past_a_block_is_refused(tmp_path, monkeypatch):
    true = rope.rope
    monkeypatch.setattr(rope, "rope", lambda x, cos, sin, positions: true(x, cos, sin, positions.clamp(max=63)))
    with pytest.raises(EvidenceError, match="12 of 12 logprobs differ from the reference decoder's"):
        TrainerEngine(write_tiny_model(tmp_path / "model", LLAMA), OPTIONS)


def test_an_op_that_bypasses_the_plan_ends_the_step_with_an_error(engine):
    engine._model.module.decoder.layers[0].mlp_bda.ops.add = lambda a, b: a + b
    with pytest.raises(EvidenceError, match=r"residual_add\.residual_add was called"):
        engine.train(batch())


def test_a_batch_without_an_active_token_is_refused(engine):
    of = batch(step=4)
    silent = tuple(replace(s, mask=(False,) * len(s.mask)) for s in of.samples)
    with pytest.raises(TrainingError, match="step 4: no token of the batch is active"):
        engine.train(replace(of, samples=silent))


def test_a_batch_of_two_temperatures_is_refused(engine):
    mixed = replace(batch(), samples=batch().samples[:2] + batch(temperature=1.0).samples[2:])
    with pytest.raises(TrainingError, match=r"step 0 mixes the temperatures \[0\.8, 1\.0\]"):
        engine.train(mixed)


def test_a_nan_from_the_rollout_is_refused_and_leaves_the_weights_alone(engine, folder, tmp_path):
    of = batch(step=4)
    last = of.samples[-1].rollout  # in another micro-batch than the first
    poisoned = np.array(last.logprobs)
    poisoned[-1] = np.nan
    rest = tuple(s.rollout.logprobs for s in of.samples[:-1])
    place = rf"token {len(poisoned) - 1} \(id {last.response[-1]}\) of the response of sample 005 in step 4"
    with pytest.raises(TrainingError, match=f"the rollout's logprob of {place} is nan; a loss needs finite ones"):
        engine.train(with_rollout_logprobs(of, (*rest, poisoned)))
    assert digest(engine, tmp_path) == weight_digest(folder)


def test_a_gradient_that_is_not_finite_is_refused_with_its_step_and_leaves_the_weights_alone(engine, folder, tmp_path):
    of = batch(step=4)
    endless = replace(of.samples[0], advantage=np.inf)
    with pytest.raises(TrainingError, match=r"step 4: the gradient's norm is (nan|inf); the weights are as they were"):
        engine.train(replace(of, samples=(endless, *of.samples[1:])))
    assert digest(engine, tmp_path) == weight_digest(folder)


def test_weights_of_another_model_are_refused(engine, tmp_path):
    other = write_tiny_model(tmp_path / "other", LLAMA)
    with pytest.raises(ModelError, match="holds another model than the trainer was built for"):
        engine.load(other)


@pytest.fixture
def checkpoint(engine, tmp_path):
    path = tmp_path / "checkpoint"
    path.mkdir()
    engine.train(batch())
    engine.save_checkpoint(path)
    return path


def test_a_checkpoint_without_a_file_is_refused(engine, checkpoint):
    (checkpoint / "first_moments.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read: .*No such file.*/first_moments\.safetensors'"):
        engine.load_checkpoint(checkpoint)


def test_a_checkpoint_that_cannot_be_written_says_why(engine, tmp_path):
    with pytest.raises(CheckpointError, match=r"checkpoint .*gone cannot be written: No such file or directory"):
        engine.save_checkpoint(tmp_path / "gone")


def test_a_checkpoint_of_another_model_is_refused(checkpoint, tmp_path):
    wider = write_tiny_model(tmp_path / "wider", replace(QWEN3_TIED, intermediate=256))
    with pytest.raises(
        CheckpointError, match=r"masters of .*gate_proj\.weight is F32\[224, 160\], the model needs F32\[256"
    ):
        TrainerEngine(wider, OPTIONS).load_checkpoint(checkpoint)


def test_a_cut_off_checkpoint_is_refused(engine, checkpoint):
    file = checkpoint / "second_moments.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"second_moments\.safetensors has sha256 .*its files are damaged"):
        engine.load_checkpoint(checkpoint)


def _flip(file, byte, bit):
    content = bytearray(file.read_bytes())
    content[byte] ^= bit
    file.write_bytes(content)


@pytest.mark.parametrize("part", ["masters", "first_moments", "second_moments"])
def test_one_flipped_bit_of_any_file_is_noticed_before_anything_is_used(engine, checkpoint, tmp_path, part):
    """The lowest bit of a moment, or of a master, whose rounded weight stays as it is."""
    engine.train(batch(1))
    before = digest(engine, tmp_path, "before")
    _flip(checkpoint / f"{part}.safetensors", -4, 1)
    with pytest.raises(CheckpointError, match=rf"{part}\.safetensors has sha256 .*its files are damaged") as error:
        engine.load_checkpoint(checkpoint)
    assert "\n" not in str(error.value)
    assert digest(engine, tmp_path, "after") == before


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"updates": 2}, r"trainer\.json has sha256 .*its files are damaged"),
        ({"updates": "1"}, r"trainer\.json cannot be read: updates: input should be a valid integer"),
        ({"rng": None}, r"trainer\.json cannot be read: rng: input should be a valid string"),
        ({"rng": "0g"}, r"trainer\.json cannot be read: rng: string should match pattern"),
        ({"files": []}, r"trainer\.json cannot be read: files: input should be a valid dictionary"),
    ],
)
def test_a_checkpoint_whose_own_file_was_touched_is_named(engine, checkpoint, change, says):
    file = checkpoint / "trainer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=says):
        engine.load_checkpoint(checkpoint)


def test_masters_that_do_not_round_to_the_weights_are_noticed_even_with_the_right_digests(engine, checkpoint):
    _flip(checkpoint / "masters.safetensors", -1, 0x40)
    names = ["masters.safetensors", "first_moments.safetensors", "second_moments.safetensors"]
    forged = Progress.read(checkpoint / "trainer.json").sealed(checkpoint, names)
    (checkpoint / "trainer.json").write_text(forged.text())
    with pytest.raises(CheckpointError, match=r"gives weights with digest .*its files are damaged"):
        engine.load_checkpoint(checkpoint)


def test_a_missing_model_and_another_architecture_are_named(folder, tmp_path):
    with pytest.raises(ModelError, match=r"gone/config\.json does not exist"):
        TrainerEngine(tmp_path / "gone", OPTIONS)
    shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "copy" / "config.json").write_text(json.dumps(config | {"model_type": "mixtral"}))
    with pytest.raises(ModelError, match="architecture 'mixtral' has no contract"):
        TrainerEngine(tmp_path / "copy", OPTIONS)
