"""Faults in Megatron-core and in what it is given: labels, masks, slices, rotary table, head, products, experts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from tokenizers import Tokenizer, models
from torch import Tensor

from services.faults.in_rollout import quarter_positions
from services.faults.small_job import SmallJob
from services.records import Sample

_SLICES: Final = 4
_EVERY: Final = 10  # token whose expert is another one


def temperature_forgotten(job: SmallJob) -> None:
    """Logits are not divided by the temperature."""
    _forward(job, lambda packed, temperature: (packed, 1.0))


def labels_late(job: SmallJob) -> None:
    """Labels are shifted twice: a row is asked for the token after the next."""

    def twice(packed: Any) -> Any:
        targets = packed.targets.clone()
        for first, last in _responses(packed):
            targets[first : last - 1] = packed.targets[first + 1 : last]
        return replace(packed, targets=targets)

    _forward(job, lambda packed, temperature: (twice(packed), temperature))


def rows_late(job: SmallJob) -> None:
    """Logits are not shifted: a token is looked up in the row that has read it."""

    def unshifted(packed: Any) -> Any:
        last = torch.repeat_interleave(packed.offsets[1:].long() - 1, _counts(packed))
        return replace(packed, rows=torch.minimum(packed.rows + 1, last))

    _forward(job, lambda packed, temperature: (unshifted(packed), temperature))


def mask_shifted(job: SmallJob) -> None:
    """The batch's loss mask is one token early: the prompt's last token is in it, the response's last is not."""

    def shifted(sample: Sample) -> Sample:
        whole = (False,) * len(sample.rollout.prompt) + sample.mask
        return replace(sample, mask=(*whole[1:], False)[len(sample.rollout.prompt) :])

    _given(job, shifted)


def through_text(job: SmallJob) -> None:
    """Responses reach the trainer as text, which is tokenised again."""
    tokenizer = _tokenizer(job.model, job.task.vocab_size)

    def again(sample: Sample) -> Sample:
        it = sample.rollout
        ids = tokenizer.encode(tokenizer.decode(list(it.response)), add_special_tokens=False).ids
        logprobs = np.resize(it.logprobs, len(ids)).astype(np.float32)
        return replace(sample, mask=(True,) * len(ids), rollout=replace(it, response=tuple(ids), logprobs=logprobs))

    _given(job, again)


def rope_scaled(job: SmallJob) -> None:
    """Linear scaling by 4, Megatron's `seq_len_interpolation_factor`."""
    table = job.trainer_engine._model.module.rotary_pos_emb
    table.cos, table.sin = quarter_positions(job)


def labels_in_slices(job: SmallJob) -> None:
    """Each of four context-parallel slices shifts its labels by itself: its last row gets its first token."""

    def rolled(packed: Any) -> Any:
        targets = packed.targets.clone()
        for begin, end in pairwise(packed.offsets.tolist()):
            edges = _edges(end - begin + 1)
            for first, last in pairwise(edges):
                targets[packed.rows == begin + last - 1] = packed.ids[begin + first]
        return replace(packed, targets=targets)

    _forward(job, lambda packed, temperature: (rolled(packed), temperature))


