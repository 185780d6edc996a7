"""Prompts come from (seed, step) alone; rewards are checkable; advantages compare siblings only."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from services.config import build_config
from services.errors import ConfigError
from services.grpo import advantages
from services.loop import requests, score
from services.records import Rollout, WeightVersion
from services.tasks import make_task
from services.tasks.arithmetic import Arithmetic
from services.tasks.tokens import LowTokens
from tests.models import LLAMA, write_tiny_model


@pytest.fixture
def arithmetic(tmp_path):
    """The task on a tokenizer with one token a byte, so that ids can be read."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return Arithmetic.of_model(tmp_path, shots=3, seed=1)


def test_a_prompt_is_worked_examples_and_an_open_sum(arithmetic):
    (prompt,) = arithmetic.prompts(0, 1)
    *examples, question = arithmetic.tokenizer.decode(list(prompt.tokens)).split("\n")
    assert len(examples) == 3
    for line in [*examples, question + prompt.answer]:
        terms, _, result = line.partition("=")
        assert sum(int(term) for term in terms.split("+")) == int(result)


def test_a_tokenizer_that_cuts_and_fills_up_does_neither_to_a_prompt(arithmetic, tmp_path):
    arithmetic.tokenizer.enable_truncation(4)
    arithmetic.tokenizer.enable_padding(length=100)
    arithmetic.tokenizer.save(str(tmp_path / "tokenizer.json"))
    (prompt,) = Arithmetic.of_model(tmp_path, shots=3, seed=1).prompts(0, 1)
    arithmetic.tokenizer.no_truncation()
    arithmetic.tokenizer.no_padding()
    assert prompt == arithmetic.prompts(0, 1)[0]


def test_the_same_step_gives_the_same_prompts_and_another_step_others(arithmetic):
    assert arithmetic.prompts(4, 3) == arithmetic.prompts(4, 3)
    assert arithmetic.prompts(4, 3) != arithmetic.prompts(5, 3)
    assert arithmetic.prompts(4, 3)[:2] == arithmetic.prompts(4, 2)


@pytest.mark.parametrize(
    ("suffix", "reward"), [("\n", 1.0), ("", 1.0), ("\n7 + 1 =", 1.0), ("0\n", 0.0), (" \n", 1.0), ("x", 0.0)]
)
def test_only_the_right_sum_on_the_first_line_is_rewarded(arithmetic, suffix, reward):
    (prompt,) = arithmetic.prompts(0, 1)
    answer = tuple(arithmetic.tokenizer.encode(prompt.answer + suffix).ids)
    assert arithmetic.reward(prompt, answer) == reward


def test_an_empty_response_is_wrong(arithmetic):
    (prompt,) = arithmetic.prompts(0, 1)
    assert arithmetic.reward(prompt, ()) == 0.0


def test_the_largest_id_is_the_tokenizers_own_and_not_one_that_was_added_to_it(arithmetic):
    assert arithmetic.largest_id() == 255
    arithmetic.tokenizer.add_special_tokens(["<pad>"])
    assert arithmetic.largest_id() == 255
    assert LowTokens(vocab_size=10, seed=0).largest_id() == 9


def test_a_response_stops_at_every_token_that_begins_a_new_line(arithmetic):
    assert [arithmetic.tokenizer.decode([i])[0] for i in arithmetic.stop_token_ids] == ["\n"]


def test_a_model_without_a_tokenizer_is_told_of_the_task_that_needs_none(tmp_path):
    model = write_tiny_model(tmp_path)
    with pytest.raises(ConfigError, match=r"needs .*tokenizer\.json; a model without a tokenizer can do 'tokens'"):
        make_task(build_config({}), model)
    assert make_task(build_config({"task": {"name": "tokens"}}), model) == LowTokens(LLAMA.vocab, seed=1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("garbage", "is no tokenizer that `tokenizers` can use: expected value at line 1"),
        ("", "is no tokenizer that `tokenizers` can use"),
        ("{}", "is no tokenizer that `tokenizers` can use: Model missing"),
        ("[]", "is no tokenizer that `tokenizers` can use: invalid type: sequence"),
        ('{"version": "1.0", "model": {"type": "WordLevel", "vocab": {}, "unk_token": "x"}}', "Missing .UNK. token"),
        ('{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}', r"makes no token of '9 \+ 9 ='"),
    ],
)
def test_a_tokenizer_that_is_none_is_named(tmp_path, text, says):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=says) as error:
        Arithmetic.of_model(tmp_path, shots=2, seed=1)
    assert f"{tmp_path}/tokenizer.json" in str(error.value)
    assert "\n" not in str(error.value)


def test_the_reward_for_low_tokens_is_their_share():
    task = LowTokens(vocab_size=10, seed=0)
    (prompt,) = task.prompts(0, 1)
    assert all(0 <= token < 10 for token in prompt.tokens)
    assert [task.reward(prompt, r) for r in [(0, 4), (4, 5), (5, 9), ()]] == [1.0, 0.5, 0.0, 0.0]


def test_advantages_compare_the_answers_to_one_prompt_only():
    values = advantages([0.0, 1.0, 0.0, 1.0, 5.0, 5.0, 5.0, 5.0], group_size=4)
    np.testing.assert_array_equal(np.sign(values), [-1, 1, -1, 1, 0, 0, 0, 0])
    assert abs(values[0] + 1.0) < 1e-5


def test_every_request_of_a_step_has_its_own_seed_and_name():
    config = build_config({"task": {"name": "tokens", "prompts_per_step": 3, "samples_per_prompt": 4}})
    task = LowTokens(vocab_size=10, seed=0)
    asked = requests(config, task, 2, task.prompts(2, 3))
    assert len({r.sample_id for r in asked}) == len({r.sampling.seed for r in asked}) == 12
    assert asked == requests(config, task, 2, task.prompts(2, 3))
    assert asked[0].sampling.seed != requests(config, task, 3, task.prompts(2, 3))[0].sampling.seed


def test_a_batch_keeps_the_order_of_the_requests_and_masks_nothing():
    config = build_config({"task": {"name": "tokens", "prompts_per_step": 1, "samples_per_prompt": 2}})
    task = LowTokens(vocab_size=10, seed=0)
    weights = WeightVersion(1, "ab", None)
    prompts = task.prompts(0, 1)
    rollouts = [
        Rollout(r.sample_id, r.prompt, response, np.zeros(len(response), np.float32), "length", r.sampling, weights)
        for r, response in zip(requests(config, task, 0, prompts), [(0, 1), (9,)], strict=True)
    ]
    batch = score(config, task, 0, weights, prompts, rollouts)
    assert [s.rollout for s in batch.samples] == rollouts
    assert [s.mask for s in batch.samples] == [(True, True), (True,)]
    assert [s.reward for s in batch.samples] == [1.0, 0.0]
    assert batch.samples[0].advantage > 0 > batch.samples[1].advantage
    assert (batch.response_tokens, batch.mean_reward) == (3, 0.5)
