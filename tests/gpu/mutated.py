"""A kernel's module with one piece of its text changed, as a module of its own."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def mutated(folder: Path, source: Path, old: str, new: str) -> ModuleType:
    """The module in `source` with `new` instead of `old`, which stands there once; its file goes into `folder`."""
    text = source.read_text()
    assert text.count(old) == 1, old
    path = folder / f"mutant_{source.name}"
    path.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    found = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found
