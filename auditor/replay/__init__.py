"""From a mismatch to its root: `python -m auditor.replay CAPSULE --weights-root DIR`.

The reference and a side's ops run the same sample call by call. The first call whose inputs are equal and whose output
is not names the op; then each op is swapped for the reference's, to see which swap makes the difference go away.
"""
