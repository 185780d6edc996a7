"""What goes wrong in an actor's process: one line that survives the way to the job. No Ray is started here."""

import errno
import pickle
import urllib.error
from pathlib import Path

import pytest

from rl_kernel.errors import ModelError
from services import cluster
from services.errors import PublishError, ServicesError

LOG = Path("logs/rollout.log")


class ForeignError(Exception):
    """As pydantic's: made of more than one argument, so that it cannot be unpickled."""

    def __init__(self, title, line_errors):
        super().__init__(f"1 validation error for {title}\n  {line_errors}")


class TwoPartError(ServicesError):
    def __init__(self, what, why):
        super().__init__(f"{what}: {why}")


class Actor:
    """Its engine's start and its only method raise what they are told to."""

    def __init__(self, error):
        if error:
            raise error

    def generate(self, error):
        raise error


def travelled(error):
    return pickle.loads(pickle.dumps(error))  # noqa: S301  our own bytes


def raised(error, method="generate"):
    process = object.__new__(cluster._process(Actor, "the rollout actor", LOG))
    with pytest.raises(Exception) as found:  # noqa: PT011  which one is what is asked
        getattr(process, method)(error)
    return travelled(found.value)


@pytest.mark.parametrize("method", ["start", "generate"])
def test_a_foreign_error_that_cannot_be_pickled_reaches_the_job_with_what_it_says(method, capfd):
    error = ForeignError("ModelConfig", "Input should be a valid integer")
    with pytest.raises(TypeError):
        travelled(error)
    found = raised(error, method)
    assert type(found) is ServicesError
    assert str(found) == (
        "the rollout actor failed: ForeignError: 1 validation error for ModelConfig Input should be a valid integer; "
        "its output is in logs/rollout.log"
    )
    assert "Traceback" in capfd.readouterr().err  # which is the log, in an actor's process


@pytest.mark.parametrize(
    "error",
    [
        ModelError("m/config.json: vocab_size=None must be a whole number"),
        PublishError("weight version 3 was not confirmed"),
        OSError(errno.ENOSPC, "No space left on device", "weights/v000003"),
    ],
)
def test_what_the_job_raises_on_purpose_and_what_the_disk_says_arrives_as_it_is(error):
    found = raised(error)
    assert (type(found), found.args, str(found)) == (type(error), error.args, str(error))


@pytest.mark.parametrize(
    "error",
    [
        TwoPartError("weights", "are not there"),
        urllib.error.HTTPError("http://a", 503, "busy", {}, None),
        ValueError("x" * 10_000),
        AssertionError(),
    ],
)
def test_an_error_that_would_not_arrive_as_it_is_arrives_as_one_line(error):
    found = raised(error)
    assert type(found) is ServicesError
    assert str(found).startswith(f"the rollout actor failed: {type(error).__name__}")
    assert len(str(found)) < 600
    assert "\n" not in str(found)


def test_the_process_of_an_actor_goes_by_its_name_and_has_its_methods():
    process = cluster._process(Actor, "the rollout actor", LOG)
    assert process.__name__ == "Actor"
    assert process.generate.__name__ == "generate"


@pytest.mark.parametrize("address", ["127.0.0.1:99999999", "a" * 100 + ":1"])
def test_an_address_that_there_cannot_be_is_named(address):
    with pytest.raises(ServicesError, match=f"nobody answers at the Ray cluster's address {address}"):
        cluster._require_somebody_at(address)
