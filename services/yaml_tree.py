"""YAML for people's configs: a key that is there twice is an error, and so is all that PyYAML stumbles over."""

from typing import Any

import yaml

from services.errors import ConfigError


def read_yaml(text: str, source: str) -> Any:
    """Return what `text` says (None if nothing). source: what it is, as a message begins.

    Raises ConfigError with one line.
    """
    try:
        return _read(text, source)
    except ConfigError:
        raise
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{source} is nested too deeply; a config has sections, and keys in them") from None
    except (ValueError, ArithmeticError, LookupError, AttributeError, TypeError) as error:
        # A date of month 99, an integer of 5,000 digits, `!!bool maybe`: PyYAML leaves them to Python's own errors.
        raise ConfigError(f"{source} holds a value that cannot be read: {error}") from None


def _read(text: str, source: str) -> Any:
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_twice(node, source)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _refuse_twice(root: yaml.Node, source: str) -> None:
    """On the nodes, since the mappings that are made of them have forgotten all but the last."""
    waiting, seen = [root], {id(root)}
    while waiting:
        node = waiting.pop()
        below = list(node.value) if isinstance(node, yaml.SequenceNode) else []
        if isinstance(node, yaml.MappingNode):
            first: dict[tuple[str, str], int] = {}
            for key, value in node.value:
                below += [key, value]
                if not isinstance(key, yaml.ScalarNode):
                    continue
                name, line = (key.tag, key.value), key.start_mark.line + 1
                if name in first:
                    raise ConfigError(
                        f"{source}: key {key.value!r} is there twice, in lines {first[name]} and {line}; keep one"
                    )
                first[name] = line
        fresh = [one for one in below if id(one) not in seen]
        seen.update(id(one) for one in fresh)
        waiting += fresh
