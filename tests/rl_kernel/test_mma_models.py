"""MMA models: the contract's sentence in rational arithmetic, the plain C++, the AVX-512 C++, an H200, and mmasim."""

from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_kernel.compare import compare_bits
from rl_kernel.contract import MMA_MODELS
from rl_kernel.reference import _reference
from tests.rl_kernel.mma_draws import Draw, draws
from tests.rl_kernel.mma_rules import BF16, FP16, MUTANTS, RULES, Rule, product_matrix

_HARDWARE = Path(__file__).with_name("data") / "h200_mma.npz"
_DEPTHS = (1, 15, 16, 17, 48, 64)
_BY_NAME = {d.name: d for d in draws(2, 3, _DEPTHS)}
_MODELS = sorted(RULES)


def reference(model: str, draw: Draw) -> np.ndarray:
    result = draw.c.copy()
    _reference.accumulate(result, draw.a, draw.b, model, draw.form == "fp16")
    return result


def by_rule(rule: Rule, draw: Draw) -> np.ndarray:
    return product_matrix(rule, draw.c, draw.a, draw.b, FP16 if draw.form == "fp16" else BF16)


@pytest.fixture
def plain_loops() -> Iterator[None]:
    _reference.force_plain_mma(True)
    yield
    _reference.force_plain_mma(False)


def test_the_loops_and_the_contract_have_the_same_models() -> None:
    said = [(m.name, m.group, m.fraction_bits or 0, m.lowest_exponent or 0) for m in MMA_MODELS.values()]
    assert sorted(_reference.mma_models()) == sorted(said)
    assert set(RULES) == set(MMA_MODELS) - {"fma32"}
    for name, rule in RULES.items():
        model = MMA_MODELS[name]
        assert (rule.group, rule.fraction_bits, rule.lowest) == (
            model.group,
            model.fraction_bits,
            model.lowest_exponent,
        )


def test_an_unknown_model_names_the_known_ones() -> None:
    draw = next(iter(_BY_NAME.values()))
    with pytest.raises(ValueError, match="no MMA model 'sm70'; it has: fma32, sm80, sm90, sm100, cdna3"):
        reference("sm70", draw)


@pytest.mark.parametrize("model", _MODELS)
@pytest.mark.parametrize("name", _BY_NAME)
def test_both_loops_compute_the_sentence_of_the_contract(model: str, name: str, request: pytest.FixtureRequest) -> None:
    draw = _BY_NAME[name]
    expected = by_rule(RULES[model], draw)
    assert compare_bits(reference(model, draw), expected).equal
    request.getfixturevalue("plain_loops")
    assert compare_bits(reference(model, draw), expected).equal


@pytest.mark.parametrize("model", _MODELS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 512), (5, 33, 512), (4, 32, 130), (3, 70, 257), (9, 64, 16)])
def test_vector_loops_have_the_bits_of_the_plain_ones_at_every_edge(
    model: str, m: int, n: int, k: int, request: pytest.FixtureRequest
) -> None:
    cases = list(draws(m, n, (k,), seed=m))
    vector = [reference(model, draw) for draw in cases]
    request.getfixturevalue("plain_loops")
    for draw, found in zip(cases, vector, strict=True):
        assert compare_bits(found, reference(model, draw)).equal, draw.name


_OPERAND = st.integers(0, 0xFFFF)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from(_MODELS), st.booleans(), st.integers(1, 34))
def test_any_bits_at_all_give_the_same_bits(data: st.DataObject, model: str, fp16: bool, k: int) -> None:
    a, b = (np.array(data.draw(st.lists(_OPERAND, min_size=k, max_size=k)), np.uint16) for _ in range(2))
    c = np.array([[data.draw(st.integers(0, 0xFFFFFFFF))]], np.uint32).view(np.float32)
    draw = Draw("any", "fp16" if fp16 else "bf16", a[None, :], b[:, None], c)
    expected = by_rule(RULES[model], draw)
    for plain in (False, True):
        _reference.force_plain_mma(plain)
        try:
            assert compare_bits(reference(model, draw), expected).equal
        finally:
            _reference.force_plain_mma(False)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from(_MODELS), st.integers(0, 60), st.integers(2, 17))
