"""Which weights the model has: of which version, in which parts, in what strength and form."""
