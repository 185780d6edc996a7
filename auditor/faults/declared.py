"""Faults that the two reports themselves show: the sides are not comparable, and the field says why."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from auditor.faults.suite import Pair, one_of
from auditor.faults.world import World


@dataclass(frozen=True, slots=True)
class DeclaredFault:
    """causes: right answers. bend: changes the two reports."""

    name: str
    causes: frozenset[str]
    bend: Callable[[World, Pair], Pair]


def _shifted_mask(world: World, pair: Pair) -> Pair:
    rollout, trainer = pair
    mask = world.random.random(len(rollout.mask)) < 0.7
    return replace(rollout, mask=mask), replace(trainer, mask=np.roll(mask, 1) & (np.arange(len(mask)) > 0))


def _retokenised(world: World, pair: Pair) -> Pair:
    rollout, trainer = pair
    tokens = rollout.tokens.copy()
    at = rollout.prompt_len + 3
    tokens[at], tokens[at + 1] = (tokens[at] + 1) % 300, (tokens[at + 1] + 7) % 300
    return rollout, replace(trainer, tokens=tokens, tokens_digest="")


def _merged_tokens(world: World, pair: Pair) -> Pair:
    """Two tokens become one on the way through text."""
    rollout, trainer = pair
    at = rollout.prompt_len + 5
    tokens = np.concatenate([rollout.tokens[:at], [(rollout.tokens[at] + 5) % 300], rollout.tokens[at + 2 :]])
    kept: dict[str, Any] = {"tokens": tokens.astype(np.uint32), "token_count": len(tokens), "tokens_digest": ""}
    return rollout, replace(trainer, **kept, logprobs=trainer.logprobs[:-1], mask=trainer.mask[:-1])


def _cut_off(world: World, pair: Pair) -> Pair:
    rollout, trainer = pair
    assert trainer.tokens is not None
    kept: dict[str, Any] = {"tokens": trainer.tokens[:-9], "token_count": trainer.token_count - 9, "tokens_digest": ""}
    return rollout, replace(trainer, **kept, logprobs=trainer.logprobs[:-9], mask=trainer.mask[:-9])


def _cut_moved(world: World, pair: Pair) -> Pair:
    rollout, trainer = pair
    moved: dict[str, Any] = {
        "prompt_len": trainer.prompt_len + 1,
        "logprobs": trainer.logprobs[1:],
        "mask": trainer.mask[1:],
    }
    return rollout, replace(trainer, **moved)


DECLARED: Final[tuple[DeclaredFault, ...]] = (
    DeclaredFault("mask shifted by one", one_of("off_by_one"), _shifted_mask),
    DeclaredFault("retokenised", one_of("retokenisation"), _retokenised),
    DeclaredFault("two tokens merged", one_of("retokenisation"), _merged_tokens),
    DeclaredFault("trainer's sequence cut off", one_of("truncation"), _cut_off),
    DeclaredFault("prompt cut moved by one", one_of("off_by_one"), _cut_moved),
    DeclaredFault(
        "version says stale",
        one_of("stale_weights"),
        lambda w, p: (p[0], replace(p[1], weight_version=p[1].weight_version + 1)),
    ),
)
