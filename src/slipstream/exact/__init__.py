"""`run.exact`: what trainer and engine both compute with, so that their log-probabilities are equal bit for bit.

Products of matrices are cuBLASLt's on both sides, without split-k (`products.py`), which gives each row the same bits
in whatever batch it is; attention is the engine's FlashAttention 3 (`flash3.py`); everything else that a layer computes
is an operation of `operations.py`, whose kernels treat each row alone.
"""
