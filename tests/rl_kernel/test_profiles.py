"""The whole reference under every profile: the same properties, other bits."""

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from rl_kernel.compare import compare_bits
from rl_kernel.contract import PROFILES
from rl_kernel.contracts import model_contract
from rl_kernel.reference import _reference
from rl_kernel.reference.model import Decoder
from tests.contracts.cases import Case, all_cases
from tests.contracts.draws import bf16, offsets
from tests.contracts.subjects import ReferenceSubject
from tests.models import LLAMA, QWEN3, TinyModel, write_tiny_model

_SAME_MMA = {"sm90", "sm100"}  # one rule, so profiles that differ only in it have the same bits


@pytest.fixture
def plain_loops() -> Iterator[None]:
    _reference.force_plain_mma(True)
    yield
    _reference.force_plain_mma(False)


def _batch() -> tuple[list[np.ndarray], list[int]]:
    draw = np.random.default_rng(0)
    return [draw.integers(0, LLAMA.vocab, n) for n in (70, 3, 65, 130)], [60, 1, 5, 100]


@pytest.mark.parametrize("spec", [LLAMA, QWEN3], ids=["llama", "qwen3"])
@pytest.mark.parametrize("profile", PROFILES)
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(tmp_path: Path, profile: str, spec: TinyModel) -> None:
    decoder = Decoder.open(write_tiny_model(tmp_path / "m", spec), model_contract(profile, segments=2))
    batch, cuts = _batch()
    together = decoder.logprobs(batch, cuts, temperature=0.8)
    for ids, cut, found in zip(batch, cuts, together, strict=True):
        assert np.isfinite(found).all()
        assert compare_bits(decoder.logprobs([ids], [cut], temperature=0.8)[0], found).equal


def test_profiles_give_other_bits_and_nearly_the_same_numbers(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", QWEN3)
    batch, cuts = _batch()
    found = {p: np.concatenate(Decoder.open(folder, model_contract(p)).logprobs(batch, cuts)) for p in PROFILES}
    for a, b in combinations(PROFILES, 2):
        difference = compare_bits(found[a], found[b])
        same_rule = PROFILES[a].exp2 == PROFILES[b].exp2 and {PROFILES[a].mma, PROFILES[b].mma} <= _SAME_MMA
        assert (difference.differing == 0) == same_rule, f"{a} and {b}: {difference}"
        assert difference.max_abs < 0.1


@pytest.mark.parametrize("profile", ["sm90", "sm80", "cdna3"])
def test_vector_loops_have_the_bits_of_the_plain_ones_in_every_op(profile: str, request: pytest.FixtureRequest) -> None:
    subject = ReferenceSubject(profile)
    cases = [c for c in all_cases(subject) if c.method.startswith(("gemm", "linear_logp")) or _short(c)]
    vector = [case.run(subject) for case in cases]
    request.getfixturevalue("plain_loops")
    for case, expected in zip(cases, vector, strict=True):
        for a, b in zip(case.run(subject), expected, strict=True):
            assert compare_bits(a, b).equal, case.name


def _short(case: Case) -> bool:
    """Attention over a hundred keys at most: the law's own loops are slow."""
    return case.method.startswith("attention") and case.args[1].shape[0] * case.args[0].shape[0] <= 10_000


@pytest.mark.parametrize("profile", PROFILES)
def test_gradients_of_a_prefix_do_not_depend_on_where_its_last_block_ends(profile: str) -> None:
    """Tokens that get no gradient and come last change nothing before them: their terms are +0 * +0."""
    law = ReferenceSubject(profile)
    tokens, more = 70, 131
    q, k, v, dout = (bf16(seed, more, 2, 32) for seed in (1, 2, 3, 4))
    dout[tokens:] = 0
    short = [a[:tokens] for a in (q, k, v)]
    results = {}
    for name, (a, b, c), d in (("short", short, dout[:tokens]), ("long", (q, k, v), dout)):
        cu = offsets(len(a))
        out, m, l = law.attention(a, b, c, cu, cu)
        results[name] = [g[:tokens] for g in law.attention_backward(d, a, b, c, out, m, l, cu)]
    for a, b in zip(results["short"], results["long"], strict=True):
        assert compare_bits(a, b).equal


@pytest.mark.parametrize("profile", ["sm90", "sm80", "cdna3"])
def test_gradients_group_their_terms_at_absolute_positions(profile: str) -> None:
    """dv of key j alone, from a full block of queries with masked weights +0, through the matrix model itself."""
    law = ReferenceSubject(profile)
    q, k, v, dout = (bf16(seed, 64, 1, 32) for seed in (1, 2, 3, 4))
    cu = offsets(64)
    out, m, l = law.attention(q, k, v, cu, cu)
    _, _, dv = law.attention_backward(dout, q, k, v, out, m, l, cu)
    # p of all 64 x 64 pairs, as the contract has it; what lies above the diagonal is +0.
    s = law.gemm_fp32(q[:, 0], k[:, 0])
    scale = np.float32(np.log2(np.e) / np.sqrt(32.0))
    p = law.law.exp2(np.where(np.tri(64, dtype=bool), s * scale - m, -np.inf).astype(np.float32)) * (1 / l)
    weights = law.narrow(np.where(np.tri(64, dtype=bool), p, 0).astype(np.float32))
    expected = law.gemm_dw(np.zeros((64, 32), np.float32), weights, dout[:, 0])
    assert compare_bits(dv[:, 0], law.narrow(expected + np.float32(0))).equal


@pytest.mark.parametrize("profile", ["sm90", "sm80", "cdna3"])
def test_weight_gradients_join_at_multiples_of_the_group_and_not_elsewhere(profile: str) -> None:
    law = ReferenceSubject(profile)
    dy, x, start = bf16(1, 64, 20), bf16(2, 64, 24), np.zeros((20, 24), np.float32)
    whole = law.gemm_dw(start, dy, x)
    assert compare_bits(law.gemm_dw(law.gemm_dw(start, dy[:16], x[:16]), dy[16:], x[16:]), whole).equal
    assert not compare_bits(law.gemm_dw(law.gemm_dw(start, dy[:13], x[:13]), dy[13:], x[13:]), whole).equal
