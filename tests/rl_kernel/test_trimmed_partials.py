"""What two ranks do with 22.5 of a partial's 32 bits, in Triton's interpreter: sums that are not asked for are right.

The real kernel, between GPUs, is tested in tests/gpu; here is every kind of value, and how many cost a question.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from rl_kernel.ops.tree_all_reduce import triton_trimmed  # with all that it imports, before anything is interpreted
from rl_kernel.reference import ops as law

LANES, PROGRAMS = 512, 2
N = 16 * LANES * PROGRAMS
SOURCE = Path(triton_trimmed.__file__)


trimmed: Any = None  # the module, interpreted


def narrow(x):  # type: ignore[no-untyped-def]
    """As the module's, whose conversion the interpreter truncates."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded).to(tl.int16).to(tl.bfloat16, bitcast=True)


def add_kernel(y, opens, own, other, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """What one rank sends, added to what the other has; `opens`: the quads that it would ask for."""
    quad = tl.program_id(0) * 4 * LANES + tl.arange(0, LANES)[:, None] * 4 + tl.arange(0, 4)[None, :]
    i = quad[:, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    w0, w1, t0, t1, t2, exponent = trimmed._words(trimmed._quads(tl.load(other + i)))
    codes = trimmed._codes(w0, w1, t0, t1, t2)
    r0, r1, opened = trimmed._sums(trimmed._quads(tl.load(own + i)), codes, exponent)
    trimmed._store(y, i, r0, r1, i >= 0)
    tl.store(opens + quad, opened.to(tl.int32))


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Any]:
    """`add_kernel` over a copy of the module, both interpreted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "interpret", True)
        spec = importlib.util.spec_from_file_location("interpreted_trimmed", SOURCE)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        patch.setattr(module, "narrow", triton.jit(narrow))
        patch.setitem(globals(), "trimmed", module)
        yield triton.jit(add_kernel)


def floats(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint32).view(np.float32)


def below(exponent: int, random: np.random.Generator, first: int = 0) -> np.ndarray:
    """Random bits with biased exponents in [first, exponent)."""
    return floats(random.integers(first, exponent, N) << 23 | random.integers(0, 1 << 32, N) & 0x807FFFFF)


def pairs() -> dict[str, tuple[np.ndarray, np.ndarray, float]]:
    """Kind → what one rank has, what the other sends, the share of quads that may be asked for."""
    random = np.random.default_rng(0)
    special = np.array(
        [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0x7F7FFFFF, 0xFF7FFFFF, 1, 0x80000001, 0x7FFFFF,
         0x800000, 0x807FFFFF, 0x3F7FFFFF, 0x3F808000, 0xBF808001]
    )  # fmt: skip
    normal = [random.normal(size=N).astype(np.float32) for _ in range(3)]
    near = floats((-normal[0]).view(np.uint32) ^ random.integers(0, 1024, N).astype(np.uint32))
    zeros = [np.where(random.random(N) < 0.5, np.float32(-0.0), np.float32(0)) for _ in range(2)]
    half = floats((normal[1].view(np.uint32) & 0x7F800000) - (8 << 23))
    return {
        "normal": (normal[0], normal[1], 0.01),
        "of very different sizes": (normal[0], normal[1] * np.exp2(3 * normal[2]).astype(np.float32), 0.03),
        "any bits": (below(256, random), below(256, random), 1),
        "special": (floats(random.choice(special, N)), floats(random.choice(special, N)), 1),
        "subnormal": (below(2, random), below(2, random), 0.05),
        "small": (below(24, random), below(24, random), 1),
        "huge": (below(255, random, 240), below(255, random, 240), 0.2),
        "nearly opposite": (normal[0], near, 1),
        "opposite": (normal[0], -normal[0], 1),
        "zeros": (np.zeros(N, np.float32), np.zeros(N, np.float32), 0),
        "zeros of both signs": (zeros[0], zeros[1], 1),
        "halfway between two": (floats(normal[1].view(np.uint32) & 0xFFFF0000), half, 1),
    }


PAIRS = pairs()


@pytest.mark.parametrize("kind", PAIRS)
def test_a_sum_that_is_not_asked_for_has_the_bits_of_the_reference(kind: str, interpreted: Any) -> None:
    own, other, most = PAIRS[kind]
    y, opens = torch.zeros(N, dtype=torch.bfloat16), torch.zeros(N // 4, dtype=torch.int32)
    with np.errstate(all="ignore"):
        interpreted[(PROGRAMS,)](y, opens, torch.from_numpy(own), torch.from_numpy(other), LANES)
        expected = law.narrow(law.tree_sum(np.stack([own, other])))
    asked = opens.numpy() != 0
    settled = ~np.repeat(asked, 4)
    found = y.view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(found[settled], expected[settled])
    assert asked.mean() <= most
    infinite = (other.view(np.uint32) >> 23 & 255).reshape(-1, 16).max(1) == 255
    assert asked.reshape(-1, 4)[infinite].all()
