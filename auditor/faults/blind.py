"""Variants of the causes, written with their right answers by an outside judge who had read none of them.

Weights that arrive in part or by another strength, temperatures, filters, order, fillers, reports; those inside the
model are in `blind_model`. Nothing was tried before the list was written down.
"""

from dataclasses import replace
from typing import Any, Final

import numpy as np

from auditor.compare import Logprobs
from auditor.faults.declared import DeclaredFault
from auditor.faults.reported import of_version, right, with_weights
from auditor.faults.suite import Break, Fault, Pair, filtered, head_of, logits_of, one_of, read_off
from auditor.faults.world import Drawn, World, from_bf16, to_bf16
from rl_kernel.reference.ops import Bits

_HEATS: Final = (0.6, 0.7, 0.85, 1.2)


def at_strength(strength: float, part: str) -> Break:
    """Tensors with `part` in their name are the first version's and `strength` of the change since."""

    def change(world: World, s: Drawn, name: str, value: Bits) -> Bits:
        if part not in name:
            return value
        base = from_bf16(world.decoder(1).weights[name])
        return to_bf16(base + np.float32(strength) * (from_bf16(value) - base))

    return with_weights(change)


def of_low_rank(rank: int) -> Break:
    """The change of every projection since the first version is cut to its largest `rank` directions."""

    def change(world: World, s: Drawn, name: str, value: Bits) -> Bits:
        if "_proj." not in name:
            return value
        base = from_bf16(world.decoder(1).weights[name])
        u, size, v = np.linalg.svd((from_bf16(value) - base).astype(np.float64), full_matrices=False)
        return to_bf16((base + (u[:, :rank] * size[:rank]) @ v[:rank]).astype(np.float32))

    return with_weights(change)


def _one_rank_old(world: World, s: Drawn, name: str, value: Bits) -> Bits:
    """The second of two tensor-parallel ranks keeps its part of every matrix from the version before."""
    if value.ndim == 1:
        return value
    old, mixed = world.decoder(s.version - 1).weights[name], value.copy()
    if "o_proj" in name or "down_proj" in name:
        half = value.shape[1] // 2
        mixed[:, half:] = old[:, half:]
    else:
        half = 192 if "lm_head" in name or "embed" in name else value.shape[0] // 2
        mixed[half:] = old[half:]
    return mixed


def _embedding_as_head(world: World, s: Drawn) -> Logprobs:
    decoder = world.decoder(s.version)
    hidden = decoder.hidden([s.tokens])[s.prompt - 1 : -1]
    return read_off(world, s, decoder.reference.gemm_fp32(hidden, decoder.weights["model.embed_tokens.weight"]))


def _anothers_temperature(world: World, s: Drawn) -> Logprobs:
    others = [heat for heat in _HEATS if heat != s.temperature]
    return world.logprobs(world.decoder(s.version), s, float(world.random.choice(others)))


def _at(heat: Any) -> Break:
    return lambda world, s: world.logprobs(world.decoder(s.version), s, heat(s.temperature))


def _in_bf16(value: float) -> float:
    return float(from_bf16(to_bf16(np.array([value], np.float32)))[0])


def nucleus(mass: float) -> Any:
    """Keep the likeliest tokens up to and with the one that crosses `mass`."""

    def keep(p: np.ndarray) -> np.ndarray:
        order = np.argsort(-p)
        kept = np.zeros(len(p), np.bool_)
        kept[order[: int(np.searchsorted(np.cumsum(p[order]), mass)) + 1]] = True
        return kept

    return keep


def _top_k_then_p(p: np.ndarray) -> np.ndarray:
    among = np.where(p >= np.sort(p)[-30], p, 0.0)
    kept: np.ndarray = nucleus(0.95)(among / among.sum())
    return kept & (among > 0)


def _before_heat(world: World, s: Drawn) -> Logprobs:
    """The nucleus is chosen at temperature 1, and what is left is heated."""
    logits = logits_of(world, s)
    vocab = world.decoder(1).config.vocab
    for row, target in zip(logits, s.tokens[s.prompt :], strict=True):
        p = np.exp((row[:vocab] - row[:vocab].max()).astype(np.float64))
        gone = ~nucleus(0.95)(p / p.sum())
        gone[target] = False
        row[:vocab][gone] = -np.inf
    return read_off(world, s, logits)


def _rolled(by: int) -> Break:
    return lambda world, s: np.roll(right(world, s), by)


def _slice_one_early(world: World, s: Drawn) -> Logprobs:
    """The response's slice begins with the value of the prompt's last token."""
    return world.logprobs(world.decoder(s.version), replace(s, prompt=s.prompt - 1))[:-1]


