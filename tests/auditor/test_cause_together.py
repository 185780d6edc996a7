"""What is tried at once on a model of real size, and in which order: the usual before the rare."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from auditor.causes.context.front import cut_in_front, part_of_the_prompt
from auditor.causes.context.rope import _models, turned
from auditor.causes.context.scalings import YARN, stretched, usual
from auditor.causes.context.seen import seeing, window
from auditor.causes.context.stored import usual_caches
from auditor.causes.edits import DOWN, Edit, edited
from auditor.causes.evidence import CERTAIN
from auditor.causes.oracle import Oracle
from auditor.causes.search import Model, nearest_model
from auditor.causes.together import alike, hidden_of_each
from auditor.faults.reported import to_e4m3
from auditor.faults.world import Drawn, World, from_bf16, to_bf16
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.ops import I32, Bits, Reference
from tests.auditor.diagnosis import certain, evidence_of, oracle_of


@pytest.fixture(scope="module")
def world() -> World:
    return World(None, seed=31)


def some_models(oracle: Oracle) -> list[Decoder]:
    """Under a rotation, a mask in one layer, a product in one place, from a token on; and as it is."""
    where, own = np.arange(len(oracle.tokens), dtype=np.float64), oracle.decoder

    def halved(plain: Reference, x: Bits, w: Bits, *, segments: int = 1) -> Bits:
        return to_bf16(from_bf16(plain.gemm(x, w, segments=segments)) / np.float32(2))

    return [
        edited(own, turned(oracle, where / 4)),
        edited(own, Edit("attention", seeing(window(8))).at((1, 0))),
        edited(own, Edit("gemm", halved).at((0, DOWN))),
        edited(own, Edit("gemm", halved, first=20)),
        own,
    ]


def test_models_that_are_run_together_have_the_bits_of_each_by_itself(world: World, sample: Drawn) -> None:
    models = some_models(oracle_of(world, sample))
    assert all(alike(world.decoder(sample.version), model) for model in models)
    for model, hidden in zip(models, hidden_of_each(models, sample.tokens), strict=True):
        assert hidden.tobytes() == model.hidden([sample.tokens]).tobytes()
    assert not alike(models[0], world.decoder(sample.version - 1))
    assert not alike(models[0], replace(models[0], rope=(models[0].rope[0].copy(), models[0].rope[1])))


def test_rows_of_several_models_and_sequences_are_those_of_each(world: World, sample: Drawn) -> None:
    oracle, at = oracle_of(world, sample), np.array([2, 9, 10])
    models = some_models(oracle)
    for model, values in zip(models, oracle.of_each(models, at), strict=True):
        assert values.tobytes() == oracle.logprobs(model)[at].tobytes()
    sequences = [sample.tokens, sample.tokens[3:]]
    whole, cut = oracle.of_sequences(sequences, [oracle.rows[at], oracle.rows[at] - 3], at)
    assert whole.tobytes() == oracle.logprobs(oracle.decoder)[at].tobytes()
    shorter = replace(sample, tokens=sample.tokens[3:], prompt=sample.prompt - 3)
    assert cut.tobytes() == world.logprobs(oracle.decoder, shorter)[at].tobytes()


def test_what_is_run_together_is_ruled_out_and_found_as_what_is_run_alone(world: World, sample: Drawn) -> None:
    """Also where a kin is ruled out by the first of it, and where a model has weights of its own."""
    oracle = oracle_of(world, sample)
    wrong = world.logprobs(some_models(oracle)[2], sample)
    before = Model("stale_weights", "older weights", world.decoder(sample.version - 1))
    models = [Model(f"{at}", f"model {at}", model, "kin") for at, model in enumerate(some_models(oracle)[:2])]
    models += [before, Model("half", "half of a product", some_models(oracle)[2])]
    suggestion = nearest_model(evidence_of(world, sample, wrong), oracle, models)
    assert suggestion is not None
    assert (suggestion.cause, suggestion.score) == ("half", CERTAIN)


def test_a_config_s_usual_stretch_is_among_the_first_that_are_tried(world: World, sample: Drawn) -> None:
    oracle = oracle_of(world, sample)
    longest = float(oracle.decoder.config.max_position)
    yarn = stretched(oracle, YARN, 4.0, longest, (32.0, 1.0))
    wrong = world.logprobs(
        edited(oracle.decoder, turned(oracle, np.arange(len(sample.tokens), dtype=np.float64), *yarn)), sample
    )
    first = [model.name for model, _ in zip(_models(evidence_of(world, sample, wrong), oracle), range(4), strict=False)]
    assert f"YaRN scaling by 4 of {longest:g} positions" in first
    assert len({name for name, _, _ in usual(oracle)}) >= 16


@pytest.mark.parametrize("late", [False, True])
def test_the_usual_caches_are_tried_without_running_the_model_back(world: World, sample: Drawn, late: bool) -> None:
    def attention(plain: Reference, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> Any:
        own = plain.attention(q, k, v, cu_q, cu_k)
        few_k, few_v = (to_bf16(to_e4m3(from_bf16(a))) for a in (k, v))
        few = plain.attention(q, few_k, few_v, cu_q, cu_k)
        pairs: Any = zip(own, few, strict=True)
        return tuple(np.concatenate([a[: 24 * late], b[24 * late :]]) for a, b in pairs)

    wrong = world.logprobs(edited(world.decoder(sample.version), Edit("attention", attention)), sample)
    certain(usual_caches, world, sample, wrong, "kv_precision", "FP8 (E4M3) without a scale", "24 on" * late)
    assert not oracle_of(world, sample).responses


def test_parts_of_a_prompt_cost_rows_and_not_responses(world: World, sample: Drawn) -> None:
    decoder, oracle = world.decoder(sample.version), oracle_of(world, sample)
    shorter = replace(sample, tokens=np.delete(sample.tokens, np.s_[7:12]), prompt=sample.prompt - 5)
    wrong = world.logprobs(decoder, shorter)
    (said,) = part_of_the_prompt(evidence_of(world, sample, wrong), oracle)
    assert (said.cause, said.score) == ("other_context", CERTAIN)
    assert "without its tokens 7 to 11" in said.evidence
    cut = replace(sample, tokens=sample.tokens[5:], prompt=sample.prompt - 5)
    certain(cut_in_front, world, sample, world.logprobs(decoder, cut), "truncation", "first 5 tokens")
