"""Keys and values into the paged cache: a copy, so no contract; padding of a CUDA graph is left out."""

import torch
import triton
import triton.language as tl

from rl_kernel.ops.accelerator import power_of_two


@triton.jit
def cache_write_kernel(  # type: ignore[no-untyped-def]
    keys, values, key, value, slots, key_token, value_token, page, size, width, BLOCK: tl.constexpr
):
    """One program copies `width` values of one token's key, and of its value, to its slot."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    at = slot // size * page + slot % size * width
    i = tl.arange(0, BLOCK)
    here = i < width
    tl.store(keys + at + i, tl.load(key + token * key_token + i, mask=here), mask=here)
    tl.store(values + at + i, tl.load(value + token * value_token + i, mask=here), mask=here)


def cache_write(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> None:
    """key, value[T,G,D] → keys, values[B,S,G,D] at slots[T] int64, whose negative ones go nowhere.

    Tokens may lie apart, as in a slice of a fused projection; pages have one stride in both caches.
    """
    tokens, heads, dim = key.shape
    assert key.stride()[1:] == value.stride()[1:] == (dim, 1), "heads of one token lie side by side"
    assert keys.stride() == values.stride()
    if tokens:
        cache_write_kernel[(tokens,)](
            keys, values, key, value, slots, key.stride(0), value.stride(0), keys.stride(0), keys.shape[1],
            heads * dim, BLOCK=power_of_two(heads * dim), num_warps=4 if heads * dim >= 512 else 1,
        )  # fmt: skip
