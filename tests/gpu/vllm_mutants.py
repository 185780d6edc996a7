"""What a strict GPU engine must notice: each function makes one op be served by something else, or uncounted."""

import torch


def layer_computes_by_itself() -> None:
    """A strict layer in the right place whose forward is plain torch: a hole in the counts, also under replay."""
    from rl_kernel.integrations.vllm import layers

    def forward(self: object, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return torch.nn.functional.silu(x[..., :half]) * x[..., half:]

    layers.StrictSiluAndMul.forward = forward


def operator_replaced() -> None:
    """The operator itself is overridden for CUDA: the model still calls it, the plan does not hear of it."""
    library = torch.library.Library("rl_kernel", "IMPL")
    import rl_kernel.integrations.opaque.library as strict

    def swiglu(x: torch.Tensor, plan: str) -> torch.Tensor:
        half = x.shape[-1] // 2
        return torch.nn.functional.silu(x[..., :half]) * x[..., half:]

    library.impl("swiglu", swiglu, "CUDA")
    strict.kept = library  # type: ignore[attr-defined]


def layer_left_to_vllm() -> None:
    """A layer that the hooks do not replace."""
    from rl_kernel.integrations.vllm import hooks

    del hooks.LAYERS["SiluAndMul"]


def sampler_left_to_vllm() -> None:
    """vLLM's own sampler, whose logprobs are a kernel of its own."""
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    from rl_kernel.integrations.vllm import gpu_worker

    gpu_worker.StrictGPUSampler = lambda runtime, vocab, **like: Sampler(**like)  # type: ignore[assignment,misc]


def kernel_between_ours() -> None:
    """Every op is ours and counted, and a kernel of the compiler's changes what one of them returns."""
    from rl_kernel.integrations.vllm import layers

    strict = layers.StrictSiluAndMul.forward
    layers.StrictSiluAndMul.forward = lambda self, x: strict(self, x) * 1.5


def seal_forgotten() -> None:
    """No op ends a captured piece: replays of what was captured would go uncounted."""
    from rl_kernel.integrations.opaque import plan

    plan.OpaquePlan.seal = lambda self, *, last: None  # type: ignore[method-assign]
