"""The law for Megatron on a GPU: the same model on the reference ops, on the CPU, in a process that sees no GPU.

`python -m tests.gpu.megatron_reference FOLDER RESULT.npz SEGMENTS`: logprobs and every gradient under sm90.
"""

import sys
from pathlib import Path

import numpy as np

from rl_kernel.contracts import model_contract
from rl_kernel.integrations.megatron.parallel import join_tensor_parallel
from rl_kernel.reference.config import DecoderConfig
from tests.integrations.megatron.cases import build, forward_backward, samples
from tests.integrations.megatron.reference_backend import reference_plan


def main() -> None:
    """Write the law's logprobs and gradients."""
    folder, result, segments = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    model = build(folder, reference_plan(model_contract("sm90", segments=segments)), join_tensor_parallel())
    logprobs, gradients = forward_backward(model, samples(DecoderConfig.read(folder).vocab))
    np.savez(result, logprobs=logprobs, **gradients)


if __name__ == "__main__":
    main()
