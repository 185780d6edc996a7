"""The process that runs the reference: `python -m auditor.recompute_worker WEIGHTS_ROOT`.

Jobs come on stdin, answers go to stdout.
A worker holds the newest few models it was asked for; weights are mapped, not read, so several workers share them.
"""

import json
import os
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from auditor.contracts import known_contracts
from auditor.errors import RecomputeError
from auditor.frames import read_frame, write_frame
from rl_kernel.errors import ModelError, RlKernelError
from rl_kernel.reference.model import Decoder

_MODELS = 2


class Models:
    """Decoders by weight digest and contract digest, found under `root`/v000001 and so on."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._contracts = known_contracts()
        self._open: OrderedDict[tuple[str, str], Decoder] = OrderedDict()

    def get(self, version: int, digest: str, contract_digest: str) -> Decoder:
        """The decoder of these weights; RecomputeError where the root does not hold them."""
        key = (digest, contract_digest)
        if key not in self._open:
            self._open[key] = self._load(version, digest, contract_digest)
            while len(self._open) > _MODELS:
                self._open.popitem(last=False)
        self._open.move_to_end(key)
        return self._open[key]

    def _load(self, version: int, digest: str, contract_digest: str) -> Decoder:
        contract = self._contracts.get(contract_digest)
        if contract is None:
            raise RecomputeError(f"no contract has the digest {contract_digest}", "contract_unknown")
        folder = self._folder(version, digest)
        try:
            decoder = Decoder.open(folder, contract)
        except ModelError as error:
            raise RecomputeError(str(error), "weights_unreadable") from error
        if decoder.weight_digest != digest:
            raise RecomputeError(
                f"{folder} holds weights {decoder.weight_digest}, the record names {digest}", "weights_digest"
            )
        return decoder

    def _folder(self, version: int, digest: str) -> Path:
        named = self._root / f"v{version:06d}"
        if (named / "config.json").is_file():
            return named
        for manifest in sorted(self._root.glob("*/manifest.json"), reverse=True):
            if json.loads(manifest.read_text("utf-8")).get("weight_digest") == digest:
                return manifest.parent
        raise RecomputeError(
            f"{named} does not exist, and no manifest under {self._root} names {digest}", "weights_missing"
        )


def answer(models: Models, job: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    """Run one job: what `auditor.recompute` asks for, and the tokens as uint32 in the body."""
    tokens = np.frombuffer(body, "<u4").astype(np.int64)
    try:
        decoder = models.get(job["weight_version"], job["weight_digest"], job["contract_digest"])
        if job["rope_digest"] != decoder.config.rope_digest:
            raise RecomputeError(
                f"the record names rotary parameters {job['rope_digest']}, the weights' config has"
                f" {decoder.config.rope_digest}",
                "rope_differs",
            )
        (logprobs,) = decoder.logprobs([tokens], [job["prompt_len"]], job["temperature"])
    except RecomputeError as error:
        return {"code": error.code, "error": str(error)}, b""
    except RlKernelError as error:
        return {"code": "reference_refused", "error": str(error)}, b""
    return {"mma": decoder.contract.profile.mma}, logprobs.astype("<f4").tobytes()


def main(root: Path) -> None:
    """Answer jobs until stdin ends. The auditor must not slow the job that it watches, so the worker is nice."""
    os.nice(5)
    models = Models(root)
    while True:
        try:
            job, body = read_frame(sys.stdin.buffer)
        except EOFError:
            return
        write_frame(sys.stdout.buffer, *answer(models, job, body))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
