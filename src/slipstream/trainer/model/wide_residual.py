"""The residual stream in float32: sums of layers are not rounded; the inputs of matrix products are.

In bfloat16 each of a layer's two sums is rounded to 8 bits, in engine and trainer at different values. This makes a
third of the difference between their log-probabilities (BENCHMARKS.md). The engine does the same
(`inference/plugin/patches/residual.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from slipstream.trainer.model.vision_towers import text_parts


def widen_residual(network: nn.Module) -> list[RemovableHandle]:
    """Compute the decoder's residual stream in float32, from the embeddings on; norms and rotary embeddings return the
    weights' dtype as before. Returns the hooks for it; their removal undoes it. Float32 weights have none."""
    embedding = cast("Any", network).get_input_embeddings()
    dtype = embedding.weight.dtype
    if dtype == torch.float32:
        return []
    # They make the inputs of products. A norm of queries or keys reads no stream; its input is in `dtype` already.
    kinds = ("RMSNorm", "RotaryEmbedding")
    modules = (module for part in text_parts(network) for module in part.modules())
    readers = [module for module in modules if type(module).__name__.endswith(kinds)]
    narrow = _narrowing(dtype)
    return [embedding.register_forward_hook(_widen), *(each.register_forward_hook(narrow) for each in readers)]


def _widen(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    return output.float()


def _narrowing(dtype: torch.dtype) -> Callable[[nn.Module, Any, Any], Any]:
    def narrow(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        return tuple(each.to(dtype) for each in output) if isinstance(output, tuple) else output.to(dtype)

    return narrow