def slices_alone(job: SmallJob) -> None:
    """Context-parallel slices exchange no keys and values: each attends to itself only."""
    _unwatched(job)
    ops = job.trainer_engine._model._ops
    attention = ops.self_attention

    def alone(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        cuts = [begin + edge for begin, end in pairwise(cu.tolist()) for edge in _edges(end - begin)[:-1]]
        result: Tensor = attention(q, k, v, torch.tensor([*cuts, int(cu[-1])], dtype=torch.int32))
        return result

    ops.self_attention = alone


def stock_head(job: SmallJob) -> None:
    """Megatron's own output layer, whose logits are bf16, and torch's log_softmax."""
    _unwatched(job)

    def bf16(h: Tensor, w: Tensor, targets: Tensor, *, temperature: float, vocab: int) -> tuple[Tensor, Tensor]:
        heated = torch.matmul(h, w.t()).float()[:, :vocab] / temperature
        return torch.log_softmax(heated, -1).gather(1, targets[:, None]).squeeze(1), torch.logsumexp(heated, -1)

    job.trainer_engine._model.module.output_layer.logp._fused = bf16


def stock_products(job: SmallJob) -> None:
    """Every linear is torch's, which cuts K as it likes."""
    _unwatched(job)
    job.trainer_engine._model._ops.gemm = lambda x, w, **_: torch.matmul(x, w.t())


def stock(job: SmallJob) -> None:
    """A stock Megatron-core."""
    job.restart_trainer("native")


def resumed_late(job: SmallJob) -> None:
    """The trainer is loaded again, with the version before, and counts as holding the newest."""
    before = job.store.folder(job.weights.version - 1)
    job.trainer_engine.load(before)


def other_experts(job: SmallJob) -> None:
    """In the last layer a token in ten goes through another expert; both sides' records tell which they used."""
    _unwatched(job)
    engine, now, calls = job.trainer_engine, list[Tensor](), [0]
    ops, layers = engine._model._ops, engine._decoder.layers
    logprobs, swiglu = engine._model.logprobs, ops.swiglu_activation

    def routed(packed: Any, temperature: float, *see: Any) -> Tensor:
        now[:], calls[0] = [packed.positions], 0
        result: Tensor = logprobs(packed, temperature, *see)
        return result

    def swapped(x: Tensor) -> Tensor:
        calls[0] += 1
        gate, up = x.chunk(2, dim=1)
        other = (now[0] % _EVERY == 3)[:, None] & torch.tensor(calls[0] == layers)
        result: Tensor = swiglu(torch.where(other, torch.cat((up, gate), dim=1), x))
        return result

    engine._model.logprobs, ops.swiglu_activation = routed, swapped
    _declare(job.rollout._sink._client, "submit_rollout", lambda length: np.zeros(length, np.bool_))
    assert job.trainer._sink is not None
    _declare(job.trainer._sink._client, "submit_trainer", lambda length: np.arange(length) % _EVERY == 3)


def _declare(client: Any, method: str, other: Callable[[int], np.ndarray]) -> None:
    """Records name two experts a token, of which the second is another one where `other` says so."""
    submit = getattr(client, method)

    def told(record: Any) -> None:
        experts = np.tile(np.array([0, 1], np.uint16), (len(record.tokens), 1))
        experts[other(len(record.tokens)), 1] = 2
        submit(replace(record, routed_experts=experts))

    setattr(client, method, told)


def _forward(job: SmallJob, change: Callable[[Any, float], tuple[Any, float]]) -> None:
    """change: the packed batch and the temperature → those that Megatron is given."""
    model = job.trainer_engine._model
    logprobs = model.logprobs
    model.logprobs = lambda packed, temperature, *see: logprobs(*change(packed, temperature), *see)


def _given(job: SmallJob, change: Callable[[Sample], Sample]) -> None:
    """change: what becomes of each sample on the way to the trainer."""
    train = job.trainer.train
    job.trainer.train = lambda batch: train(replace(batch, samples=tuple(change(each) for each in batch.samples)))  # type: ignore[method-assign]


def _unwatched(job: SmallJob) -> None:
    """An engine without a contract counts no calls; ours would refuse to go on."""
    job.trainer_engine._model.prove = lambda: None


def _counts(packed: Any) -> Tensor:
    """Targets of each sample of a packed batch."""
    sample = torch.bucketize(packed.rows, packed.offsets[1:].long(), right=True)
    return torch.bincount(sample, minlength=len(packed.offsets) - 1)


def _responses(packed: Any) -> Sequence[tuple[int, int]]:
    """First and last target of each sample of a packed batch."""
    return list(pairwise([0, *_counts(packed).cumsum(0).tolist()]))


def _edges(length: int) -> list[int]:
    return [round(i * length / _SLICES) for i in range(_SLICES + 1)]


def _tokenizer(model: Path, vocab: int) -> Any:
    """The model's own, or one of single letters and pairs of them with ids for the whole vocabulary."""
    own = model / "tokenizer.json"
    if own.exists():
        return Tokenizer.from_file(str(own))
    letters = [chr(0x100 + i) for i in range(math.isqrt(vocab) + 1)]
    pairs = [(a, b) for a in letters for b in letters][: vocab - len(letters)]
    ids = {text: i for i, text in enumerate([*letters, *(a + b for a, b in pairs)])}
    return Tokenizer(models.BPE(vocab=ids, merges=pairs))
