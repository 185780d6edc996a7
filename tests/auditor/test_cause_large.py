"""How a model of real size is searched: nothing known is computed, no slope is kept, and yet parts are told."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from auditor.causes.computation.formats import usual_formats
from auditor.causes.computation.precision import FORMATS, nearest_float8
from auditor.causes.evidence import CERTAIN, Suggestion
from auditor.causes.purse import Purse
from auditor.causes.table import _unsure
from auditor.causes.weights.grids import BLOCK, E4M3, INT8, ROW, Grid, Sharing, coarse
from auditor.causes.weights.parts import Layout
from auditor.causes.weights.response import Response
from auditor.causes.weights.streamed import Streamed, _edges
from auditor.causes.weights.versions import mixed_weights
from auditor.faults.world import Drawn, World, from_bf16, to_bf16
from rl_kernel.reference.ops import Bits
from tests.auditor.diagnosis import certain, oracle_of

Changed = Callable[[str, Bits, Bits], Bits]  # name, weights of the first version, own


@pytest.fixture(scope="module")
def world() -> World:
    return World(None, seed=5)


@pytest.mark.parametrize(
    ("tensor", "forwards"),
    [
        ("model.layers.1.self_attn.k_proj.weight", 0.5),
        ("lm_head.weight", 0.0),
        ("model.norm.weight", 0.0),
        ("model.layers.0.mlp.up_proj.weight", 1.0),
        ("model.embed_tokens.weight", 1.0),
    ],
)
def test_a_forward_goes_on_where_the_first_weights_are_others(
    world: World, sample: Drawn, tensor: str, forwards: float
) -> None:
    oracle, own = oracle_of(world, sample), world.decoder(sample.version)
    other = replace(own, weights={**own.weights, tensor: world.decoder(1).weights[tensor]})
    whole = world.logprobs(other, sample)
    right = oracle.from_logits(oracle.own_logits)
    before = oracle.purse._left
    assert oracle.logprobs(other).tobytes() == whole.tobytes() != right.tobytes()
    assert before - oracle.purse._left == forwards
    few = np.array([3, 9])
    assert oracle.logprobs_of_rows(other, few).tobytes() == whole[few].tobytes()


def test_effects_summed_up_on_the_way_back_are_those_of_slopes(world: World, sample: Drawn) -> None:
    oracle, at = oracle_of(world, sample), np.arange(20)
    old = world.decoder(sample.version - 1).weights
    slopes, streamed = Response(oracle, at), Streamed(oracle, at, [old])
    by_slopes, by_stream = slopes.effects([old], parts=True)[0], streamed.effects([old], parts=True)[0]
    back = np.linalg.inv(streamed._inverse)
    assert by_slopes.keys() == by_stream.keys()
    for name, effect in by_slopes.items():
        found = by_stream[name]
        right, largest = slopes._root @ effect.rows, np.abs(slopes._root @ effect.rows).max()
        assert np.abs(back @ found.rows - right).max() < 1e-3 * largest, name
        if found.columns is not None and effect.columns is not None:
            there = _edges(effect.columns.shape[1] - 1)
            right = slopes._root @ effect.columns[:, there]
            assert np.abs(back @ found.columns[:, there] - right).max() < 1e-3 * largest, name


def of_first_layer(name: str, old: Bits, own: Bits) -> Bits:
    return old if name.startswith("model.layers.0.mlp") else own


def at_a_quarter(name: str, old: Bits, own: Bits) -> Bits:
    start = from_bf16(old)
    return to_bf16(start + np.float32(0.25) * (from_bf16(own) - start)) if "proj" in name else own


@pytest.mark.parametrize(
    ("change", "cause", "words"),
    [
        (of_first_layer, "weights_never_delivered", "mlp tensors of layer 0 of version 1"),
        (at_a_quarter, "adapter_scale", "version 1 with 0.25 times what came since in proj tensors"),
    ],
)
def test_parts_of_weights_are_told_without_slopes(
    world: World, sample: Drawn, monkeypatch: pytest.MonkeyPatch, change: Changed, cause: str, words: str
) -> None:
    monkeypatch.setattr("auditor.causes.weights.mixture.response_of", lambda oracle, rows: None)
    old, own = world.decoder(1).weights, world.decoder(sample.version).weights
    wrong = world.logprobs(world.with_weights({n: change(n, old[n], own[n]) for n in own}), sample)
    certain(mixed_weights, world, sample, wrong, cause, words)


@pytest.mark.parametrize(("grid", "sharing"), [(E4M3, BLOCK), (INT8, ROW)])
def test_a_format_of_all_products_is_told_by_the_last_layers(
    world: World, sample: Drawn, monkeypatch: pytest.MonkeyPatch, grid: Grid, sharing: Sharing
) -> None:
    monkeypatch.setattr("auditor.causes.computation.formats.LARGEST", 0)
    weights, rounded = world.decoder(sample.version).weights, coarse(grid, sharing)
    wrong = world.logprobs(
        world.with_weights({n: rounded(w) if "proj" in n else w for n, w in weights.items()}), sample
    )
    certain(usual_formats, world, sample, wrong, "weight_precision", grid.name, sharing.name)


@pytest.mark.parametrize(("format_", "mantissa", "smallest", "largest"), [(0, 3, -6, 448.0), (2, 2, -14, 57344.0)])
def test_eight_bits_read_off_a_table_are_those_of_arithmetic(
    format_: int, mantissa: int, smallest: int, largest: float
) -> None:
    """Around every place where two neighbours are as near, of both signs."""
    exact = nearest_float8((np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32), mantissa, smallest, largest)
    there = np.unique(exact[np.isfinite(exact)]).astype(np.float64)
    between = ((there[1:] + there[:-1]) / 2).astype(np.float32)
    for values in (between, np.nextafter(between, np.float32(np.inf)), np.nextafter(between, np.float32(-np.inf))):
        right = nearest_float8(values, mantissa, smallest, largest)
        assert FORMATS[format_][1](values).tobytes() == right.tobytes()


def test_what_is_nothings_doing_by_chance_stands_whatever_was_not_tried() -> None:
    assert _unsure(Suggestion("adapter_scale", 0.46, "", sure=True)).score == 0.46
    assert _unsure(Suggestion("adapter_scale", 0.46, "")).score == 0.23
    assert _unsure(Suggestion("adapter_scale", CERTAIN, "")).score == CERTAIN


def test_what_was_paid_for_is_gone_on_with() -> None:
    purse = Purse(100.0, np.inf)
    with purse.turn(lambda: None, 1.0):
        purse.spend(20.0)
        assert purse.turn_is_over
        purse.renew()
        assert not purse.turn_is_over
        purse.spend(5.0)
        assert purse.turn_is_over


def test_layers_are_told_as_stages_of_a_pipeline_and_as_far_as_a_transfer_came() -> None:
    names = [f"model.layers.{at}.mlp.up_proj.weight" for at in sorted(range(12), key=str)] + ["model.norm.weight"]
    layout = Layout({name: np.zeros((2, 2), np.uint16) for name in names}, names)
    found = {frozenset(part.name for part in choice.parts) for choice in layout.choices()}
    for first, last, ends in ((4, 7, ()), (0, 8, ()), (9, 11, ("model.norm.weight",))):
        layers = (f"model.layers.{at}.mlp.up_proj.weight" for at in range(first, last + 1))
        assert frozenset((*layers, *ends)) in found
