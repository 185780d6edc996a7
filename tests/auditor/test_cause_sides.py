"""Of which side a cause is said, where both sides are wrong: as of stock engines, whose values all differ."""

from dataclasses import replace

import numpy as np
import pytest

from auditor.causes.evidence import Suggestion
from auditor.causes.sample import Weights, diagnose_sample
from auditor.causes.table import ranked
from auditor.faults.world import VERSIONS, Drawn, World
from auditor.judge import ReferenceLogprobs
from rl_kernel.contracts import model_contract


@pytest.fixture(scope="module")
def world() -> World:
    return World(None, seed=6)


@pytest.fixture(scope="module")
def sample(world: World) -> Drawn:
    (drawn,) = world.draw(1, 16, 48)
    return replace(drawn, temperature=0.7)


def test_a_fault_of_one_side_among_roundings_of_both_is_said_of_that_side(world: World, sample: Drawn) -> None:
    rollout, trainer = world.records(sample)
    truth, decoder = trainer.logprobs, world.decoder(sample.version)
    in_parts = world.logprobs(replace(decoder, contract=model_contract("portable", segments=4)), sample)
    hot = world.logprobs(replace(decoder, contract=model_contract("portable", segments=1)), sample, 1.0)
    sides = replace(rollout, logprobs=in_parts), replace(trainer, logprobs=hot)
    weights = Weights(decoder, range(1, VERSIONS + 1), world.decoder)
    found = {
        said.cause: said.to_json()
        for said in diagnose_sample(*sides, ReferenceLogprobs(truth, truth, "fma32"), weights, budget=40)
    }
    assert found["temperature"]["side"] == "trainer"
    assert found["reduction_order"]["side"] == "rollout"


def test_a_cause_of_both_sides_has_the_evidence_of_both_unless_one_is_much_less_likely() -> None:
    one, other = (
        Suggestion("reduction_order", score, f"evidence {side}", side=side)
        for score, side in ((0.44, "rollout"), (0.4, "trainer"))
    )
    (said,) = ranked([other, one])
    assert (said.side, said.score, said.evidence) == (
        "both",
        0.44,
        "rollout: evidence rollout; trainer: evidence trainer",
    )
    (said,) = ranked([one, replace(other, score=0.1)])
    assert (said.side, said.evidence) == ("rollout", "evidence rollout")
    (said,) = ranked([replace(one, side=""), replace(other, side="", score=0.9)])
    assert (said.side, said.score) == ("", 0.9)
    assert "side" not in said.to_json()
    assert np.isclose(said.to_json()["score"], 0.9)
