"""The config tree: what is refused, and that the refusal helps."""

import dataclasses
from pathlib import Path

import pydantic
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.config import Config, build_config, describe, load_config
from services.errors import ConfigError
from services.yaml_tree import read_yaml, write_yaml


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
        ("rollout.temperature=0", "rollout.temperature = 0: input should be greater than or equal to 0.01"),
        ("rollout.temperature=0.001", "rollout.temperature = 0.001: input should be greater than or equal to 0.01"),
        ("auditor.recompute_rate=1.5", "auditor.recompute_rate = 1.5: input should be less than or equal to 1"),
        ("numerics.mode=fast", "numerics.mode = 'fast': input should be 'strict' or 'native'"),
        ("task.samples_per_prompt=1", "task.samples_per_prompt = 1: input should be greater than or equal to 2"),
        ("rollout=3", "rollout = 3 should be a section with keys"),
        ("trainer.learning_rate=.inf", "trainer.learning_rate = inf: input should be a finite number"),
        ("rollout", "has no key or no value"),
        ("run.name=a/b", "run.name = 'a/b': use up to 64 letters, digits, '.', '_' and '-', the first a letter"),
        ("trainer.betas=[0.9, 1.0]", "trainer.betas.1 = 1.0: input should be less than 1"),
        ("trainer.betas=[-0.1, 0.9]", "trainer.betas.0 = -0.1: input should be greater than or equal to 0"),
        ("trainer.betas=[0.9]", "trainer.betas = [0.9]: input should be two numbers, such as [0.9, 0.99]"),
        ("trainer.betas=!!set {0.9, 0.8}", "input should be two numbers, such as [0.9, 0.99]"),
        ("trainer.betas=[true, 0.9]", "trainer.betas.0 = True: input should be a valid number"),
        ("trainer.learning_rate=true", "trainer.learning_rate = True: input should be a valid number"),
        ("trainer.learning_rate='1e-6'", "trainer.learning_rate = '1e-6': input should be a valid number"),
        ("run.steps=true", "run.steps = True: input should be a valid integer"),
        ("numerics.threads=1000000", "numerics.threads = 1000000: input should be less than or equal to 1024"),
        ("task.shots=100000000", "task.shots = 100000000: input should be less than or equal to 10000"),
        ("run.seed=0x" + "f" * 5000, "run.seed = a number too long to show: input should be less than or equal to"),
        ("run.seed=" + "1" * 5000, "holds a value that cannot be read: Exceeds the limit (4300 digits)"),
        ("run.name=2026-99-99", "holds a value that cannot be read: month must be in 1..12"),
        ("run.seed=[", "the value of --set 'run.seed=[' is not YAML"),
        ("run=" + "[" * 1000, "is nested too deeply"),
        ("run={steps: 1, steps: 2}", 'key "steps" is there again in line 1; keep one'),
        ('run.directory="a\\0b"', r"run.directory = 'a\x00b': use characters that can be printed only"),
        ('auditor.token_file="a\\nb"', r"auditor.token_file = 'a\nb': use characters that can be printed only"),
        ('model.path="\\ud800"', r"model.path = '\ud800': use characters that can be printed only"),
        ("model.path=[" + "a, " * 1000 + "a]", "model.path = ['a', 'a', 'a', 'a', 'a', 'a', ...]: input should be"),
    ],
)
def test_a_value_that_cannot_be_right_is_refused_in_one_line(override, says):
    with pytest.raises(ConfigError) as error:
        load_config(None, [override])
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_every_number_of_the_tree_has_a_bound_on_either_side():
    for section, field in Config.model_fields.items():
        for key, inner in field.annotation.model_fields.items():
            if inner.annotation not in (int, float):
                continue
            bounds = {name for one in inner.metadata for name in ("ge", "gt", "le", "lt") if hasattr(one, name)}
            assert bounds & {"ge", "gt"}, f"{section}.{key} has no least value"
            assert bounds & {"le", "lt"}, f"{section}.{key} has no greatest value"


def test_numbers_and_words_are_those_of_yaml_1_2():
    config = load_config(None, ["trainer.learning_rate=1e-6", "run.name=no", "task.shots=010"])
    assert (config.trainer.learning_rate, config.run.name, config.task.shots) == (1e-6, "no", 10)
    with pytest.raises(ConfigError, match=r"ray\.dashboard = 'yes': input should be a valid boolean"):
        load_config(None, ["ray.dashboard=yes"])


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), st.lists))
@example(["no", "1e5", "0o17", "010", "1_0", "2026-01-01", "0x1f", "~", "", "=", "<<", "a: b", " #", "\x85", "- "])
def test_what_is_written_is_read_again(value):
    assert read_yaml(write_yaml({"key": value}), "it") == {"key": value}


def test_overrides_win_over_the_file_and_leave_the_rest_alone(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("run: {steps: 7, seed: 3}\n")
    config = load_config(file, ["run.steps=9"])
    assert (config.run.steps, config.run.seed) == (9, 3)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("run: [", "is not YAML"),
        ("- 1", "holds a list"),
        ("\xff", "cannot be read"),
        ("\x00", "is not YAML"),
        ("run: " + "[" * 1000 + "]" * 1000, "is nested too deeply"),
        ("run:\n" + "".join(" " * i + "a:\n" for i in range(1, 2000)), "is nested too deeply"),
        ("run: {steps: !!bool maybe}", "holds a value that cannot be read: 'maybe'"),
        ("run:\n  steps: 1\n  seed: 2\n  steps: 3\n", r'c\.yaml: key "steps" is there again in line 4; keep one'),
        ("run: {}\nray: {}\nrun: {}\n", 'key "run" is there again in line 3; keep one'),
    ],
)
def test_a_file_that_is_no_tree_is_refused(tmp_path, text, says):
    file = tmp_path / "c.yaml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=says):
        load_config(file)


def test_a_merged_section_may_repeat_what_it_changes(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("rollout: &both {tp_size: 2}\ntrainer: {<<: *both, tp_size: 1}\n")
    config = load_config(file)
    assert (config.rollout.tp_size, config.trainer.tp_size) == (2, 1)


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
