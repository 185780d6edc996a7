"""The vocabulary head on the CPU: log-probabilities, their gradients, and the parts that vocabulary shards exchange."""

import torch

from rl_kernel.contracts.v1 import VOCAB_TILE
from rl_kernel.errors import ShapeError
from rl_kernel.ops.packed_weight import PackedWeight
from rl_kernel.ops.tensors import BF16, F32, I64, check, check_rows, extension, threads


def linear_logp(
    h: torch.Tensor, w: torch.Tensor | PackedWeight, target: torch.Tensor, *, temperature: float, vocab: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """h[T,K] bf16, w[V,K] bf16 or packed, target[T] int64 -> (logp[T], lse[T]) fp32.

    ids in [vocab, V) are padding. ShapeError for a target outside [0, vocab), a temperature that is not positive or a
    vocabulary that w does not hold.
    """
    if not 0 < vocab <= w.shape[0]:
        raise ShapeError(f"linear_logp: vocab {vocab}; w has {w.shape[0]} rows, so 1 to {w.shape[0]} would work")
    m, s, z = linear_vocab_stats(h, w, target, temperature=temperature, vocab_start=0, vocab=vocab)
    lse = merge_vocab_stats(m, s)
    return _canonical(z - lse), lse


def linear_vocab_stats(
    h: torch.Tensor, w: torch.Tensor | PackedWeight, target: torch.Tensor,
    *, temperature: float, vocab_start: int, vocab: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The share of one vocabulary shard w[Vshard,K], which owns the ids from vocab_start on.

    Returns fp32 (m[T,tiles], s[T,tiles], z[T]): maxima and sums of its tiles, and the target's logit / temperature,
    -inf where another shard owns the target. logp = z - merge_vocab_stats(all shards' m and s side by side).
    """
    op = "linear_logp"
    width, k = w.shape
    ldh, rows = _head(op, h, k, target, temperature, vocab_start)
    if isinstance(w, PackedWeight):
        natural, panels = 0, w.words.data_ptr()
    else:
        check(op, "w", w, BF16, (None, None))
        natural, panels = w.data_ptr(), 0
    m, s = (torch.empty(rows, _tiles(width), dtype=F32) for _ in range(2))
    z = torch.empty(rows, dtype=F32)
    extension.linear_vocab_stats(
        m.data_ptr(), s.data_ptr(), z.data_ptr(), h.data_ptr(), ldh, natural, panels,
        target.data_ptr(), temperature, rows, k, width, vocab_start, vocab,
        threads(),
    )  # fmt: skip
    return m, s, z


def linear_logp_backward(
    dlogp: torch.Tensor, h: torch.Tensor, w: torch.Tensor, target: torch.Tensor, lse: torch.Tensor,
    *, temperature: float, vocab: int, main_grad: torch.Tensor | None, segments: int = 1, vocab_start: int = 0,
    out_dtype: torch.dtype = BF16,
) -> torch.Tensor:  # fmt: skip
    """dlogp[T] fp32 and the forward's arguments -> dh[T,K] of out_dtype; main_grad[V,K] fp32 continues in place.

    `segments` cuts the vocabulary that w holds. A shard gives its vocab_start, the lse of the whole vocabulary and
    out_dtype fp32, and the tree over ranks finishes dh. main_grad None: the weight is frozen.
    """
    op = "linear_logp_backward"
    check(op, "w", w, BF16, (None, None))
    width, k = w.shape
    ldh, rows = _head(op, h, k, target, temperature, vocab_start)
    check(op, "dlogp", dlogp, F32, (rows,))
    check(op, "lse", lse, F32, (rows,))
    if main_grad is not None:
        check(op, "main_grad", main_grad, F32, (width, k))
    if segments < 1 or width % segments:
        raise ShapeError(f"{op}: segments is {segments}; it must divide the {width} ids of w")
    if out_dtype is not BF16 and out_dtype is not F32:
        raise ShapeError(f"{op}: out_dtype is {out_dtype}; it must be torch.bfloat16 or torch.float32")
    dh = torch.empty(rows, k, dtype=out_dtype)
    dh16, dh32 = (dh.data_ptr(), 0) if out_dtype is BF16 else (0, dh.data_ptr())
    extension.linear_logp_backward(
        dh16, dh32, 0 if main_grad is None else main_grad.data_ptr(), dlogp.data_ptr(), h.data_ptr(), ldh, w.data_ptr(),
        target.data_ptr(), lse.data_ptr(), temperature, rows, k, width, vocab_start, vocab, segments, threads(),
    )  # fmt: skip
    return dh


def logp_from_logits(
    logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, *, vocab: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits[T,V] fp32, ids[T,J] int64, temperature[T] fp32 -> (logp[T,J], lse[T]) fp32."""
    op = "logp_from_logits"
    rows, width = _logits(op, logits, temperature)
    check(op, "ids", ids, I64, (rows, None))
    logp, lse = torch.empty(ids.shape, dtype=F32), torch.empty(rows, dtype=F32)
    extension.logp_from_logits(
        logp.data_ptr(), lse.data_ptr(), logits.data_ptr(), width, ids.data_ptr(), ids.shape[1], temperature.data_ptr(),
        rows, vocab, threads(),
    )  # fmt: skip
    return logp, lse


def vocab_stats(
    logits: torch.Tensor, temperature: torch.Tensor, *, vocab_start: int, vocab: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits[T,Vshard] fp32 of the ids from vocab_start on, temperature[T] fp32 -> (m[T,tiles], s[T,tiles]) fp32."""
    rows, width = _logits("vocab_stats", logits, temperature)
    _check_start("vocab_stats", vocab_start)
    m, s = (torch.empty(rows, _tiles(width), dtype=F32) for _ in range(2))
    extension.vocab_stats(
        m.data_ptr(),
        s.data_ptr(),
        logits.data_ptr(),
        temperature.data_ptr(),
        rows,
        width,
        vocab_start,
        vocab,
        threads(),
    )
    return m, s


def merge_vocab_stats(m: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Merge m and s[T,tiles] fp32 of the whole vocabulary, tiles in ascending order -> lse[T] fp32."""
    check("merge_vocab_stats", "m", m, F32, (None, None))
    rows, tiles = m.shape
    check("merge_vocab_stats", "s", s, F32, (rows, tiles))
    if tiles == 0:
        raise ShapeError("merge_vocab_stats: m has no tiles; a vocabulary has at least one")
    lse = torch.empty(rows, dtype=F32)
    extension.merge_vocab_stats(lse.data_ptr(), m.data_ptr(), s.data_ptr(), rows, tiles, threads())
    return lse


def _tiles(width: int) -> int:
    return -(-width // VOCAB_TILE)


def _head(
    op: str, h: torch.Tensor, k: int, target: torch.Tensor, temperature: float, vocab_start: int
) -> tuple[int, int]:
    ldh = check_rows(op, "h", h, (None, k))
    rows = h.shape[0]
    check(op, "target", target, I64, (rows,))
    if not temperature > 0:
        raise ShapeError(f"{op}: temperature is {temperature}; it must be positive")
    _check_start(op, vocab_start)
    return ldh, rows


def _check_start(op: str, vocab_start: int) -> None:
    if vocab_start % VOCAB_TILE:
        raise ShapeError(f"{op}: vocab_start is {vocab_start}; a shard starts on a multiple of {VOCAB_TILE}")


def _logits(op: str, logits: torch.Tensor, temperature: torch.Tensor) -> tuple[int, int]:
    check(op, "logits", logits, F32, (None, None))
    rows, width = logits.shape
    check(op, "temperature", temperature, F32, (rows,))
    return rows, width


def _canonical(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill_(x.isnan(), float("nan"))
