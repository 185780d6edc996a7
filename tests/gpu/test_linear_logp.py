"""The head on Hopper: merged inside of the product by a warp of its own, or by a launch behind it, the same bits.

The laws hold it against the reference; here are shapes and values that only the inner merge could get wrong.
"""

import pytest
import torch

from tests.gpu.tensors import normal, same_bits

pytestmark = pytest.mark.gpu

LARGE = 3e38  # times itself it is infinite


def head(tokens: int, rows: int, biting: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """h[T,128] and w[rows,128]; biting: of five tokens one has -inf at the first 300 ids, one at all, one at one id,
    and one is NaN.
    """
    h, w = normal(tokens, 128, seed=1), normal(rows, 128, seed=2)
    if biting:
        h[:, :4] = 0
        w[:, :4] = 0
        w[:300, 0], w[:, 1], w[rows // 2, 2] = LARGE, LARGE, LARGE
        for token in range(3):
            h[token::5, token] = -LARGE
        h[3::5, 3] = float("nan")
    return h, w


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("rows", [151936, 4 * 151936])
def test_no_logit_is_stored_and_statistics_take_256_mib_at_most(
    rows: int, inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 bytes for a token and 64 ids, up to a bound that the larger vocabulary would pass; its logits are 20 GB."""
    from rl_kernel.ops.linear_logp import triton_kernel as op

    tokens = 8192
    h, w = normal(tokens, 128, seed=1), normal(rows, 128, seed=2)
    target = torch.arange(tokens, device="cuda")
    if not inside:
        monkeypatch.setattr(op.gluon_kernel, "serves", lambda *_: False)
    op.linear_logp(h, w, target, temperature=1.0, vocab=rows)  # what stays for all calls is there now
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    op.linear_logp(h, w, target, temperature=1.0, vocab=rows)
    taken, least = torch.cuda.max_memory_allocated() - before, min(8 * tokens * rows // 64, 256 << 20)
    assert least <= taken <= least + (4 << 20)  # results, and tiles in whole batches


@pytest.mark.parametrize("biting", [False, True])
@pytest.mark.parametrize("stats", [1 << 25, 1 << 12])
@pytest.mark.parametrize(
    ("tokens", "rows", "vocab"), [(16, 256, 200), (70, 600, 600), (200, 5000, 4900), (300, 2048, 2048)]
)
def test_merging_inside_of_the_product_keeps_the_bits(
    tokens: int, rows: int, vocab: int, stats: int, biting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_kernel.ops.linear_logp import triton_kernel as op

    h, w = head(tokens, rows, biting)
    target = torch.arange(tokens, device="cuda") * 37 % (rows + 2) - 1
    monkeypatch.setattr(op, "STATS", stats)  # the few: stretches that continue one another
    inside = [op.linear_logp(h, w, target, temperature=0.9, vocab=vocab) for _ in range(3)]
    monkeypatch.setattr(op.gluon_kernel, "serves", lambda *_: False)
    behind = op.linear_logp(h, w, target, temperature=0.9, vocab=vocab)
    for call in inside:
        same_bits(call[0], behind[0], "logp")
        same_bits(call[1], behind[1], "lse")
    if biting:
        assert {bool(x) for x in behind[1].isnan()} == {False, True}
        assert (behind[1] == float("-inf")).any()
