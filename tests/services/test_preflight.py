"""What is known to be wrong before anything is started, one line each."""

import json

import pytest

from services import preflight
from services.config import build_config
from services.errors import ConfigError
from tests.models import LLAMA, TinyModel, write_tiny_model


@pytest.fixture
def model(tmp_path):
    return write_tiny_model(tmp_path / "model")


def _config(tmp_path, **sections):
    return build_config({"run": {"directory": str(tmp_path / "runs")}, "task": {"name": "tokens"}, **sections})


def test_a_config_that_fits_passes(tmp_path, model):
    config = _config(tmp_path, numerics={"segments": 2}, rollout={"tp_size": 2}, trainer={"tp_size": 2})
    assert preflight.check(config, model).heads == LLAMA.heads


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        (
            {"rollout": {"tp_size": 3}},
            r"rollout\.tp_size = 3 does not divide the model's 4 attention heads; use 1 or 2",
        ),
        (
            {"trainer": {"tp_size": 4}},
            r"trainer\.tp_size = 4 does not divide the model's 2 key-value heads; use 1 or 2",
        ),
        ({"trainer": {"tp_size": 2}}, r"trainer\.tp_size = 2 does not divide numerics\.segments = 1"),
        ({"numerics": {"profile": "sm70"}}, "unknown numerics profile 'sm70'; choose one of .*portable"),
        ({"numerics": {"profile": "sm80"}}, "no backend computes products by MMA model sm80; profile portable runs on any"),
        (
            {"rollout": {"max_model_len": 4096}},
            r"rollout\.max_model_len = 4096 is more than the model's 2048 positions",
        ),
        (
            {"rollout": {"max_model_len": 2048, "kv_cache_mb": 1}},
            r"rollout\.kv_cache_mb = 1 is too small for one sequence of rollout\.max_model_len = 2048; use at least 2",
        ),
        ({"rollout": {"max_model_len": 16, "max_new_tokens": 16}}, "leaves no room for a prompt"),
        ({"auditor": {"grpc": "127.0.0.1:1"}}, r"auditor\.http is empty"),
        ({"auditor": {"grpc": "127.0.0.1:1", "http": "127.0.0.1:2"}}, "should be a URL such as"),
        (
            {"rollout": {"max_model_len": 24, "max_new_tokens": 5}},
            r"max_model_len = 24 has no room for a prompt of 20 tokens and rollout\.max_new_tokens = 5; use 25",
        ),
        ({"auditor": {"grpc_port": 4317, "http_port": 4317}}, r"grpc_port and auditor\.http_port are both 4317"),
        ({"weights": {"directory": __file__}}, r"weights\.directory = .* is a file, or lies below one"),
        ({"auditor": {"token_file": "nowhere"}}, r"auditor\.token_file = 'nowhere' does not exist"),
    ],
)
def test_a_config_that_cannot_run_is_refused_with_what_would_be_right(tmp_path, model, sections, says):
    with pytest.raises(ConfigError, match=says) as error:
        preflight.check(_config(tmp_path, **sections), model)
    assert "\n" not in str(error.value)


def test_a_strict_tp_size_is_a_power_of_two_and_the_message_names_the_segments_that_it_needs(tmp_path):
    model = write_tiny_model(tmp_path / "three", TinyModel(heads=6, kv_heads=6, intermediate=240))
    with pytest.raises(ConfigError, match=r"rollout\.tp_size = 3 is no power of two"):
        preflight.check(_config(tmp_path, rollout={"tp_size": 3}, numerics={"segments": 2}), model)
    with pytest.raises(ConfigError, match=r"does not divide numerics\.segments = 1; set numerics\.segments = 2"):
        preflight.check(_config(tmp_path, rollout={"tp_size": 2}), model)
    preflight.check(_config(tmp_path, numerics={"mode": "native"}, trainer={"tp_size": 3}), model)


def test_native_numerics_need_no_segments(tmp_path, model):
    preflight.check(_config(tmp_path, numerics={"mode": "native"}, trainer={"tp_size": 2}), model)


def test_a_model_of_another_architecture_is_refused(tmp_path, model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    with pytest.raises(ConfigError, match=r"config\.json: architecture 'gpt2' has no contract; there is one for llama"):
        preflight.check(_config(tmp_path), model)


def test_a_model_without_weights_is_refused(tmp_path, model):
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"holds no \*\.safetensors file"):
        preflight.check(_config(tmp_path), model)


def test_a_disk_without_room_is_refused_before_the_first_step(tmp_path, model, monkeypatch):
    usage = preflight.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: usage._replace(free=100_000))
    with pytest.raises(ConfigError, match=r"has 0 MiB free; weights and checkpoints need up to \d+ MiB"):
        preflight.check(_config(tmp_path), model)


def test_the_disk_must_hold_every_version_that_may_wait_for_the_auditor_and_two_checkpoints(
    tmp_path, model, monkeypatch
):
    size = (model / "model.safetensors").stat().st_size
    usage = preflight.shutil.disk_usage(tmp_path)
    run = {"directory": str(tmp_path / "runs"), "checkpoint_every": 1}
    config = _config(tmp_path, run=run, weights={"keep": 2, "keep_waiting": 4})
    for free, enough in ((5 * size + 12 * size, True), (5 * size + 12 * size - 1, False)):
        monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        if enough:
            preflight.check(config, model)
        else:
            with pytest.raises(ConfigError, match="or lower weights"):
                preflight.check(config, model)


def test_weights_that_were_cut_off_are_refused(tmp_path, model):
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match=r"model\.safetensors is cut off or malformed at tensor"):
        preflight.check(_config(tmp_path), model)
