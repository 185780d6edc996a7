"""A decoder on the strict GPU ops, as plain as the reference decoder that it is compared with.

Prefill runs whole sequences; decode feeds one token of each sequence at a time through a paged cache.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from rl_kernel.contracts import model_contract
from rl_kernel.ops import strict_plan
from rl_kernel.reference.model import Decoder
from tests.contracts.subjects import to_torch
from tests.gpu.tensors import offsets

PAGE = 16


@dataclass
class Pages:
    """The paged cache of one layer for R sequences of at most `longest` tokens."""

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    used: int = 0

    @classmethod
    def empty(cls, sequences: int, longest: int, kv_heads: int, dim: int) -> "Pages":
        count = -(-longest // PAGE)
        k, v = (torch.full((sequences * count, PAGE, kv_heads, dim), torch.nan).bfloat16().cuda() for _ in range(2))
        return cls(k, v, torch.randperm(sequences * count).int().cuda().reshape(sequences, count))


@dataclass
class GpuDecoder:
    """The weights of a reference decoder on the device, and the functions of the plan."""

    law: Decoder
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.plan = strict_plan(model_contract("sm90", segments=self.law.contract.segments), "cuda")
        self.weights = {name: to_torch(w, "cuda") for name, w in self.law.weights.items()}
        self.cos, self.sin = (to_torch(x, "cuda") for x in self.law.rope)

    def op(self, op: str, *args: Any, function: str | None = None, **kwargs: Any) -> Any:
        return self.plan.resolve(op).function(function or op)(*args, **kwargs)

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, attend: Any) -> torch.Tensor:
        """ids[T], positions[T] → final normalised hidden states [T,E]; attend(layer, q, k, v) → [T,H,D]."""
        config, eps = self.law.config, self.law.config.rms_norm_eps
        x = self.op("embedding", ids, self.weights["model.embed_tokens.weight"])
        for layer in range(config.layers):
            w = {n.removeprefix(f"model.layers.{layer}.").removesuffix(".weight"): t for n, t in self.weights.items()}
            normed = self.op("rms_norm", x, w["input_layernorm"], eps)
            fused = torch.cat([w[f"self_attn.{name}_proj"] for name in "qkv"])
            heads = self.op("gemm", normed, fused).unflatten(1, (-1, config.head_dim))
            q, k, v = heads.split([config.heads, config.kv_heads, config.kv_heads], 1)
            if config.qk_norm:
                q, k = (self.op("rms_norm", a, w[f"self_attn.{n}_norm"], eps) for a, n in ((q, "q"), (k, "k")))
            q, k = (self.op("rope", a, self.cos, self.sin, positions) for a in (q, k))
            out = attend(layer, q, k, v).reshape(len(ids), -1)
            projected = self.op("gemm", out, w["self_attn.o_proj"], segments=self.law.contract.segments)
            normed, x = self.op(
                "rms_norm", projected, x, w["post_attention_layernorm"], eps, function="add_rms_norm"
            )  # fmt: skip
            both = self.op("gemm", normed, torch.cat([w["mlp.gate_proj"], w["mlp.up_proj"]]))
            down = self.op("gemm", self.op("swiglu", both), w["mlp.down_proj"], segments=self.law.contract.segments)
            x = self.op("residual_add", down, x)
        return self.op("rms_norm", x, self.weights["model.norm.weight"], eps)

    def logp(self, hidden: torch.Tensor, target: torch.Tensor, temperature: float) -> torch.Tensor:
        head = self.weights["model.embed_tokens.weight" if self.law.config.tied else "lm_head.weight"]
        return self.op("linear_logp", hidden, head, target, temperature=temperature, vocab=self.law.config.vocab)[0]

    def prefill(self, tokens: list[torch.Tensor], temperature: float) -> list[torch.Tensor]:
        """Log-probabilities of tokens[1:] of every sequence, all in one pass."""
        cu = offsets(*(len(t) for t in tokens))
        positions = torch.cat([torch.arange(len(t)) for t in tokens]).cuda()
        hidden = self.hidden(
            torch.cat(tokens).cuda(), positions, lambda _, q, k, v: self.op("attention", q, k, v, cu, cu)[0]
        )
        parts = hidden.split([len(t) for t in tokens])
        rows, target = torch.cat([h[:-1] for h in parts]), torch.cat([t[1:] for t in tokens]).cuda()
        return list(self.logp(rows, target, temperature).split([len(t) - 1 for t in tokens]))

    def decode(self, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
        """tokens[R,N]: the same log-probabilities [R,N-1], one position at a time."""
        config, (sequences, longest) = self.law.config, tokens.shape
        cache = [Pages.empty(sequences, longest, config.kv_heads, config.head_dim) for _ in range(config.layers)]
        cu, found = offsets(*[1] * sequences), []
        for at in range(longest - 1):
            lens = torch.full((sequences,), at + 1, dtype=torch.int32, device="cuda")

            def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: int = at) -> torch.Tensor:
                pages = cache[layer]
                slots = pages.table[:, at // PAGE].long()
                pages.k[slots, at % PAGE], pages.v[slots, at % PAGE] = k, v
                return self.op("attention", q, pages.k, pages.v, pages.table, cu, lens, function="paged_attention")  # noqa: B023  (called before the next iteration)

            positions = torch.full((sequences,), at, device="cuda")
            hidden = self.hidden(tokens[:, at].cuda().contiguous(), positions, attend)
            found.append(self.logp(hidden, tokens[:, at + 1].cuda().contiguous(), temperature))
        return torch.stack(found, 1)
