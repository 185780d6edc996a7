"""The executable contract: slow, obvious, independent of every backend. NumPy and C++ only; never torch."""

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """The compiled part, or where it is missing one line that says why."""
    if name != "_reference":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return importlib.import_module("._reference", __name__)
    except ModuleNotFoundError:
        raise ImportError(
            f"rl_kernel is not built in {__path__[0]}: `make build` builds it; where it is installed, start Python"
            " outside of the checkout, or as `python -P`"
        ) from None
