"""Values that are right ones of somewhere else, made of right ones, or made of nothing."""
