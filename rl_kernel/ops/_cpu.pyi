from typing import Any

# Addresses and sizes in, see csrc/cpu/module.cpp; only tensors.py and the cpu.py of each op call it.
def __getattr__(name: str) -> Any: ...
