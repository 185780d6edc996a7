"""Real vLLM engines on tiny models. In process unless a test says otherwise: a start costs a second, not twelve."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.rollout.engine import EngineOptions, RolloutEngine
from tests.models import TINY_MODELS, write_tiny_model

MakeEngine = Callable[..., RolloutEngine]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name → folder of each tiny model with the weights of seed 0, and `<name>-1` with those of seed 1."""
    root = tmp_path_factory.mktemp("models")
    return {
        name + suffix: write_tiny_model(root / (name + suffix), spec, seed)
        for name, spec in TINY_MODELS.items()
        for seed, suffix in ((0, ""), (1, "-1"))
    }


@pytest.fixture(scope="session")
def freeze() -> Iterator[Callable[[], None]]:
    """Leaves what there is out of later collections, of which vLLM makes seven an engine: of all modules, 2.3 s."""
    freeze = gc.freeze
    with pytest.MonkeyPatch.context() as patch:
        for name in ("freeze", "unfreeze"):  # vLLM's own would keep a dead engine, and bring the modules back
            patch.setattr(gc, name, lambda: None)
        yield freeze


@pytest.fixture
def make_engine(freeze: Callable[[], None]) -> Iterator[MakeEngine]:
    """Build engines that stop when the test ends."""
    engines: list[RolloutEngine] = []

    def make(model: Path, **options: Any) -> RolloutEngine:
        engines.append(RolloutEngine(model, EngineOptions(**options)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
    engines.clear()
    gc.collect()
    freeze()
