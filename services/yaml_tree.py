"""YAML 1.2 for people's configs: 1e-6 is a number, `no` a text, and a key that is there twice an error."""

from io import StringIO
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import YAMLError

from services.errors import ConfigError


def read_yaml(text: str, source: str) -> Any:
    """Return what `text` says (None if nothing). source: what it is, as a message begins.

    Raises ConfigError with one line.
    """
    try:
        return _yaml().load(text)
    except DuplicateKeyError as error:
        key = " ".join(error.problem.partition(" with value ")[0].removeprefix("found duplicate key ").split())
        line = error.problem_mark.line + 1
        raise ConfigError(f"{source}: key {key[:80]} is there again in line {line}; keep one") from None
    except YAMLError as error:
        raise ConfigError(f"{source} is not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{source} is nested too deeply; a config has sections, and keys in them") from None
    except (ValueError, ArithmeticError, LookupError, AttributeError, TypeError) as error:
        # A date of month 99, an integer of 5,000 digits, `!!bool maybe`: left to Python's own errors.
        raise ConfigError(f"{source} holds a value that cannot be read: {error}") from None


def write_yaml(tree: Any) -> str:
    """Return text that `read_yaml` reads as `tree`, keys in its order."""
    yaml, text = _yaml(), StringIO()
    yaml.default_flow_style = yaml.allow_unicode = False
    yaml.width = 2**31  # ruamel.yaml 0.19 adds blanks where it breaks a line before an escaped character
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # its class says None
    yaml.dump(tree, text)
    return text.getvalue()


def _yaml() -> YAML:
    return YAML(typ="safe", pure=True)
