"""The same weights in a model that computes something else, or in fewer bits, or in another order."""
