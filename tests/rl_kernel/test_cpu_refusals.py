"""A tensor that does not fit is refused in one line that names the op, the argument, and what would be right."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl_kernel.errors import ShapeError
from rl_kernel.ops.attention.cpu import attention, attention_backward, paged_attention
from rl_kernel.ops.embedding.cpu import embedding
from rl_kernel.ops.gemm.cpu import gemm, gemm_dw_, gemm_dx, pack
from rl_kernel.ops.linear_logp.cpu import linear_logp, logp_from_logits, vocab_stats
from rl_kernel.ops.residual_add.cpu import residual_add
from rl_kernel.ops.rms_norm.cpu import add_rms_norm, rms_norm
from rl_kernel.ops.rope.cpu import rope
from rl_kernel.ops.swiglu.cpu import swiglu
from rl_kernel.ops.tree_all_reduce.cpu import tree_sum
from tests.rl_kernel.cpu_draws import draw

_I32 = torch.int32
_CU, _CU3, _CU54 = (torch.tensor(c, dtype=_I32) for c in ([0, 4], [0, 3], [0, 5, 4]))
_Q, _KV, _TABLE = draw(1, 4, 6, 32), draw(2, 4, 2, 32), torch.zeros(1, 1, dtype=_I32)
_CACHE, _LENGTH = draw(3, 2, 16, 2, 32), torch.tensor([4], dtype=_I32)
_COS, _IDS, _ONES = torch.ones(8, 16), torch.arange(4), torch.ones(4)
_X, _W, _KV4 = draw(4, 4, 32), draw(5, 48, 32), draw(6, 4, 4, 32)
_LOGITS = torch.zeros(4, 48)
_HOW = {"temperature": 1.0, "vocab": 48}


def _paged(table: torch.Tensor = _TABLE, length: torch.Tensor = _LENGTH, cache: torch.Tensor = _CACHE) -> Any:
    return paged_attention(_Q, cache, cache, table, _CU, length)


_BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "gemm dtype": (
        lambda: gemm(_X.float(), _W),
        r"gemm: x is float32 \[4, 32\].*must be contiguous bfloat16 \[any, 32\]",
    ),
    "gemm elsewhere": (lambda: gemm(_X.to("meta"), _W), r"gemm: x is bfloat16 \[4, 32\] on meta.* on cpu"),
    "gemm K": (lambda: gemm(draw(1, 4, 31), _W), r"gemm: x is bfloat16 \[4, 31\].*\[any, 32\]"),
    "gemm transposed": (lambda: gemm(draw(1, 32, 4).t(), _W), r"gemm: x .*strides \[1, 4\]"),
    "gemm segments": (lambda: gemm(_X, _W, segments=3), r"gemm: segments is 3; it must divide the summed dimension 32"),
    "gemm out_dtype": (lambda: gemm(_X, _W, out_dtype=torch.float16), r"gemm: out_dtype is torch\.float16; it must be"),
    "gemm_dx N": (lambda: gemm_dx(_X, _W), r"gemm_dx: dy .*\[any, 48\]"),
    "gemm_dw_ tokens": (lambda: gemm_dw_(torch.zeros(48, 32), draw(1, 3, 48), _X), r"gemm_dw_: dy .*\[4, 48\]"),
    "gemm_dw_ dtype": (
        lambda: gemm_dw_(_W, draw(1, 4, 48), _X),
        r"gemm_dw_: main_grad is bfloat16.*must be contiguous float32",
    ),
    "pack into another shape": (lambda: pack(_X, pack(_W)), r"pack: out holds .*\[48, 32\]; w has \[4, 32\]"),
    "rms_norm elsewhere": (
        lambda: rms_norm(_X.to("meta"), draw(1, 32), 1e-5),
        r"rms_norm: x is torch.bfloat16 \[4, 32\] on meta.* on cpu",
    ),
    "rms_norm weight": (lambda: rms_norm(_X, draw(1, 31), 1e-5), r"rms_norm: w .*\[32\]"),
    "add_rms_norm residual": (
        lambda: add_rms_norm(_X, draw(1, 3, 32), draw(1, 32), 1e-5),
        r"add_rms_norm: residual .*\[4, 32\]",
    ),
    "residual_add elsewhere": (lambda: residual_add(_X, _X.to("meta")), r"residual_add: b .* on meta.* on cpu"),
    "cache elsewhere": (lambda: _paged(cache=_CACHE.to("meta")), r"paged_attention: k_cache .* on meta.* on cpu"),
    "table elsewhere": (lambda: _paged(_TABLE.to("meta")), r"paged_attention: block_table .* on meta.* on cpu"),
    "logp vocabulary": (
        lambda: linear_logp(_X, _W, _IDS, temperature=1.0, vocab=49),
        r"linear_logp: vocab 49; w has 48 rows, so 1 to 48 would work",
    ),
    "residual_add": (lambda: residual_add(_X, draw(1, 5, 32)), r"residual_add: b .*\[4, 32\]"),
    "rope position": (lambda: rope(_Q, _COS, _COS, _IDS + 5), r"positions\[3\] is 8; it must lie in \[0, 8\)"),
    "rope odd": (lambda: rope(draw(1, 4, 2, 31), _COS, _COS, _IDS), r"rope: head_dim is 31; it must be even"),
    "swiglu odd": (lambda: swiglu(draw(1, 4, 31)), r"swiglu: x has 31 columns"),
    "embedding id": (lambda: embedding(torch.tensor([1, -2]), _W), r"ids\[1\] is -2; it must lie in \[0, 48\)"),
    "attention heads": (
        lambda: attention(_Q, _KV4, _KV4, _CU, _CU),
        r"attention: 6 query heads are not a multiple of 4 kv heads",
    ),
    "attention offsets": (
        lambda: attention(_Q, _KV, _KV, _CU + 1, _CU),
        r"cu_q must run from 0 to 4; it runs from 1 to 5",
    ),
    "attention more queries": (
        lambda: attention(_Q, _KV[:3], _KV[:3], _CU, _CU3),
        r"sequence 0 has 4 queries but only 3 keys",
    ),
    "attention decreasing": (lambda: attention(_Q, _KV, _KV, _CU54, _CU54), r"cu_q decreases at sequence 1"),
    "paged block": (lambda: _paged(table=_TABLE + 2), r"block_table\[0\]\[0\] is 2; the cache has 2 blocks"),
    "paged length": (lambda: _paged(length=_LENGTH * 5), r"seq_lens\[0\] is 20; block_table holds only 16"),
    "paged head_dim": (lambda: _paged(cache=draw(1, 2, 16, 2, 16)), r"paged_attention: k_cache .*heads contiguous"),
    "attention_backward m": (
        lambda: attention_backward(_Q, _Q, _KV, _KV, _Q, _ONES, _ONES, _CU),
        r"attention_backward: m is float32 \[4\].*\[4, 6\]",
    ),
    "linear_logp target": (
        lambda: linear_logp(_X, _W, _IDS + 45, **_HOW),
        r"target\[3\] is 48; it must lie in \[0, 48\)",
    ),
    "linear_logp temperature": (
        lambda: linear_logp(_X, _W, _IDS, temperature=0.0, vocab=48),
        r"temperature is 0\.0; it must be positive",
    ),
    "logp_from_logits id": (
        lambda: logp_from_logits(_LOGITS, _IDS[:, None] + 40, _ONES, vocab=42),
        r"ids\[2\] is 42; it must lie in \[0, 42\)",
    ),
    "vocab_stats start": (
        lambda: vocab_stats(_LOGITS, _ONES, vocab_start=48, vocab=96),
        r"vocab_start is 48; a shard starts on a multiple of 64",
    ),
    "tree_sum ranks": (
        lambda: tree_sum(torch.zeros(0, 3)),
        r"tree_sum: parts is \[0, 3\]; the first dimension must count at least one rank",
    ),
}


@pytest.mark.parametrize("name", _BAD)
def test_a_bad_argument_is_refused_by_name(name: str) -> None:
    call, message = _BAD[name]
    with pytest.raises(ShapeError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
