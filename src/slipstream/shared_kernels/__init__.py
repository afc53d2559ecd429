"""`model.shared_kernels`: what trainer and engine both compute with, for log-probabilities that are equal bit for bit.

Products of matrices are cuBLASLt's on both sides, without split-k (`products.py`), which gives each row the same bits
in whatever batch it is; attention is the engine's FlashAttention 3 (`flash3.py`); everything else that a layer computes
is an operation of `operations.py`, whose kernels treat each row alone.
"""

from slipstream.errors import ConfigError


class CannotShareKernels(ConfigError):
    """Trainer and engine cannot compute with the same kernels here; `problem` says why."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"model.shared_kernels = true is not possible ({problem}): set it to false")
        self.problem = problem


CAPABILITY = 9
"""Major compute capability of the GPUs that vLLM's FlashAttention 3 is made for."""
FLASH3 = "vllm_flash_attn/_vllm_fa3_C*.so"
"""vLLM's library of it, in its package."""
