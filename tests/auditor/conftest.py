"""Hypothesis without a clock: what else the machine does is no failure of a test. One PostgreSQL for all tests."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.auditor.postgres_server import PostgresServer

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A real server; each test begins with `fresh_database`."""
    server = PostgresServer()
    yield server
    server.close()
