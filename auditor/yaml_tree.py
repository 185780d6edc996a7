"""YAML 1.2 for an operator's files: a key that is there twice is an error. No message quotes the text, for secrets."""

from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import YAMLError

from auditor.errors import ConfigError


def read_yaml(text: str, source: str) -> Any:
    """What `text` says, None if nothing. source: as a message begins. ConfigError in one line."""
    try:
        return YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = "a key is there again; keep one" if isinstance(error, DuplicateKeyError) else "not YAML"
        raise ConfigError(f"{source}{f', line {mark.line + 1}' if mark else ''}: {what}") from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply") from None
    except (ValueError, ArithmeticError, LookupError, AttributeError, TypeError):
        # A date of month 99, an integer of 5,000 digits, `!!bool maybe`: left to Python's own errors.
        raise ConfigError(f"{source}: a date, number or tagged value cannot be read; put it in quotes") from None
