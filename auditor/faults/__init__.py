"""Faults on purpose: what people really got wrong, done to a real model, and what the auditor then says.

`python -m auditor.faults` prints the confusion matrix. Nothing is noise added to a number: every wrong log-probability
is recomputed by the reference with the fault inside.
"""
