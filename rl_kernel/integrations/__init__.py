"""Strict ops inside other people's engines. An integration calls what the plan resolved, and can prove it."""