def _without_tool(world: World, s: Drawn) -> Logprobs:
    """Ten tokens of a tool have no values; those after it close up, and the end is padded with 0.0."""
    values = right(world, s)
    return np.concatenate([values[:30], values[40:], np.zeros(10, np.float32)])


def put(where: slice, filler: float) -> Break:
    """The values at `where` are `filler`."""

    def wrong(world: World, s: Drawn) -> Logprobs:
        values = right(world, s).copy()
        values[where] = filler
        return values

    return wrong


def _biased(world: World, s: Drawn) -> Logprobs:
    logits = logits_of(world, s)
    logits[:, int(np.bincount(s.tokens[s.prompt :]).argmax())] += np.float32(2)
    return read_off(world, s, logits)


def _repetition(world: World, s: Drawn) -> Logprobs:
    """Logits of tokens that were seen, prompt or response, are divided by 1.1, or multiplied where below 0."""
    logits = logits_of(world, s)
    for i, row in enumerate(logits):
        seen = np.unique(s.tokens[: s.prompt + i])
        row[seen] = np.where(row[seen] > 0, row[seen] / np.float32(1.1), row[seen] * np.float32(1.1))
    return read_off(world, s, logits)


def _padding_of_zeros(world: World, s: Drawn) -> Logprobs:
    """Five rows of zeros, to the next multiple of 8, count in the softmax."""
    decoder = world.decoder(s.version)
    z = logits_of(world, s)[:, : decoder.config.vocab].astype(np.float64)
    z = np.concatenate([z, np.zeros((len(z), 5))], axis=1) / s.temperature
    top = z.max(axis=1)
    lse = top + np.log(np.exp(z - top[:, None]).sum(axis=1))
    values: Logprobs = (z[np.arange(len(z)), s.tokens[s.prompt :]] - lse).astype(np.float32)
    return values


def _logits_in_fp16(world: World, s: Drawn) -> Logprobs:
    """The logits in fp16."""
    return read_off(world, s, logits_of(world, s).astype(np.float16).astype(np.float32))


def _softmax_in_bf16(world: World, s: Drawn) -> Logprobs:
    """Heated logits, what is taken off them, and the result are each rounded to bf16."""
    heated = logits_of(world, s)[:, : world.decoder(1).config.vocab] / np.float32(s.temperature)
    z = from_bf16(to_bf16(heated.astype(np.float32)))
    z = from_bf16(to_bf16(z - z.max(axis=1, keepdims=True)))
    lse = from_bf16(to_bf16(np.log(np.exp(z).sum(axis=1))))
    return from_bf16(to_bf16(z[np.arange(len(z)), s.tokens[s.prompt :]] - lse))


def _with_tokens(pair: Pair, tokens: np.ndarray, more: int, prompt: int = 0) -> Pair:
    """The trainer was given other tokens: `more` in the response (values repeat their last), `prompt` in the prompt."""
    rollout, trainer = pair
    values, mask = trainer.logprobs, trainer.mask
    if more > 0:
        values, mask = np.append(values, values[-more:]), np.append(mask, mask[-more:])
    kept: dict[str, Any] = {
        "tokens": tokens.astype(np.uint32), "token_count": len(tokens), "tokens_digest": "",
        "prompt_len": trainer.prompt_len + prompt, "logprobs": values, "mask": mask,
    }  # fmt: skip
    return rollout, replace(trainer, **kept)


def _split(world: World, pair: Pair) -> Pair:
    tokens, at = pair[0].tokens, pair[0].prompt_len + 20
    two = [(tokens[at] + 11) % 300, (tokens[at] + 17) % 300]
    return _with_tokens(pair, np.concatenate([tokens[:at], two, tokens[at + 1 :]]), 1)


def _across_the_cut(world: World, pair: Pair) -> Pair:
    """The last token of the prompt and the first of the response are cut elsewhere in the same text."""
    tokens, at = pair[0].tokens.copy(), pair[0].prompt_len
    tokens[at - 1], tokens[at] = (tokens[at - 1] + 3) % 300, (tokens[at] + 9) % 300
    return _with_tokens(pair, tokens, 0)


def _prompt_cut_left(world: World, pair: Pair) -> Pair:
    return _with_tokens(pair, pair[0].tokens[8:], 0, -8)


def _tool_counted(world: World, pair: Pair) -> Pair:
    mask = pair[0].mask.copy()
    mask[20:34] = False
    return replace(pair[0], mask=mask), pair[1]


