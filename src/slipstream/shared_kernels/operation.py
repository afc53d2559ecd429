"""Functions as operations, opaque to a compiler.

Without a compiler the function is called directly. torch's dispatch of a custom operation takes 0.2 to 0.4 ms of a CPU
(H100's host, torch 2.11). A decoder layer calls ten operations in both passes, and with a small model the GPU waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Operation:
    """`function` as the operation `slipstream::name` of `schema`, to be called like it. `fake` gives results of the
    right shapes. With `keep` (a `setup_context`) and `backward` it has gradients; both take as many arguments as the
    call had."""

    def __init__(
        self,
        name: str,
        schema: str,
        function: Callable[..., Any],
        fake: Callable[..., Any],
        *,
        keep: Callable[..., None] | None = None,
        backward: Callable[..., Any] | None = None,
    ) -> None:
        defined = torch.library.custom_op(f"slipstream::{name}", function, mutates_args=(), schema=schema)
        defined.register_fake(fake)
        self._opaque: Any = getattr(torch.ops.slipstream, name).default
        self._direct = function
        self._with_gradients = function
        assert (keep is None) == (backward is None)
        if keep is not None and backward is not None:
            defined.register_autograd(backward, setup_context=keep)
            self._with_gradients = _function(name, function, keep, backward)

    def __call__(self, *inputs: Any) -> Any:
        """Compute it. A compiler, its backward pass, and selective checkpointing are given the operation."""
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():  # pyright: ignore
            return self._opaque(*inputs)
        return self._with_gradients(*inputs) if torch.is_grad_enabled() else self._direct(*inputs)


def _function(
    name: str,
    function: Callable[..., Any],
    keep: Callable[..., None],
    backward: Callable[..., Any],
) -> Callable[..., Any]:
    """A `torch.autograd.Function` of the three. `forward` calls `keep`: with a `setup_context`, torch inspects the
    signature at each call (36 microseconds)."""

    def forward(ctx: Any, *inputs: Any) -> Any:
        output = function(*inputs)
        keep(ctx, inputs, output)
        return output

    parts = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    kind: Any = type(name, (torch.autograd.Function,), parts)
    return kind.apply
