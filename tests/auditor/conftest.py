"""Hypothesis without a clock: what else the machine does at the moment is no failure of a test."""

from hypothesis import settings

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
