"""Ops by name: those of our own engines, known here, and anybody's by MODULE:NAME. Loaded when a replay asks for them.

The auditor imports none of what it audits; these names are how a person brings it in, to look for a root.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Final

from auditor.errors import ConfigError
from rl_kernel.errors import PlanError
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.ops import Reference

# What our engines run: under a contract, and without one (Megatron-core, vLLM).
OURS: Final[Mapping[str, str]] = {
    "strict": "rl_kernel.integrations.replay:strict",
    "native": "rl_kernel.integrations.replay:native",
    "native-vllm": "rl_kernel.integrations.replay_vllm:together",
    "native-vllm-alone": "rl_kernel.integrations.replay_vllm:alone",
}


def load_ops(name: str, decoder: Decoder, prompt_len: int) -> Callable[[], Any]:
    """What makes the ops called by a name of `OURS` or MODULE:NAME; ConfigError where they are not to be had here."""
    if name in OURS:
        factory = _attribute(OURS[name], name)
        try:
            factory(decoder, prompt_len)
        except (ImportError, PlanError) as error:
            raise ConfigError(f"the {name} ops do not run here: {error}") from None
        return lambda: factory(decoder, prompt_len)
    plug = _attribute(name, name)
    if isinstance(plug, type) and issubclass(plug, Reference):
        settings = {field.name: getattr(decoder.reference, field.name) for field in fields(Reference)}
        return lambda: plug(**settings)
    return lambda: plug(decoder.reference)


def _attribute(path: str, name: str) -> Any:
    module, _, attribute = path.partition(":")
    try:
        found = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
        if not callable(found):
            raise AttributeError("it cannot be called")
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{name!r} cannot be loaded ({error}); give {', '.join(OURS)} or MODULE:NAME of ops of your own"
        ) from None
    return found
