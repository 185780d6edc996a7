"""The all-reduce of a row-parallel layer: a fixed tree over ranks by logical index, whatever the transport.

tree_sum(parts[R,...] fp32, out_dtype) -> [...]
tree_all_reduce(partial fp32, group, out_dtype) -> same shape
"""

from rl_kernel.plan import COMPILED_ONLY, Backend

BACKENDS = (
    Backend(
        op="tree_all_reduce",
        name="cpu",
        module="rl_kernel.ops.tree_all_reduce.cpu",
        device="cpu",
        mma=frozenset(),
        backward=True,
    ),
    Backend(
        op="tree_all_reduce",
        name="triton",
        module="rl_kernel.ops.tree_all_reduce.triton_kernel",
        device="cuda",
        mma=frozenset(),
        backward=True,
    ),
    Backend(
        op="tree_all_reduce",
        name="triton",
        module="rl_kernel.ops.tree_all_reduce.triton_kernel",
        device="rocm",
        mma=frozenset(),
        backward=True,
        unproved=COMPILED_ONLY,
    ),
)
