"""Code that somebody gave to a module besides its class's: a `forward` of its own, or a hook.

What is added to a class looks like the class: there the counts of calls, and the auditor, have the word.
"""

import torch
from torch.nn.modules import module as of_all_modules

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def added_code(module: torch.nn.Module) -> str | None:
    """What was added to `module`, as one would say it after `with`, or None."""
    if "forward" in vars(module):
        return "a patched forward"
    if any(getattr(module, hooks) for hooks in _HOOKS):
        return "a hook"
    if any(getattr(of_all_modules, f"_global{hooks}") for hooks in _HOOKS):
        return "a hook for all modules"
    return None
