"""Why one side differs: hypotheses, each tried against the bits, each in a file of its own.

A hypothesis is best tested by computing what it predicts: the reference with exactly that fault, compared bit by bit
with what the side reported (`oracle`). Where nothing can be computed, the pattern of the differences is read instead,
with a lower score. `table.diagnose` ranks what was found; it never gives a bare label.

The rooms go through a model from its end to its beginning: `values` that were reported, the `distribution` that they
are of, the `context` that rows see, the `weights`, the `computation`. `evidence`, `oracle`, `search`, `fit` and `edits`
are what all of them work with.
"""
