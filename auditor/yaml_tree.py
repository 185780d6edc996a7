"""YAML for an operator's files: a key that is there twice is an error. No message quotes the text: it holds secrets."""

from typing import Any

import yaml

from auditor.errors import ConfigError


def read_yaml(text: str, source: str) -> Any:
    """What `text` says, None if nothing. source: as a message begins. ConfigError in one line."""
    loader = None
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_twice(node, source)
        return loader.construct_document(node)
    except ConfigError:
        raise
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise ConfigError(f"{source}{f', line {mark.line + 1}' if mark else ''}: not YAML") from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply") from None
    except (ValueError, ArithmeticError, LookupError, AttributeError, TypeError):
        # A date of month 99, an integer of 5,000 digits, `!!bool maybe`: PyYAML leaves them to Python's own errors.
        raise ConfigError(f"{source}: a date, number or tagged value cannot be read; put it in quotes") from None
    finally:
        if loader is not None:
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
                    raise ConfigError(f"{source}, line {line}: the key of line {first[name]} is there again; keep one")
                first[name] = line
        fresh = [one for one in below if id(one) not in seen]
        seen.update(id(one) for one in fresh)
        waiting += fresh
