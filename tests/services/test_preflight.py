"""What is known to be wrong before anything is started, one line each."""

import json
import shutil
import subprocess

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from services import preflight
from services.config import build_config
from services.errors import ConfigError
from services.trainer.tensor_file import Entry, write_tensors
from tests.auditor.test_tls import authority, issue
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
        (
            {"numerics": {"profile": "sm90_poly"}},
            r"numerics\.profile = 'sm90_poly': no backend serves swiglu on cuda under exp2 model poly; .*; "
            "profiles that run: portable, sm90$",
        ),
        ({"numerics": {"segments": 3}}, r"numerics\.segments = 3: segments must be a power of two"),
        ({"numerics": {"profile": "sm70"}}, "unknown numerics profile 'sm70'; choose one of .*portable"),
        (
            {"numerics": {"profile": "sm80"}},
            "no backend computes products by MMA model sm80; profile portable runs on any",
        ),
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
        (
            {"weights": {"directory": "/proc/x"}},
            r"weights\.directory = '/proc/x' cannot be written to: .*; use a folder",
        ),
        ({"run": {"directory": "/sys"}}, r"run\.directory = '/sys' cannot be written to: .*; use a folder"),
        ({"run": {"directory": "x" * 999}}, r"run\.directory = 'xxx.*' cannot be written to: File name too long"),
        ({"auditor": {"token_file": "nowhere"}}, r"auditor\.token_file = 'nowhere' does not exist"),
        ({"auditor": {"token_file": "/"}}, r"auditor\.token_file = '/' cannot be read: Is a directory; it should be a"),
        ({"auditor": {"token_file": "x" * 999}}, r"auditor\.token_file = 'xxx.*' cannot be read: File name too long"),
        (
            {"auditor": {"token_file": __file__}},
            r"auditor\.token_file = .* holds no bearer token; it should be one line",
        ),
        ({"auditor": {"token_file": "/dev/null"}}, r"auditor\.token_file = '/dev/null' holds no bearer token"),
        ({"auditor": {"tls_ca": __file__}}, r"auditor\.tls_ca = .* holds no certificate in PEM"),
        (
            {"auditor": {"tls_certificate": __file__, "tls_key": __file__}},
            r"auditor\.tls_ca is empty; auditor\.tls_certificate",
        ),
        ({"auditor": {"grpc": "h:1", "http": "http://h:x"}}, r"auditor\.http = 'http://h:x': Port could not be cast"),
        ({"auditor": {"grpc": "h:1", "http": "http://:80"}}, r"auditor\.http = 'http://:80': no host"),
        ({"auditor": {"grpc": "h:1", "http": "http://[::1"}}, r"auditor\.http = 'http://\[::1': Invalid IPv6 URL"),
        (
            {"task": {"name": "tokens", "prompts_per_step": 100_000, "samples_per_prompt": 11}},
            r"are 1100000 samples a step; use 1000000 or less",
        ),
    ],
)
def test_a_config_that_cannot_run_is_refused_with_what_would_be_right(tmp_path, model, sections, says):
    with pytest.raises(ConfigError, match=says) as error:
        preflight.check(_config(tmp_path, **sections), model)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"numerics": {"threads": 9}}, r"numerics\.threads = 9 is far more than this machine's 2 cores; use 2"),
        (
            {"rollout": {"kv_cache_mb": 101}},
            r"rollout\.kv_cache_mb on all ranks asks for 101 MiB, and this machine has 100",
        ),
        ({"ray": {"object_store_mb": 101}}, r"ray\.object_store_mb asks for 101 MiB"),
        (
            {"rollout": {"max_num_seqs": 16_384, "max_model_len": 2048, "kv_cache_mb": 99}},
            r"rollout\.max_num_seqs times max_model_len asks for 128 MiB",
        ),
    ],
)
def test_what_this_machine_has_not_is_refused_before_anything_is_built(tmp_path, model, monkeypatch, sections, says):
    monkeypatch.setattr(preflight.os, "cpu_count", lambda: 2)
    memory = preflight.psutil.virtual_memory()._replace(total=100 * 2**20)
    monkeypatch.setattr(preflight.psutil, "virtual_memory", lambda: memory)

    def built(*_):
        raise AssertionError("the prompts were built")

    monkeypatch.setattr(preflight, "make_task", built)
    base = {"rollout": {"kv_cache_mb": 64}, "ray": {"object_store_mb": 100}}
    sections = base | {name: base.get(name, {}) | changed for name, changed in sections.items()}
    with pytest.raises(ConfigError, match=says):
        preflight.check(_config(tmp_path, **sections), model)
    # Where other machines run the actors, this one's size says nothing.
    sections["ray"] = sections["ray"] | {"address": "10.0.0.1:6379"}
    with pytest.raises(AssertionError, match="the prompts were built"):
        preflight.check(_config(tmp_path, **sections), model)


