"""Which tokens, keys, values and positions a row of the model sees."""