def test_nearby_exponents_give_the_same_bits(data: st.DataObject, model: str, spread: int, k: int) -> None:
    """Bits drawn at random are mostly huge or tiny beside each other; here all 17 terms matter to the sum."""
    element = st.builds(
        lambda sign, exponent, fraction: sign << 15 | (127 + exponent) << 7 | fraction,
        st.integers(0, 1), st.integers(-spread // 2, spread // 2), st.integers(0, 127),
    )  # fmt: skip
    a, b = (np.array(data.draw(st.lists(element, min_size=k, max_size=k)), np.uint16) for _ in range(2))
    c = np.array([[data.draw(st.floats(-(2.0**spread), 2.0**spread, width=32))]], np.float32)
    draw = Draw("near", "bf16", a[None, :], b[:, None], c)
    assert compare_bits(reference(model, draw), by_rule(RULES[model], draw)).equal


@cache
def _proof() -> list[Draw]:
    """The draws that a wrong rule must fail on, besides those of the hardware."""
    return list(draws(4, 4, (33,), seed=5)) + list(islice(draws(4, 4, (64,), seed=6), 6)) + _hardware()


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_rule_is_rejected(name: str) -> None:
    model, mutant = MUTANTS[name]
    rejected = any(compare_bits(reference(model, d), by_rule(mutant, d)).differing for d in _proof())
    assert rejected, f"nothing here tells {model} from {name}"


def _hardware() -> list[Draw]:
    with np.load(_HARDWARE) as data:
        names = sorted({key.rpartition("/")[0] for key in data})
        return [Draw(n, n[:4], *(np.ascontiguousarray(data[f"{n}/{x}"]) for x in "abc")) for n in names]


@pytest.mark.parametrize("draw", _hardware(), ids=lambda d: d.name)
def test_sm90_has_the_bits_that_an_h200_computed(draw: Draw) -> None:
    """Blocks of the outputs of `python -m tests.gpu.mma_probe` on an H200; wgmma and mma.sync gave the same bits."""
    with np.load(_HARDWARE) as data:
        expected = np.ascontiguousarray(data[f"{draw.name}/d"])
    assert compare_bits(reference("sm90", draw), expected).equal


_SIMULATED = {
    "sm80": ("nv_ptx", "Ampere", "m16n8k16.f32.{0}.{0}.f32"),
    "sm90": ("nv_ptx", "Hopper", "m16n8k16.f32.{0}.{0}.f32"),
    "sm100": ("nv_ptx", "Blackwell", "m16n8k16.f32.{0}.{0}.f32"),
    "cdna3": ("amd", "CDNA3", "f32_32x32x8_{0}"),
}


@pytest.mark.parametrize("model", _SIMULATED)
def test_the_published_simulator_computes_the_same_bits(model: str) -> None:
    """mmasim 2.1.1 by the authors of arXiv 2511.10909, who had the hardware."""
    import torch
    from mmasim.amd.sim import MFMA
    from mmasim.nv_ptx.sim import MMA

    vendor, architecture, instruction = _SIMULATED[model]
    compared = 0
    for draw in draws(8, 8, (16, 48), seed=8):
        form = "bf16" if draw.form == "bf16" else "f16"
        simulator = (MMA if vendor == "nv_ptx" else MFMA)(architecture, instruction.format(form))
        dtype = torch.bfloat16 if form == "bf16" else torch.float16
        a, b = (torch.from_numpy(x.copy()).view(dtype) for x in (draw.a, draw.b))
        expected = simulator.arithmetic_op(a, b, torch.from_numpy(draw.c.copy())).numpy()
        assert compare_bits(reference(model, draw), expected).equal, draw.name
        compared += expected.size
    assert compared == 62 * 64


def test_a_zero_beside_a_huge_operand_does_not_raise_the_exponent() -> None:
    huge, zero, one, small = 0x7F00, 0x0000, 0x3F80, 0x3300  # 2^127, 0, 1, 2^-25
    a, b = np.array([[huge, one, small]], np.uint16), np.array([[zero], [one], [one]], np.uint16)
    draw = Draw("", "bf16", a, b, np.zeros((1, 1), np.float32))
    assert reference("sm90", draw)[0, 0] == np.float32(1.0)
    draw.a[0, 1] = zero
    assert reference("sm90", draw)[0, 0] == np.float32(2.0**-25)


def test_an_infinity_stays_and_meets_its_opposite_in_one_nan() -> None:
    one, inf = 0x3F80, 0x7F80
    a = np.full((1, 64), one, np.uint16)
    b = np.full((64, 2), one, np.uint16)
    b[0] = inf
    b[40, 1] = inf | 0x8000
    for model in _MODELS:
        found = reference(model, Draw("", "bf16", a, b, np.zeros((1, 2), np.float32)))
        assert found.view(np.uint32).tolist() == [[0x7F800000, 0x7FFFFFFF]], model


@pytest.mark.parametrize("model", [m for m in MMA_MODELS if m != "fma32"])
@pytest.mark.parametrize("k", [1, 7, 15, 40])
def test_a_chain_is_padded_with_zeros_to_a_multiple_of_the_group(model: str, k: int) -> None:
    for draw in draws(3, 5, (k,), seed=9):
        depth = draw.a.shape[1]
        full = -depth % MMA_MODELS[model].group
        padded = Draw(
            draw.name, draw.form, np.pad(draw.a, ((0, 0), (0, full))), np.pad(draw.b, ((0, full), (0, 0))), draw.c
        )
        assert compare_bits(reference(model, draw), reference(model, padded)).equal, draw.name
