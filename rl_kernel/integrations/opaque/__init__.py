"""Strict ops as torch operators that no compiler looks into, and their evidence when CUDA graphs replay them.

`library` defines the operators with their shapes, `plan` binds them to one plan's backends, `graph_tally` counts
replays on the device. Eager code needs none of this: it calls what the plan resolved.
"""
