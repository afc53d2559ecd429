"""Products of matrices whose rows do not depend on the batch: cuBLASLt without split-k adds up each output in one
order, whatever the number of rows or of other columns (seen on H100, torch 2.11: 1 to 16,384 rows, bfloat16 and float32
outputs, merged and separate weights)."""

from __future__ import annotations

import os
from typing import Any

import torch

_WORKSPACE = {"CUBLASLT_WORKSPACE_SIZE": "1"}
"""In KiB, read at a process's first product. Without split-k a workspace is of no use, and for few rows of long inputs
cuBLASLt otherwise chooses a kernel that takes ten times as long."""
_REPEATABLE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""What torch asks for under deterministic algorithms. The smaller `:16:8` makes each call take 0.1 ms of the CPU."""


def pin_products() -> None:
    """Have this process compute them so. Call it before its first product on a GPU."""
    os.environ.update(_WORKSPACE)
    products: Any = torch.backends.cuda.matmul
    for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"):
        try:
            setattr(products, name, (False, False))
        except (TypeError, RuntimeError):  # an older torch has no setting for split-k
            setattr(products, name, False)
    products.allow_tf32 = False
    torch.backends.cuda.preferred_blas_library("cublaslt")


def be_deterministic() -> None:
    """Have torch's backward passes on a GPU add up in one order, or refuse. Call it before its first product there."""
    os.environ.update(_REPEATABLE)
    flags: Any = torch.utils.deterministic
    torch.use_deterministic_algorithms(True)
    flags.fill_uninitialized_memory = False
