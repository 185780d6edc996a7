"""A side that saw another beginning: the prompt cut off in front, wholly or in part."""

from collections.abc import Iterator
from typing import Final

from auditor.causes.evidence import CERTAIN, Evidence, Suggestion, bits_hit, explained, worth_saying
from auditor.causes.oracle import Oracle

_CUTS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def cut_in_front(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """How many tokens were missing at the beginning."""
    window = oracle.window
    found, truth, active = evidence.found[window], evidence.truth[window], evidence.active[window]
    best: tuple[float, str] | None = None
    cuts = [cut for cut in _CUTS if cut < oracle.prompt_len - 1] + [oracle.prompt_len - 1]
    for cut in dict.fromkeys(cuts):
        if cut <= 0:
            continue
        hidden = oracle.hidden(oracle.decoder, oracle.tokens[cut:])
        predicted = oracle.from_logits(oracle.head(oracle.decoder, hidden[oracle.rows - cut]))
        score = explained(found, truth, predicted, active)
        if worth_saying(score) and (best is None or score > best[0]):
            hit = bits_hit(found, predicted, active)
            best = (score, f"the values are those of a sequence without its first {cut} tokens; {hit}")
            if score >= CERTAIN:
                break
    if best is not None:
        yield Suggestion("truncation", *best)
