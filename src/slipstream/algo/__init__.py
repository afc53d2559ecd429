"""Pure functions on tensors: advantages, losses, processed log-probabilities, packing.

Guarantees: no state, no input changed in place, no effect on import. Shape suffixes: N trainable tokens of
a micro-batch, S sequences, V vocabulary.
"""
