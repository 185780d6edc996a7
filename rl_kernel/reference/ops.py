"""The executable contract, op by op, on NumPy arrays. bf16 is a uint16 bit pattern.

These functions allocate the result and call the C++ loops in `csrc/reference`; the rules they obey are in
`rl_kernel.contracts`. T tokens, K and N features, H query heads, G kv heads, D head_dim, V vocabulary, R sequences.
Shapes that do not fit raise ValueError (from C++) or ShapeError.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_kernel.contract import ModelContract, Profile
from rl_kernel.errors import ShapeError
from rl_kernel.reference import _reference, exp2_table

Bits = npt.NDArray[np.uint16]
F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

_LOG2E = float.fromhex("0x1.71547652b82fep+0")


@dataclass(frozen=True, slots=True)
class Reference:
    """The reference under one profile. Make it with `Reference.of(contract)`."""

    mma: str
    exp2_model: str
    kv_partial: int
    vocab_tile: int

    def __post_init__(self) -> None:
        if self.exp2_model == "sm90_ex2":
            exp2_table.load()

    @classmethod
    def of(cls, contract: ModelContract) -> "Reference":
        """Take the profile and the parameters of `contract`."""
        profile: Profile = contract.profile
        return cls(
            profile.mma,
            profile.exp2,
            contract["attention"].parameter("kv_partial"),
            contract["linear_logp"].parameter("vocab_tile"),
        )

    def gemm(self, x: Bits, w: Bits, *, segments: int = 1) -> Bits:
        """x[M,K], w[N,K] → bf16 y[M,N]."""
        y = np.empty((x.shape[0], w.shape[0]), np.uint16)
        _reference.gemm(y, x, w, segments, self.mma)
        return y

    def gemm_fp32(self, x: Bits, w: Bits, *, segments: int = 1) -> F32:
        """x[M,K], w[N,K] → fp32 y[M,N], not rounded to bf16: logits, and a rank's partial sum."""
        y = np.empty((x.shape[0], w.shape[0]), np.float32)
        _reference.gemm_fp32(y, x, w, segments, self.mma)
        return y

    def gemm_dx(self, dy: Bits, w: Bits, *, segments: int = 1) -> Bits:
        """dy[M,N], w[N,K] → bf16 dx[M,K]; the chain runs along N, cut in `segments`."""
        dx = np.empty((dy.shape[0], w.shape[1]), np.uint16)
        _reference.gemm_dx(dx, dy, w, segments, self.mma)
        return dx

    def gemm_dx_fp32(self, dy: Bits, w: Bits, *, segments: int = 1) -> F32:
        """As `gemm_dx`, fp32 and not rounded to bf16."""
        dx = np.empty((dy.shape[0], w.shape[1]), np.float32)
        _reference.gemm_dx_fp32(dx, dy, w, segments, self.mma)
        return dx

    def gemm_dw(self, main_grad: F32, dy: Bits, x: Bits) -> F32:
        """main_grad[N,K], dy[T,N], x[T,K] → the main gradient with these tokens' chain added."""
        result = main_grad.copy()
        _reference.gemm_dw(result, dy, x, self.mma)
        return result

    def rms_norm(self, x: Bits, w: Bits, eps: float) -> Bits:
        """x[…,n], w[n] → y[…,n]."""
        y = np.empty_like(x)
        rows = (-1, x.shape[-1])
        _reference.rms_norm(y.reshape(rows), x.reshape(rows), w, eps)
        return y

    def rms_norm_backward(self, dy: Bits, x: Bits, w: Bits, eps: float, dw: F32) -> tuple[Bits, F32]:
        """dy, x[rows,n], w[n], dw[G,n] → (dx, dw with row r added to dw[r % G])."""
        dx, result = np.empty_like(x), dw.copy()
        _reference.rms_norm_backward(dx, result, dy, x, w, eps)
        return dx, result

    def residual_add(self, a: Bits, b: Bits) -> Bits:
        """bf16 sum of two arrays of one shape."""
        if a.shape != b.shape:
            raise ShapeError(f"residual_add: shapes {list(a.shape)} and {list(b.shape)} differ")
        y = np.empty_like(a)
        _reference.residual_add(y.reshape(-1), a.reshape(-1), b.reshape(-1))
        return y

    def rope(self, x: Bits, cos: F32, sin: F32, positions: I64, *, inverse: bool = False) -> Bits:
        """x[T,H,D], cos and sin[P,D/2], positions[T] → x rotated; `inverse` is the gradient."""
        y = np.empty_like(x)
        _reference.rope(y, x, cos, sin, positions, -1.0 if inverse else 1.0)
        return y

    def swiglu(self, x: Bits) -> Bits:
        """x[T,2I] = gate, up → y[T,I]."""
        y = np.empty((x.shape[0], x.shape[1] // 2), np.uint16)
        _reference.swiglu(y, x, self.exp2_model)
        return y

    def swiglu_backward(self, dy: Bits, x: Bits) -> Bits:
        """dy[T,I], x[T,2I] → dx[T,2I]."""
        dx = np.empty_like(x)
        _reference.swiglu_backward(dx, dy, x, self.exp2_model)
        return dx

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """q[T,H,D], k and v[T',G,D], offsets[R+1] → out[T,H,D], running maximum m[T,H], row sum l[T,H]."""
        out = np.empty_like(q)
        m, l = np.empty(q.shape[:2], np.float32), np.empty(q.shape[:2], np.float32)
        scale = attention_scale(q.shape[2])
        _reference.attention(out, m, l, q, k, v, cu_q, cu_k, scale, self.kv_partial, self.mma, self.exp2_model)
        return out, m, l

    def attention_backward(
        self, dout: Bits, q: Bits, k: Bits, v: Bits, out: Bits, m: F32, l: F32, cu: I32
    ) -> tuple[Bits, Bits, Bits]:
        """Gradients dq[T,H,D], dk and dv[T,G,D] of self-attention whose R sequences have the offsets cu[R+1]."""
        dq, dk, dv = np.empty_like(q), np.empty_like(k), np.empty_like(v)
        dim = q.shape[2]
        scales = (attention_scale(dim), np.float32(1.0 / np.sqrt(np.float64(dim))))
        _reference.attention_backward(dq, dk, dv, dout, q, k, v, out, m, l, cu, *scales, self.mma, self.exp2_model)
        return dq, dk, dv

    def vocab_stats(self, logits: F32, temperature: F32, *, vocab_start: int, vocab: int) -> tuple[F32, F32]:
        """logits[T,Vshard], temperature[T] → per tile the maximum m[T,tiles] and the sum of exponentials s[T,tiles]."""
        tiles = -(-logits.shape[1] // self.vocab_tile)
        m, s = (np.empty((logits.shape[0], tiles), np.float32) for _ in range(2))
        _reference.vocab_stats(m, s, logits, temperature, vocab_start, vocab, self.vocab_tile, self.exp2_model)
        return m, s

    def merge_vocab_stats(self, m: F32, s: F32) -> F32:
        """Tiles of all shards in global order, m and s[T,tiles] → lse[T]."""
        lse = np.empty(m.shape[0], np.float32)
        _reference.merge_vocab_stats(lse, m, s, self.exp2_model)
        return lse

    def logp_from_logits(self, logits: F32, ids: I64, temperature: F32, *, vocab: int) -> tuple[F32, F32]:
        """logits[T,V], ids[T,J], temperature[T] → logp[T,J], lse[T]."""
        lse = self.merge_vocab_stats(*self.vocab_stats(logits, temperature, vocab_start=0, vocab=vocab))
        with np.errstate(invalid="ignore"):  # a logit may be infinite; its NaN is kept
            z = np.take_along_axis(logits, ids, axis=1) / temperature[:, None]
            return canonical(z - lse[:, None]), lse

    def linear_logp(self, h: Bits, w: Bits, target: I64, *, temperature: float, vocab: int) -> tuple[F32, F32]:
        """h[T,K], w[V,K], target[T] → logp[T], lse[T]."""
        heat = np.full(h.shape[0], temperature, np.float32)
        logp, lse = self.logp_from_logits(self.gemm_fp32(h, w), target[:, None], heat, vocab=vocab)
        return logp[:, 0], lse

    def linear_logp_backward(
        self, dlogp: F32, h: Bits, w: Bits, target: I64, lse: F32, main_grad: F32,
        *, temperature: float, vocab: int, segments: int = 1,
    ) -> tuple[Bits, F32]:  # fmt: skip
        """dlogp[T] and the forward's arguments → dh[T,K], and main_grad[V,K] with these tokens added."""
        heat = np.full(h.shape[0], temperature, np.float32)
        logits = self.gemm_fp32(h, w)
        dlogits = np.empty(logits.shape, np.uint16)
        _reference.logit_gradient(dlogits, logits, target, lse, dlogp, heat, 0, vocab, self.exp2_model)
        return self.gemm_dx(dlogits, w, segments=segments), self.gemm_dw(main_grad, dlogits, h)

    def exp2(self, x: F32) -> F32:
        """The profile's exp2 of non-positive values; under `sm90_ex2`, NaN where x > 0."""
        y = np.empty_like(x)
        _reference.exp2(y.reshape(-1), x.reshape(-1), self.exp2_model)
        return y


def ln(x: F32) -> F32:
    """Natural logarithm of positive normal numbers, as the contract has it."""
    y = np.empty_like(x)
    _reference.ln(y.reshape(-1), x.reshape(-1))
    return y


def embedding(ids: I64, w: Bits) -> Bits:
    """ids[T], w[V,K] → [T,K]."""
    y = np.empty((ids.shape[0], w.shape[1]), np.uint16)
    _reference.embedding(y, ids, w)
    return y


def embedding_dw(main_grad: F32, dy: Bits, ids: I64) -> F32:
    """main_grad[V,K], dy[T,K], ids[T] → the main gradient with these tokens added."""
    result = main_grad.copy()
    _reference.embedding_dw(result, dy, ids)
    return result


def tree_sum(parts: F32) -> F32:
    """parts[R,…] → the fp32 tree over the R ranks."""
    y = np.empty(parts.shape[1:], np.float32)
    _reference.tree_sum(y.reshape(-1), np.ascontiguousarray(parts).reshape(parts.shape[0], -1))
    return y


def narrow(x: npt.NDArray[Any]) -> Bits:
    """Round fp32 to bf16 bit patterns, to nearest even; NaN becomes 0x7fc0."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)  # of these, only a NaN's can overflow
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def widen(bits: Bits) -> F32:
    """The fp32 values of bf16 bit patterns."""
    wide: npt.NDArray[np.uint32] = np.left_shift(bits, 16, dtype=np.uint32)
    return wide.view(np.float32)


def canonical(x: F32) -> F32:
    """Replace every NaN by the one that an op may store, 0x7fc00000."""
    return np.where(np.isnan(x), np.uint32(0x7FC00000).view(np.float32), x).astype(np.float32)


def attention_scale(dim: int) -> np.float32:
    """fp32(log2(e) / sqrt(dim)), rounded once from float64."""
    return np.float32(_LOG2E / np.sqrt(np.float64(dim)))
