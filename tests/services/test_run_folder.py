"""A run's folder, its checkpoints, who may work in it, and how a run is found again."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.config import build_config, load_config
from services.errors import CheckpointError, ConfigError
from services.job import weights_root
from services.redo import UnderWay
from services.run_folder import Checkpoint, RunFolder, with_absolute_paths


@pytest.fixture
def config(tmp_path):
    return build_config({"run": {"directory": str(tmp_path / "runs"), "steps": 9}})


def _checkpoint(folder, next_step):
    with folder.checkpoint(next_step) as scratch:
        (scratch / "masters").write_text("bits")
        return folder.finish_checkpoint(Checkpoint(scratch, next_step, next_step + 1, "ab"))


def test_a_new_run_keeps_its_config_and_is_the_latest_once_it_has_begun(config):
    folder = RunFolder.create(config)
    assert load_config(folder.config_file) == with_absolute_paths(config)
    assert not (folder.path.parent / "latest").exists()
    folder.point_latest()
    assert (folder.path.parent / "latest").resolve() == folder.path


def test_two_runs_of_one_second_have_two_names(config):
    first, second = RunFolder.create(config), RunFolder.create(config)
    assert first.run_id != second.run_id
    first.point_latest()
    second.point_latest()
    assert (first.path.parent / "latest").resolve() == second.path


def test_a_run_whose_names_are_all_taken_is_refused_and_touches_no_other(config, monkeypatch):
    monkeypatch.setattr("services.run_folder.time.strftime", lambda _: "now")
    others = [RunFolder.create(config) for _ in range(100)]
    before = [other.config_file.stat().st_mtime_ns for other in others]
    with pytest.raises(ConfigError, match=r"has now-strict and 99 more of that second; set run\.name to another"):
        RunFolder.create(config)
    assert [other.config_file.stat().st_mtime_ns for other in others] == before


def test_a_run_is_found_by_its_name_its_folder_and_as_the_latest(config):
    folder = RunFolder.create(config)
    root = folder.path.parent
    assert RunFolder.open(folder.run_id, root) == RunFolder.open(str(folder.path), root) == folder
    folder.point_latest()
    assert RunFolder.open("latest", root) == folder


def test_a_run_that_is_not_there_is_named_with_the_ones_that_are(config):
    folder = RunFolder.create(config)
    _checkpoint(folder, 1)
    with pytest.raises(CheckpointError, match=f"no run 'x' in .*; runs with checkpoints: {folder.run_id}"):
        RunFolder.open("x", folder.path.parent)


def test_a_run_that_was_moved_or_copied_keeps_the_id_that_the_auditor_knows(config, tmp_path):
    folder = RunFolder.create(config)
    run_id = folder.run_id
    shutil.copytree(folder.path, tmp_path / "copy")
    folder.path.rename(tmp_path / "moved")
    for name in ("copy", "moved"):
        assert RunFolder.open(name, tmp_path).run_id == run_id


@pytest.mark.parametrize("text", ["", "../x\n", "a\nb\n", "a b\n"])
def test_a_run_id_that_is_none_is_named(config, text):
    folder = RunFolder.create(config)
    (folder.path / "run_id").write_text(text)
    with pytest.raises(CheckpointError, match=r"run_id holds '.*', which is no run id"):
        RunFolder.open(str(folder.path), folder.path)


def test_the_kept_config_reads_the_same_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    tree = {
        "run": {"directory": "runs"},
        "model": {"path": "model", "cache": "cache"},
        "weights": {"directory": "weights"},
        "auditor": {"token_file": "token", "tls_ca": "ca"},
    }
    kept = load_config(RunFolder.create(build_config(tree)).config_file)
    paths = (kept.run.directory, kept.model.path, kept.model.cache, kept.weights.directory)
    assert paths == tuple(str(tmp_path / name) for name in ("runs", "model", "cache", "weights"))
    assert (kept.auditor.token_file, kept.auditor.tls_ca) == (str(tmp_path / "token"), str(tmp_path / "ca"))
    assert kept.auditor.tls_key == ""
    packaged = with_absolute_paths(build_config({"weights": {"directory": ""}}))
    assert packaged.model.path == "smollm2-135m-instruct"
    assert packaged.weights.directory == ""


def test_who_resumes_goes_on_with_what_was_in_force_last_and_to_the_last_step_that_was_asked_for(config):
    folder = RunFolder.create(config)

    def resume(steps, threads):
        tree = config.model_dump()
        folder.keep_config(
            build_config(tree | {"run": tree["run"] | {"steps": steps}, "numerics": {"threads": threads}})
        )
        kept = load_config(folder.config_file)
        return kept.run.steps, kept.numerics.threads

    assert resume(steps=6, threads=3) == (9, 3)
    assert resume(steps=12, threads=4) == (12, 4)


def test_a_folder_is_held_by_one_process_and_is_free_when_that_one_is_killed(config):
    folder = RunFolder.create(config)
    hold = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from services.run_folder import RunFolder\n"
        "with RunFolder(Path(sys.argv[1])).lock():\n"
        "    print('held', flush=True)\n"
        "    time.sleep(600)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", hold, folder.path], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(CheckpointError, match=rf"run {folder.run_id} is in use by pid {holder.pid} on "),
            folder.lock(),
        ):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with folder.lock():
        assert (folder.path / ".lock").read_text().startswith(f"pid {os.getpid()} on ")
    with folder.lock():
        pass


def test_a_run_without_a_checkpoint_cannot_be_resumed(config):
    with pytest.raises(CheckpointError, match=r"has no checkpoint: it ended before the first, .* start a new run"):
        RunFolder.create(config).newest_checkpoint()


def test_a_half_written_checkpoint_is_never_used_and_an_older_one_goes_when_the_next_is_there(config):
    folder = RunFolder.create(config)
    kept = _checkpoint(folder, 2)
    left = folder.path / "checkpoints" / ".step000004.partial"  # by a kill
    left.mkdir()
    (left / "masters").write_text("half")
    assert folder.newest_checkpoint() == kept
    newer = _checkpoint(folder, 6)
    assert folder.newest_checkpoint() == newer
    assert [p.name for p in (folder.path / "checkpoints").iterdir()] == ["step000006"]
    assert sorted(p.name for p in newer.folder.iterdir()) == ["masters", "state.json"]


def test_a_checkpoint_that_fails_leaves_nothing_half_made(config):
    folder = RunFolder.create(config)
    kept = _checkpoint(folder, 2)
    with folder.checkpoint(4) as scratch:
        (scratch / "masters").write_text("half")
    assert [p.name for p in (folder.path / "checkpoints").iterdir()] == [kept.folder.name]


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name_and_has_its_name_before_the_older_one_goes(
    config, monkeypatch
):
    folder = RunFolder.create(config)
    _checkpoint(folder, 2)
    done = []
    fsync, rename, rmtree = os.fsync, Path.rename, shutil.rmtree

    def noted(handle):
        done.append(("sync", Path(os.readlink(f"/proc/self/fd/{handle}")).name))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "rename", lambda path, to: (done.append(("rename", path.name)), rename(path, to))[1])
    monkeypatch.setattr(
        shutil, "rmtree", lambda path, **how: (done.append(("remove", path.name)), rmtree(path, **how))[1]
    )
    _checkpoint(folder, 4)
    at = {what: done.index(what) for what in done}
    partial = ".step000004.partial"
    for name in ("masters", "state.json"):
        assert at["sync", name] < at["sync", partial]
    assert at["sync", partial] < at["rename", partial] < at["sync", "checkpoints"] < at["remove", "step000002"]


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ("{", "Expecting property name"),
        ("[1, 2]", "input should be a valid dictionary"),
        ("3", "input should be a valid dictionary"),
        ({"next_step": "2"}, "next_step: input should be a valid integer"),
        ({"next_step": True}, "next_step: input should be a valid integer"),
        ({"next_step": -1}, "next_step: input should be greater than or equal to 0"),
        ({"weight_version": 3.0}, "weight_version: input should be a valid integer"),
        ({"weight_digest": None}, "weight_digest: input should be a valid string"),
        ({"more": 1}, "more: extra inputs are not permitted"),
        ({"next_step": 7}, "says that it is of step 7; it is damaged"),
    ],
)
def test_a_checkpoint_whose_state_is_something_else_is_named_in_one_line(config, state, says):
    folder = RunFolder.create(config)
    file = _checkpoint(folder, 2).folder / "state.json"
    file.write_text(state if isinstance(state, str) else json.dumps(json.loads(file.read_text()) | state))
    with pytest.raises(CheckpointError, match=rf"step000002/state\.json .*{says}") as error:
        folder.newest_checkpoint()
    assert "\n" not in str(error.value)


def test_the_step_under_way_is_remembered_and_what_is_none_is_named(config):
    folder = RunFolder.create(config)
    assert folder.under_way is None
    noted = UnderWay.now(3, config, local=True)
    folder.begin_step(noted)
    assert folder.under_way == noted
    (folder.path / "under_way.json").write_text('{"step": "3"}')
    with pytest.raises(CheckpointError, match=r"under_way\.json cannot be read: step: input should be a valid integer"):
        _ = folder.under_way


def test_runs_that_share_a_disk_for_weights_do_not_share_a_folder(config, tmp_path):
    shared = config.model_copy(update={"weights": config.weights.model_copy(update={"directory": str(tmp_path)})})
    first, second = RunFolder.create(config), RunFolder.create(config)
    assert weights_root(shared, first) == tmp_path / first.run_id
    assert weights_root(shared, second) == tmp_path / second.run_id
    assert weights_root(config, first) == first.path / "weights"