def test_the_amounts_of_the_demo_fit_a_machine_of_one_core(monkeypatch):
    monkeypatch.setattr(preflight.os, "cpu_count", lambda: 1)
    preflight._check_machine(build_config({}), "cpu")


def test_a_certificate_without_its_key_is_refused(tmp_path, model):
    if shutil.which("openssl") is None:
        pytest.skip("openssl is missing")
    ours = authority(tmp_path / "ours", "ours")
    certificate, key = issue(ours, tmp_path, "client", 1)
    _, other = issue(ours, tmp_path, "other", 2)
    files = {"tls_ca": str(ours / "ca.pem"), "tls_certificate": str(certificate), "tls_key": str(key)}
    preflight.check(_config(tmp_path, auditor=files), model)
    with pytest.raises(ConfigError, match=r"are not a certificate and its key, without a passphrase, in PEM"):
        preflight.check(_config(tmp_path, auditor=files | {"tls_key": str(other)}), model)
    locked = tmp_path / "locked.pem"
    command = ["openssl", "pkey", "-in", str(key), "-aes256", "-passout", "pass:secret", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(ConfigError, match=r"without a passphrase"):
        preflight.check(_config(tmp_path, auditor=files | {"tls_key": str(locked)}), model)


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


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"vocab_size": None}, "vocab_size=None must be a whole number"),
        (
            {"num_hidden_layers": 1},
            r"tensor 'model\.layers\.1\.input_layernorm\.weight' is not of the llama decoder of 1 la",
        ),
        ({"num_attention_heads": "4"}, "num_attention_heads='4' must be a whole number"),
        ({"architectures": None}, r"config\.json has no 'architectures'; add \['LlamaForCausalLM'\]"),
    ],
)
def test_a_model_whose_config_says_something_else_is_refused(tmp_path, model, change, says):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=says):
        preflight.check(_config(tmp_path), model)


def test_a_tensor_too_many_is_named(tmp_path, model):
    bias = "model.layers.0.self_attn.q_proj.bias"
    write_tensors(model / "more.safetensors", [Entry(bias, "BF16", (1,))], [np.zeros(1, np.uint16)])
    with pytest.raises(ConfigError, match=f"tensor '{bias}' is not of the llama decoder of 2 layers that config.json"):
        preflight.check(_config(tmp_path), model)


def test_a_tokenizer_of_another_vocabulary_is_refused(tmp_path, model):
    vocabulary = {symbol: i + 100 for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(model / "tokenizer.json"))
    with pytest.raises(
        ConfigError, match="the tokenizer has ids up to 355, and the model a vocabulary of 331; use the"
    ):
        preflight.check(_config(tmp_path, task={"name": "arithmetic"}), model)


def test_a_model_without_weights_is_refused(tmp_path, model):
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"holds no \*\.safetensors file"):
        preflight.check(_config(tmp_path), model)


def test_a_disk_without_room_is_refused_before_the_first_step(tmp_path, model, monkeypatch):
    usage = preflight.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: usage._replace(free=100_000))
    with pytest.raises(ConfigError, match=r"has 0 MiB free; weights and checkpoints need up to \d+ MiB"):
        preflight.check(_config(tmp_path), model)


@pytest.mark.parametrize(
    ("steps", "every", "versions", "checkpoints"),
    [(9, 1, 5, 2), (9, 0, 5, 0), (1, 1, 2, 1), (1, 5, 2, 1), (2, 1, 3, 2), (6, 5, 5, 2)],
    ids=["a-long-run", "no-checkpoints", "one-step", "the-last-step-alone", "two-steps", "one-and-the-last"],
)
def test_the_disk_must_hold_every_version_that_may_wait_for_the_auditor_and_two_checkpoints(
    tmp_path, model, monkeypatch, steps, every, versions, checkpoints
):
    size = (model / "model.safetensors").stat().st_size
    usage = preflight.shutil.disk_usage(tmp_path)
    run = {"directory": str(tmp_path / "runs"), "checkpoint_every": every, "steps": steps}
    config = _config(tmp_path, run=run, weights={"keep": 2, "keep_waiting": 4})
    need = (versions + 6 * checkpoints) * size
    for free, enough in ((need, True), (need - 1, False)):
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
