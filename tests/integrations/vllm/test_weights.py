"""Weights are replaced in place, confirmed from the engine's own memory, and nothing of the old ones survives."""

import json

import pytest

from rl_kernel.errors import ModelError, WeightDigestError
from rl_kernel.reference.weights import weight_digest
from tests.integrations.vllm.requests import prompts, reference_bits, run
from tests.models import LLAMA, TINY_MODELS, TinyModel, write_tiny_model


@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_replaced_weights_are_confirmed_and_give_the_bits_of_a_fresh_engine(make_engine, models, name):
    engine, asked = make_engine(models[name], block_size=16), prompts(5)
    before = run(engine, asked)
    assert engine.load(models[f"{name}-1"]) == weight_digest(models[f"{name}-1"])
    after = run(engine, asked)  # the same prompts: a key or value that was kept would show
    assert after != before
    assert [logprobs for _, logprobs in after] == reference_bits(models[f"{name}-1"], asked, after)
    engine.load(models[name])
    assert run(engine, asked) == before


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_native_weights_are_replaced_too(make_engine, models, name):
    """Every one of them: vLLM's own reload leaves a tied output layer as it was packed at the start."""
    engine, asked = make_engine(models[name], numerics="native"), prompts(5)
    before = run(engine, asked)
    assert engine.load(models[f"{name}-1"]) == weight_digest(models[f"{name}-1"])
    after = run(engine, asked)
    assert after != before
    assert after == run(make_engine(models[f"{name}-1"], numerics="native"), asked)
    engine.load(models[name])
    assert run(engine, asked) == before


@pytest.mark.parametrize("layer", ["model.layers.1.self_attn.qkv_proj", "model.layers.0.mlp.down_proj", "lm_head"])
def test_one_flipped_bit_in_memory_is_not_confirmed(make_engine, models, layer):
    engine = make_engine(models["llama"])
    worker = engine._llm.llm_engine.model_executor.driver_worker.worker
    worker.get_model().get_submodule(layer).packed.words[7] ^= 1
    with pytest.raises(WeightDigestError, match="holds weights with digest"):
        engine._confirm(engine.weight_digest)


def test_an_engine_without_confirmed_weights_does_not_sample(make_engine, models, monkeypatch):
    engine = make_engine(models["llama"])
    monkeypatch.setattr(engine, "_confirm", lambda digest: (_ for _ in ()).throw(WeightDigestError("not those")))
    with pytest.raises(WeightDigestError, match="not those"):
        engine.load(models["llama-1"])
    with pytest.raises(WeightDigestError, match="holds no confirmed weights"):
        run(engine, prompts(1))
    monkeypatch.undo()
    assert engine.load(models["llama"])
    assert run(engine, prompts(1))


def test_weights_of_another_model_are_refused(make_engine, models):
    engine = make_engine(models["llama"])
    with pytest.raises(ModelError, match="holds another model than the engine was built for"):
        engine.load(models["qwen3"])


def test_incomplete_weights_are_refused(make_engine, models, tmp_path):
    class Headless(TinyModel):
        def shapes(self):
            return (s for s in super().shapes() if s[0] != "model.norm.weight")

    broken = write_tiny_model(tmp_path / "broken", Headless())
    with pytest.raises(ModelError, match=r"tensor 'model\.norm\.weight' is missing"):
        make_engine(models["llama"]).load(broken)


def test_a_tied_model_with_a_head_of_its_own_is_refused(make_engine, tmp_path):
    folder = write_tiny_model(tmp_path / "model", LLAMA)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(ModelError, match=r"'lm_head\.weight' must not be there"):
        make_engine(folder)
