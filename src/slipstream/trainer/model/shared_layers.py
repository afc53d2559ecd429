"""A network's decoder layers, computed with the engine's operations (`model.shared_kernels`).

Replaces the `forward` of norms, MLPs, attention modules and rotary embeddings; linear layers stay torch's. The residual
stream and the logits are in float32 on both sides (`wide_residual.py`, `PolicyModel.use_fp32_head`).
"""

from __future__ import annotations

from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from slipstream.shared_kernels import CannotShareKernels, flash3
from slipstream.shared_kernels.operations import differentiable_gate, differentiable_norm, differentiable_rotate


def share_kernels(network: nn.Module) -> None:
    """Replace them. On a GPU attention becomes the engine's too, in the whole process; products are pinned before the
    first (`shared_kernels/products.py`). Raises CannotShareKernels if the network, or the GPU, does not allow it."""
    config: Any = cast("Any", network).config
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "silu")
    if activation not in _GATES:
        raise CannotShareKernels(
            f"{type(network).__name__} has {activation}, and only {' and '.join(_GATES)} are known"
        )
    device = next(network.parameters()).device
    if device.type == "cuda":
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        flash3.enable(heads, config.num_key_value_heads, size)
    for module in network.modules():
        name = type(module).__name__
        if name.endswith("RotaryEmbedding"):
            _frequencies_of_the_engine(module, config, device)
        norm, mlp = _OTHER_NORMS.get(name, _norm), _GATES[activation]
        for ending, forward in (("RMSNorm", norm), ("MLP", mlp), ("Attention", _attention)):
            if name.endswith(ending):
                module.forward = MethodType(forward, module)


def _norm(self: Any, hidden_states: Tensor) -> Any:
    return differentiable_norm(hidden_states, self.weight, self.variance_epsilon)


def _gemma_norm(self: Any, x: Tensor) -> Any:
    return differentiable_norm(x, self.weight, self.eps, 1.0)


def _swiglu(self: Any, x: Tensor) -> Any:
    return self.down_proj(differentiable_gate(self.gate_proj(x), self.up_proj(x)))


def _geglu(self: Any, x: Tensor) -> Any:
    return self.down_proj(differentiable_gate(self.gate_proj(x), self.up_proj(x), True))


_OTHER_NORMS = {"Gemma3RMSNorm": _gemma_norm}
_GATES = {"silu": _swiglu, "gelu_pytorch_tanh": _geglu}


def _attention(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Any, Any]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    heads = (*hidden_states.shape[:-1], -1, self.head_dim)
    query, key, value = (make(hidden_states).view(heads) for make in (self.q_proj, self.k_proj, self.v_proj))
    if hasattr(self, "q_norm"):
        query, key = self.q_norm(query), self.k_norm(key)
    cosine, sine = (angles.squeeze(0) for angles in position_embeddings)
    query, key = (differentiable_rotate(each.squeeze(0), cosine, sine)[None] for each in (query, key))
    attend: Any = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
    states = (each.transpose(1, 2) for each in (query, key, value))
    kwargs |= {"dropout": 0.0, "scaling": self.scaling, "sliding_window": getattr(self, "sliding_window", None)}
    output, weights = attend(self, *states, attention_mask, **kwargs)
    return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), weights


def _frequencies_of_the_engine(module: Any, config: Any, device: torch.device) -> None:
    """vLLM raises the base to its powers on the GPU, transformers on the CPU: the last bit can differ, and the angle of
    a late position with it."""
    types = module.rope_type if isinstance(module.rope_type, dict) else {"": module.rope_type}
    for layers, kind in types.items():
        if kind != "default":
            raise CannotShareKernels(f"only plain rotary embeddings are known, not {kind}")
        parameters = config.rope_parameters[layers] if layers else config.rope_parameters
        names = [f"{layers}_{name}" if layers else name for name in ("inv_freq", "original_inv_freq")]
        width = 2 * getattr(module, names[0]).numel()
        with torch.device(device):
            frequencies = 1.0 / (parameters["rope_theta"] ** (torch.arange(0, width, 2).float() / width))
        for name in names:
            getattr(module, name).copy_(frequencies)
