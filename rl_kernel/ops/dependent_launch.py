"""Dependent launches on Hopper: a kernel is placed on the device while the one before it ends, and waits for it there.

The programs of a kernel that is launched with `DEPENDENT` start once all programs of the kernel before it have called
`announce` or ended. So each of them calls `await_before`: before it touches what another kernel may write or read, and
before it ends, or the kernel after it could begin too early in turn. Kernels still follow one another; what is saved
is the time between two of them.
"""

from triton.language import core

from rl_kernel.ops.accelerator import EX2

DEPENDENT = {"launch_pdl": True} if EX2 else {}  # of Hopper, as EX2 is; ROCm has no such launches


@core.extern
def announce(_semantic=None):  # type: ignore[no-untyped-def]
    """The next kernel may be placed on the device once every program is here; it waits for their ends by itself."""
    _instruction("griddepcontrol.launch_dependents;", _semantic)


@core.extern
def await_before(_semantic=None):  # type: ignore[no-untyped-def]
    """Until the kernels before this one are over and what they wrote is seen."""
    _instruction("griddepcontrol.wait;", _semantic)


def _instruction(name: str, semantic):  # type: ignore[no-untyped-def]
    core.inline_asm_elementwise(
        f"{name} mov.u32 $0, 0;", "=r", [], dtype=core.int32, is_pure=False, pack=1, _semantic=semantic
    )
