from typing import Any

# The loops of csrc/reference. Outputs come first and are written in place; only ops.py and exp2_table.py call them.
def __getattr__(name: str) -> Any: ...
