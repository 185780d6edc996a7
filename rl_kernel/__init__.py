"""Strict ops for rollout engines and trainers, and the executable contract they are held to."""

__version__ = "0.1.0"
