"""The config tree: what is refused, and that the refusal helps."""

import dataclasses
from pathlib import Path

import pydantic
import pytest

from services.config import Config, build_config, describe, load_config
from services.errors import ConfigError


def test_no_file_gives_the_defaults():
    assert load_config(None) == Config()


def test_the_shipped_configs_can_be_read():
    files = sorted(Path("deploy/configs").glob("*.yaml"))
    assert files
    for file in files:
        load_config(file)


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("rollout.tpsize=2", "rollout.tp_size"),
        ("trainer.lerning_rate=1", "trainer.learning_rate"),
        ("rollot.tp_size=2", "rollout"),
        ("steps=2", "run.steps"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(override, nearest):
    with pytest.raises(ConfigError, match="unknown key") as error:
        load_config(None, [override])
    assert repr(nearest) in str(error.value)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("rollout.tp_size=0", "rollout.tp_size = 0: input should be greater than or equal to 1"),
        ("rollout.tp_size='2'", "rollout.tp_size = '2': input should be a valid integer"),
        ("rollout.temperature=0", "rollout.temperature = 0: input should be greater than 0"),
        ("auditor.recompute_rate=1.5", "auditor.recompute_rate = 1.5: input should be less than or equal to 1"),
        ("numerics.mode=fast", "numerics.mode = 'fast': input should be 'strict' or 'native'"),
        ("task.samples_per_prompt=1", "task.samples_per_prompt = 1: input should be greater than or equal to 2"),
        ("rollout=3", "rollout = 3 should be a section with keys"),
        ("trainer.learning_rate=.inf", "trainer.learning_rate = inf: input should be a finite number"),
        ("rollout", "has no key or no value"),
        ("run.name=a/b", "run.name = 'a/b': use up to 64 letters, digits, '.', '_' and '-', the first a letter"),
    ],
)
def test_a_value_that_cannot_be_right_is_refused_in_one_line(override, says):
    with pytest.raises(ConfigError) as error:
        load_config(None, [override])
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_number_that_yaml_takes_for_a_string_is_a_number():
    assert load_config(None, ["trainer.learning_rate=1e-6"]).trainer.learning_rate == 1e-6


def test_overrides_win_over_the_file_and_leave_the_rest_alone(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("run: {steps: 7, seed: 3}\n")
    config = load_config(file, ["run.steps=9"])
    assert (config.run.steps, config.run.seed) == (9, 3)


@pytest.mark.parametrize(
    ("text", "says"), [("run: [", "is not YAML"), ("- 1", "holds a list"), ("\xff", "cannot be read")]
)
def test_a_file_that_is_no_tree_is_refused(tmp_path, text, says):
    file = tmp_path / "c.yaml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=says):
        load_config(file)


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match=r"nowhere\.yaml does not exist"):
        load_config(Path("nowhere.yaml"))


def test_the_tree_is_frozen_and_survives_a_round_trip():
    config = load_config(None, ["trainer.betas=[0.8, 0.95]"])
    with pytest.raises(pydantic.ValidationError):
        config.run.steps = 3
    assert build_config(config.model_dump(mode="json")) == config


def test_help_explains_every_key():
    text = describe()
    for section, field in Config.model_fields.items():
        for key, inner in field.annotation.model_fields.items():
            assert f"{section}.{key} = " in text
            assert inner.description, f"{section}.{key} has no description"


def test_records_are_frozen():
    from services import records

    for name in ("WeightVersion", "Prompt", "Sampling", "Request", "Rollout", "Sample", "Batch", "TrainOutcome"):
        record = getattr(records, name)
        assert record.__dataclass_params__.frozen
        assert f"{name}(" in record.__doc__, f"{name} shows no example"
        assert dataclasses.fields(record)
