"""A run's folder, its checkpoints, and how a run is found again."""

import pytest

from services.config import build_config, load_config
from services.errors import CheckpointError
from services.job import weights_root
from services.run_folder import Checkpoint, RunFolder


@pytest.fixture
def config(tmp_path):
    return build_config({"run": {"directory": str(tmp_path / "runs"), "steps": 9}})


def test_a_new_run_keeps_its_config_and_is_the_latest_once_it_has_begun(config):
    folder = RunFolder.create(config)
    assert load_config(folder.config_file) == config
    assert not (folder.path.parent / "latest").exists()
    folder.point_latest()
    assert (folder.path.parent / "latest").resolve() == folder.path


def test_two_runs_of_one_second_have_two_names(config):
    first, second = RunFolder.create(config), RunFolder.create(config)
    assert first.run_id != second.run_id
    first.point_latest()
    second.point_latest()
    assert (first.path.parent / "latest").resolve() == second.path


def test_a_run_is_found_by_its_name_its_folder_and_as_the_latest(config):
    folder = RunFolder.create(config)
    root = folder.path.parent
    assert RunFolder.open(folder.run_id, root) == RunFolder.open(str(folder.path), root) == folder
    folder.point_latest()
    assert RunFolder.open("latest", root) == folder


def test_a_run_that_is_not_there_is_named_with_the_ones_that_are(config):
    folder = RunFolder.create(config)
    folder.begin_checkpoint(1)
    with pytest.raises(CheckpointError, match=f"no run 'x' in .*; runs with checkpoints: {folder.run_id}"):
        RunFolder.open("x", folder.path.parent)


def test_a_run_without_a_checkpoint_cannot_be_resumed(config):
    with pytest.raises(CheckpointError, match=r"has no checkpoint; set run\.checkpoint_every"):
        RunFolder.create(config).newest_checkpoint()


def test_a_half_written_checkpoint_is_never_used_and_an_older_one_goes_when_the_next_is_there(config):
    folder = RunFolder.create(config)
    kept = folder.finish_checkpoint(Checkpoint(folder.begin_checkpoint(2), 2, 3, "ab"))
    (folder.begin_checkpoint(4) / "masters").write_text("half")
    assert folder.newest_checkpoint() == kept
    newer = folder.finish_checkpoint(Checkpoint(folder.begin_checkpoint(4), 4, 5, "cd"))
    assert folder.newest_checkpoint() == newer
    assert not kept.folder.exists()
    assert [p.name for p in newer.folder.iterdir()] == ["state.json"]


def test_a_checkpoint_that_cannot_be_read_is_named(config):
    folder = RunFolder.create(config)
    checkpoint = folder.finish_checkpoint(Checkpoint(folder.begin_checkpoint(2), 2, 3, "ab"))
    (checkpoint.folder / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match="step000002 cannot be read"):
        folder.newest_checkpoint()


def test_runs_that_share_a_disk_for_weights_do_not_share_a_folder(config, tmp_path):
    shared = config.model_copy(update={"weights": config.weights.model_copy(update={"directory": str(tmp_path)})})
    first, second = RunFolder.create(config), RunFolder.create(config)
    assert weights_root(shared, first) == tmp_path / first.run_id
    assert weights_root(shared, second) == tmp_path / second.run_id
    assert weights_root(config, first) == first.path / "weights"
