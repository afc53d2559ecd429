"""Patches vLLM to compute with the trainer's operations (`model.shared_kernels`).

Norms, gates of MLPs and rotary embeddings are the operations of `slipstream.shared_kernels`. Products are pinned
(`products.py`), and a linear layer is torch's. Attention always takes the kernels for many queries, with a prefill's
blocks of keys, and goes through the keys in one piece. Log-probabilities come from the trainer's kernel,
on the logits of the sampling. `VLLM_BATCH_INVARIANT` is not needed for these models, and makes each product
take 0.1 ms of the CPU.

Changed: `forward` of `RMSNorm`, `GemmaRMSNorm`, `SiluAndMul`, `GeluAndMul` and `RotaryEmbedding`,
`UnquantizedLinearMethod.apply`, `flash_attn_varlen_func` of the FlashAttention backend, `__init__`, `compute_logprobs`
and `gather_logprobs` of `Sampler`, `compute_topk_scores` of the second sampler.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from slipstream.inference.plugin.patches.patch_table import Absent

_LAYERS = "vllm.model_executor.layers"


def share_operations() -> None:
    """Patch all of it. Raises Absent if a part is missing."""
    import torch

    from slipstream.shared_kernels import operations
    from slipstream.shared_kernels.products import pin_products

    def norm(offset: float) -> Any:
        def forward(self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
            output, total = operations.norm(x, self.weight, self.variance_epsilon, residual, offset)
            return output if residual is None else (output, total)

        return forward

    def gate(gelu: bool) -> Any:
        def forward(self: Any, x: Tensor) -> Tensor:
            if gelu and self.approximate != "tanh":
                raise ValueError(f"GELU's approximation is {self.approximate}, and only tanh is known")
            return operations.gate(*x.chunk(2, -1), gelu=gelu)

        return forward

    def rotate(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None, *_: Any) -> Any:
        angles = self.cos_sin_cache.index_select(0, positions.flatten()).chunk(2, -1)
        turned = (None if each is None else _turned(each, self.head_size, angles) for each in (query, key))
        return tuple(turned)

    def product(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.nn.functional.linear(x, layer.weight, bias)

    def _turned(x: Tensor, size: int, angles: Any) -> Tensor:
        return operations.rotate(x.view(x.shape[0], -1, size), *angles).view(x.shape)

    pin_products()
    _replace(f"{_LAYERS}.layernorm", "RMSNorm", "forward", lambda _: norm(0.0))
    _replace(f"{_LAYERS}.layernorm", "GemmaRMSNorm", "forward", lambda _: norm(1.0))
    _replace(f"{_LAYERS}.activation", "SiluAndMul", "forward", lambda _: gate(False))
    _replace(f"{_LAYERS}.activation", "GeluAndMul", "forward", lambda _: gate(True))
    _replace(f"{_LAYERS}.rotary_embedding.base", "RotaryEmbedding", "forward", lambda _: rotate)
    _replace(f"{_LAYERS}.linear", "UnquantizedLinearMethod", "apply", lambda _: product)
    _replace("vllm.v1.attention.backends.flash_attn", "", "flash_attn_varlen_func", _with_blocks)
    _log_probabilities()


def _with_blocks(plain: Any) -> Any:
    """Attention with the trainer's blocks of queries and keys (`flash3.py`)."""
    from slipstream.shared_kernels.flash3 import LEAST_QUERIES, check_window

    def attend(*args: Any, **kwargs: Any) -> Any:
        left, _ = kwargs.get("window_size") or (-1, -1)
        check_window(left + 1, kwargs["max_seqlen_k"])
        rows = max(LEAST_QUERIES, kwargs["max_seqlen_q"])
        pinned = {"max_seqlen_q": rows, "num_splits": 1, "scheduler_metadata": None, "window_size": None}
        return plain(*args, **kwargs | pinned)

    return attend


def _log_probabilities() -> None:
    from vllm.v1.outputs import LogprobsTensors

    from slipstream.algo import logprobs_triton

    def of(logits: Tensor, ids: Tensor) -> Tensor:
        # Rows without vLLM's padding of a vocabulary: the known facts of their distance decide the kernel's order of
        # addition.
        return logprobs_triton.forward(logits.contiguous(), ids, 1.0)[0][:, None]

    def returns_logits(plain: Any) -> Any:
        def start(self: Any, *args: Any, **kwargs: Any) -> None:
            plain(self, *args, **kwargs)
            if self.logprobs_mode == "processed_logprobs":
                self.topk_topp_sampler.logprobs_mode = "processed_logits"

        return start

    def gather(plain: Any) -> Any:
        def gathered(logits: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
            if num_logprobs:
                return plain(logits.float().log_softmax(-1), num_logprobs, token_ids)
            ranks = token_ids.new_zeros(len(token_ids))
            return LogprobsTensors(token_ids.unsqueeze(-1).int(), of(logits, token_ids), ranks)

        return staticmethod(gathered)

    def second(plain: Any) -> Any:
        def scores(logits: Tensor, num_logprobs: int, ids: Tensor, cu_num_logits: Any = None, **kwargs: Any) -> Any:
            if num_logprobs or kwargs.get("max_per_req_token_ids") or kwargs.get("logits_mode"):
                return plain(logits, num_logprobs, ids, cu_num_logits, **kwargs)
            return LogprobsTensors(ids.unsqueeze(-1), of(logits, ids), ids.new_zeros(len(ids)), cu_num_logits)

        return scores

    # The first sampler hands on logits wherever it hands on log-probabilities, until they are gathered.
    first = "vllm.v1.sample.sampler"
    _replace(first, "Sampler", "__init__", returns_logits)
    _replace(first, "Sampler", "compute_logprobs", lambda _: staticmethod(lambda logits: logits))  # pyright: ignore[reportUnknownLambdaType]
    _replace(first, "Sampler", "gather_logprobs", gather)
    _replace("vllm.v1.worker.gpu.sample.sampler", "", "compute_topk_scores", second)


def _replace(module: str, owner: str, name: str, make: Callable[[Any], Any]) -> None:
    """Put `make(what is there)` in the place of a function of a module, or of its class `owner`."""
    try:
        place: Any = importlib.import_module(module)
        place = getattr(place, owner) if owner else place
        setattr(place, name, make(getattr(place, name)))
    except (ImportError, AttributeError) as error:
        raise Absent(f"{'.'.join(filter(None, (module, owner, name)))} ({error})") from error
