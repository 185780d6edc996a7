"""What may change when a run is resumed: nothing that a record depends on, while a step is done again."""

import pytest

from services.config import build_config, load_config
from services.errors import ConfigError
from services.redo import UnderWay, check_redone

BASE = {"numerics": {"segments": 2}, "trainer": {"betas": [0.9, 0.95]}}


def _config(*overrides, tree=BASE):
    config = build_config(tree)
    for override in overrides:
        key, value = override
        section, name = key.split(".")
        part = type(getattr(config, section)).model_validate(getattr(config, section).model_dump() | {name: value})
        config = config.model_copy(update={section: part})
    return config


def _at(step, config, local=True):
    return UnderWay.now(step, config, local=local)


CHANGES = [
    ("trainer.tp_size", 2),
    ("rollout.tp_size", 2),
    ("rollout.temperature", 0.5),
    ("rollout.max_new_tokens", 9),
    ("trainer.learning_rate", 1e-3),
    ("trainer.betas", (0.9, 0.99)),
    ("trainer.updates_per_step", 2),
    ("auditor.layer_digests", True),
]


@pytest.mark.parametrize(("key", "value"), CHANGES)
def test_a_key_that_records_or_weights_depend_on_may_not_change_while_a_step_is_done_again(key, value):
    now = _at(4, _config((key, value)))
    with pytest.raises(ConfigError) as error:
        check_redone(_at(5, _config()), now, next_step=4)
    text = str(error.value)
    assert text.startswith(f"{key} = ")
    assert ": steps 4 to 5 were begun with " in text
    assert "resume with it and run.steps=6, and change it from the checkpoint at that end" in text
    assert "\n" not in text
    with pytest.raises(ConfigError, match=": step 4 was begun with "):
        check_redone(_at(4, _config()), now, next_step=4)


@pytest.mark.parametrize(("key", "value"), CHANGES)
def test_it_may_change_where_no_step_is_done_again(key, value):
    now = _at(4, _config((key, value)))
    check_redone(_at(3, _config()), now, next_step=4)
    check_redone(None, now, next_step=4)


def test_what_was_noted_and_read_again_is_the_same(tmp_path):
    (tmp_path / "under_way.json").write_text(_at(4, _config()).text())
    check_redone(UnderWay.read(tmp_path / "under_way.json"), _at(4, _config()), next_step=4)


@pytest.mark.parametrize(
    "change",
    [
        *(("rollout.max_model_len", 128), ("rollout.max_num_seqs", 8), ("rollout.kv_cache_mb", 64)),
        *(("rollout.prefix_caching", False), ("numerics.threads", 1), ("trainer.micro_batch_tokens", 64)),
    ],
)
def test_what_changes_no_bit_may_change_at_any_time_by_contract_and_not_without_one(change):
    check_redone(_at(4, _config()), _at(4, _config(change)), next_step=4)
    native = {"numerics": {"mode": "native"}}
    with pytest.raises(ConfigError, match=change[0].replace(".", r"\.")):
        check_redone(_at(4, _config(tree=native)), _at(4, _config(change, tree=native)), next_step=4)


def test_micro_batches_are_free_only_where_sums_have_no_groups():
    grouped = {"numerics": {"profile": "sm90"}}
    change = ("trainer.micro_batch_tokens", 64)
    with pytest.raises(ConfigError, match=r"trainer\.micro_batch_tokens = 64"):
        check_redone(_at(4, _config(tree=grouped)), _at(4, _config(change, tree=grouped)), next_step=4)


def test_another_environment_is_named_where_it_is_known():
    was, now = _at(4, _config()), _at(4, _config())
    assert {"arch", "torch", "numpy"} <= now.environment.keys()
    newer = now.model_copy(update={"environment": now.environment | {"torch": "9.9"}})
    with pytest.raises(ConfigError, match=r"torch = '9\.9': step 4 was begun with '\d"):
        check_redone(was, newer, next_step=4)
    check_redone(was, newer, next_step=5)
    check_redone(_at(4, _config(), local=False), newer, next_step=4)


def test_the_keys_that_the_message_names_are_those_of_the_config():
    keys = _at(0, load_config(None)).settings
    assert "trainer.learning_rate" in keys
    assert "rollout.kv_cache_mb" not in keys
    build_config({section: {name: value for key, value in keys.items() for s, name in [key.split(".")] if s == section}
                  for section in ("rollout", "trainer")})  # fmt: skip