def _mask_two_late(world: World, pair: Pair) -> Pair:
    mask = np.ones(len(pair[0].mask), np.bool_)
    mask[20:34] = False
    return replace(pair[0], mask=mask), replace(pair[1], mask=np.roll(mask, 2))


WEIGHTS: Final[tuple[Fault, ...]] = (
    Fault("three versions old", one_of("stale_weights", "weights_never_delivered"),
          lambda w, s: w.logprobs(w.decoder(s.version - 3), s)),
    Fault("last layer two versions old", one_of("stale_weights"), of_version(lambda s: s.version - 2, "layers.1.")),
    Fault("query projections one version old", one_of("stale_weights"), of_version(lambda s: s.version - 1, "q_proj")),
    Fault("embedding one version old", one_of("stale_weights"), of_version(lambda s: s.version - 1, "embed_tokens")),
    Fault("one of two ranks not updated", one_of("stale_weights"), with_weights(_one_rank_old)),
    Fault("adapter of the value projections not merged", one_of("weights_never_delivered", "stale_weights"),
          of_version(lambda s: 1, "v_proj")),
    Fault("adapter at half its strength", one_of("adapter_scale"), at_strength(0.5, "")),
    Fault("adapter merged twice in the feed-forward part", one_of("adapter_scale"), at_strength(2.0, ".mlp.")),
    Fault("adapter's rank cut to 40", one_of("adapter_scale", "other_weights"), of_low_rank(40)),
    Fault("the embedding as output layer", one_of("other_weights", "model_config"), _embedding_as_head),
)  # fmt: skip

VALUES: Final[tuple[Fault, ...]] = (
    Fault("multiplied by the temperature", one_of("temperature"), _at(lambda t: 1 / t)),
    Fault("another sample's temperature", one_of("temperature"), _anothers_temperature),
    Fault("temperature in bf16", one_of("temperature"), _at(_in_bf16)),
    Fault("divided by the temperature after the softmax", one_of("temperature", "value_transform"),
          lambda w, s: w.logprobs(w.decoder(s.version), s, 1.0) / np.float32(s.temperature)),
    Fault("top-k of 50", one_of("truncated_sampling"), filtered(lambda p: p >= np.sort(p)[-50])),
    Fault("top-p before the temperature", one_of("truncated_sampling"), _before_heat),
    Fault("min-p of 0.01", one_of("truncated_sampling"), filtered(lambda p: p >= 0.01 * p.max())),
    Fault("top-k, then top-p", one_of("truncated_sampling"), filtered(_top_k_then_p)),
    Fault("values two late", one_of("off_by_one"), _rolled(2)),
    Fault("values two early", one_of("off_by_one"), _rolled(-2)),
    Fault("the slice begins in the prompt", one_of("off_by_one"), _slice_one_early),
    Fault("a tool's values left out", one_of("off_by_one", "value_order"), _without_tool),
    Fault("seven pads as -1.0", one_of("filler"), put(np.s_[-7:], -1.0)),
    Fault("first value 0.0", one_of("filler"), put(np.s_[:1], 0.0)),
    Fault("minus infinity at the end token", one_of("nonfinite"), put(np.s_[-1:], -np.inf)),
    Fault("three decimals", one_of("value_transform", "bf16_head"),
          lambda w, s: np.round(right(w, s), 3).astype(np.float32)),
    Fault("logits in fp16", one_of("bf16_head"), _logits_in_fp16),
    Fault("softmax in bf16", one_of("bf16_head"), _softmax_in_bf16),
    Fault("output layer rounded to five bits", one_of("weight_precision", "bf16_head"),
          lambda w, s: read_off(w, s, w.decoder(s.version).reference.gemm_fp32(
              w.decoder(s.version).hidden([s.tokens])[s.prompt - 1 : -1],
              (head_of(w.decoder(s.version)) + np.uint16(2)) & np.uint16(0xFFFC)))),
    Fault("five rows of padding", one_of("vocabulary"), _padding_of_zeros),
    Fault("one token favoured", one_of("logit_processor"), _biased),
    Fault("repetition penalty of 1.1", one_of("logit_processor"), _repetition),
)  # fmt: skip

REPORTS: Final[tuple[DeclaredFault, ...]] = (
    DeclaredFault("a tool counted on one side", one_of("mask"), _tool_counted),
    DeclaredFault("mask two late", one_of("off_by_one", "mask"), _mask_two_late),
    DeclaredFault("one token split in two", one_of("retokenisation"), _split),
    DeclaredFault("tokens cut elsewhere at the prompt's end", one_of("retokenisation"), _across_the_cut),
    DeclaredFault("prompt cut on the left", one_of("truncation"), _prompt_cut_left),
)
