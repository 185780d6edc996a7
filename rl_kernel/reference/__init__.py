"""The executable contract: slow, obvious, independent of every backend. NumPy and C++ only; never torch."""
