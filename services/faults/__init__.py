"""Faults put into real engines: vLLM and Megatron-core, their records through the real client to a real auditor.

`python -m auditor.faults --engines` loads `services.faults.broken:broken` by its name and prints what it finds.
"""
