"""What a user's mistake looks like: one line, exit code 2, no traceback, and nothing started."""

import os
import re
import shutil
import socket

import pytest
import torch
import yaml

from services import job
from services.config import load_config
from services.main import main
from services.redo import UnderWay
from services.run_folder import Checkpoint, RunFolder
from tests.models import write_tiny_model


@pytest.fixture
def config_file(tmp_path):
    tree = {
        "run": {"directory": str(tmp_path / "runs")},
        "model": {"path": str(write_tiny_model(tmp_path / "model"))},
        "task": {"name": "tokens"},
    }
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set", "rollout.tpsize=2"], "unknown key 'rollout.tpsize'; the nearest known key is 'rollout.tp_size'"),
        (["--set", "model.path=gpt-5"], "model 'gpt-5' is neither a folder with a config.json nor a packaged model"),
        (["--set", "rollout.tp_size=3"], "does not divide the model's 4 attention heads; use 1 or 2"),
        (["--set", "task.name=arithmetic"], "a model without a tokenizer can do 'tokens'"),
        (["--resume", ""], "--resume goes on with the run's own config; leave out --config"),
        (["--resume", "yesterday"], "--resume goes on with the run's own config; leave out --config"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_would_be_right(config_file, capsys, arguments, says):
    assert main(["--config", str(config_file), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert says in error


def test_a_run_that_is_not_there_cannot_be_resumed(tmp_path, capsys):
    assert main(["--resume", "yesterday", "--set", f"run.directory={tmp_path}"]) == 2
    assert "no run 'yesterday'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("numerics.mode=native", "numerics.mode = 'native': the run that is resumed has 'strict' in all its steps"),
        ("numerics.profile=sm90", "numerics.profile = 'sm90': the run that is resumed has 'portable'"),
        ("numerics.segments=2", "numerics.segments = 2: the run that is resumed has 1"),
        ("run.seed=7", "run.seed = 7: the run that is resumed has 1"),
        ("task.samples_per_prompt=4", "task.samples_per_prompt = 4: the run that is resumed has 8"),
        ("model.path=elsewhere", "model.path = 'elsewhere': the run that is resumed has "),
    ],
)
def test_what_holds_for_a_whole_run_cannot_change_when_it_is_resumed(config_file, capsys, change, says):
    config = load_config(config_file)
    folder = RunFolder.create(config)
    assert main(["--resume", str(folder.path), "--set", change]) == 2
    assert says in capsys.readouterr().err


@pytest.fixture
def resumable(config_file):
    """A run that was begun up to step 4 with a checkpoint before step 3."""
    config = load_config(config_file)
    folder = RunFolder.create(config)
    with folder.checkpoint(3) as scratch:
        folder.finish_checkpoint(Checkpoint(scratch, 3, 4, "ab"))
    folder.begin_step(UnderWay.now(4, config, local=True))
    return folder


def test_a_key_that_the_records_of_a_step_to_be_redone_depend_on_cannot_change(resumable, capsys, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert main(["--resume", str(resumable.path), "--set", "rollout.temperature=0.5"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("error: rollout.temperature = 0.5: steps 3 to 4 were begun with 1.0 and must be done again")
    assert load_config(resumable.config_file).rollout.temperature == 1.0


def test_a_step_log_that_is_damaged_is_named_before_anything_is_started(resumable, capsys):
    (resumable.path / "steps.jsonl").write_text("{}\n")
    assert main(["--resume", str(resumable.path)]) == 2
    output = capsys.readouterr()
    assert re.match(r"error: .*/steps\.jsonl, line 1 cannot be read: step: field required\n$", output.err)
    assert output.out == ""


def test_another_environment_than_that_of_a_step_to_be_redone_is_named(resumable, capsys, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    noted = resumable.under_way
    resumable.begin_step(noted.model_copy(update={"environment": noted.environment | {"torch": "1.0"}}))
    assert main(["--resume", str(resumable.path)]) == 2
    assert "were begun with '1.0' and must be done again to the same bits" in capsys.readouterr().err


def test_a_run_in_use_is_left_alone_with_the_process_that_uses_it_named(resumable, capsys):
    with resumable.lock():
        assert main(["--resume", str(resumable.path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: run {resumable.run_id} is in use by pid {os.getpid()} on ")
    assert error.count("\n") == 1


def test_a_copy_of_a_run_in_use_leaves_the_weights_alone_that_both_would_write(resumable, tmp_path, capsys):
    shared = f"weights.directory={tmp_path / 'weights'}"
    copy = shutil.copytree(resumable.path, tmp_path / "copy")
    with job.weights_lock(load_config(resumable.config_file, [shared]), resumable):
        assert main(["--resume", str(copy), "--set", shared]) == 2
    error, of_both = capsys.readouterr().err, tmp_path / "weights" / resumable.run_id
    assert error.count("\n") == 1
    assert error.startswith(f"error: weights.directory: {of_both} is in use by pid {os.getpid()} on ")
    assert error.endswith(f" for {resumable.path}; set weights.directory to another for a copy of that run\n")


def test_a_port_in_use_is_named(config_file, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["--config", str(config_file), "--set", f"auditor.grpc_port={port}"]) == 2
    assert f"port {port} is in use" in capsys.readouterr().err


def test_an_auditor_that_does_not_answer_is_named_before_anything_is_started(config_file, capsys, monkeypatch):
    monkeypatch.setattr(job, "_READY_SECONDS", 0.3)
    away = ["--set", "auditor.grpc=127.0.0.1:1", "--set", "auditor.http=http://127.0.0.1:1"]
    assert main(["--config", str(config_file), *away]) == 2
    assert "the auditor at http://127.0.0.1:1 is not ready" in capsys.readouterr().err


def test_a_ray_cluster_that_does_not_answer_is_named_at_once(config_file, capsys):
    assert main(["--config", str(config_file), "--set", "ray.address=127.0.0.1:1"]) == 2
    assert "nobody answers at the Ray cluster's address 127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize(("tp_size", "needs"), [(1, 1), (2, 4)])
def test_a_job_for_gpus_that_are_not_there_is_refused_before_it_has_a_folder(
    config_file, tmp_path, capsys, monkeypatch, tp_size, needs
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: needs - 1)
    ranks = ["numerics.segments=2", f"rollout.tp_size={tp_size}", f"trainer.tp_size={tp_size}"]
    sets = [part for one in ("numerics.profile=sm90", *ranks) for part in ("--set", one)]
    assert main(["--config", str(config_file), *sets]) == 2
    said = f"of which this job needs {needs} and this machine has {needs - 1}; numerics.profile = portable runs on any"
    assert said in capsys.readouterr().err
    assert not list((tmp_path / "runs").glob("*-strict"))


def test_a_run_that_did_not_begin_is_not_the_latest(config_file, tmp_path, capsys):
    assert main(["--config", str(config_file), "--set", "ray.address=127.0.0.1:1"]) == 2
    assert not (tmp_path / "runs" / "latest").exists()


def test_a_folder_that_cannot_be_made_is_named(config_file, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["--config", str(config_file), "--set", f"run.directory={tmp_path / 'file' / 'runs'}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert str(tmp_path / "file") in error


def test_help_lists_every_key(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    assert "trainer.learning_rate" in capsys.readouterr().out
