"""Hypothesis without a clock: what else the machine does is no failure of a test. One PostgreSQL for all tests.

And the one sample that the tests of causes break, drawn from each file's own `world`.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from auditor.faults.world import Drawn, World
from auditor.storage.database import open_database
from tests.auditor.postgres_server import Open, PostgresServer

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A real server; each test begins with `fresh_database`."""
    server = PostgresServer()
    yield server
    server.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens the same fresh database again and again."""
    if request.param == "sqlite":
        return lambda writer: open_database(str(tmp_path / "ledger.db"), writer)
    server: PostgresServer = request.getfixturevalue("postgres")
    server.fresh_database()
    return lambda writer: open_database(server.url, writer)


@pytest.fixture(scope="module")
def sample(world: World) -> Drawn:
    """24 tokens of a prompt and 72 of a response; a file that wants another one overrides it."""
    (drawn,) = world.draw(1, 24, 72)
    return drawn
