"""What `run.exact` refuses: whatever was not shown to give engine and trainer the same bits."""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.config.schema import RunConfig
from slipstream.config.traits import uses_critic

_NEEDED = {
    "model.dtype": ("auto", "bfloat16"),
    "model.fp32_head": ("auto", True),
    "model.fp32_residual": ("auto", True),
    "model.train_tower": (False,),
    "sampling.temperature": (1.0,),
    "sampling.top_p": (1.0,),
    "sampling.top_k": (0,),
    "sampling.min_p": (0.0,),
    "training.staleness": (0,),
    "training.order": ("auto", "data"),
    "training.packing": (True,),
    "training.compile": ("auto", False),
    "training.ranks": (1,),
    "inference.tensor_parallel_size": (1,),
    "inference.enforce_eager": ("auto", False),
    "run.orchestrators": (1,),
}
"""Keys, and the values that they may have."""
_OPTIONS = ("attention_backend", "compilation_config", "hf_overrides", "quantization", "kv_cache_dtype")


def exact_problems(config: RunConfig) -> Iterator[tuple[str, str]]:
    """See `checks.contradictions`."""
    if not config.run.exact:
        return
    kind = config.algorithm.kind
    if kind == "sft" or kind == "distill" or config.teacher is not None or uses_critic(config):
        yield (
            "run.exact",
            "run.exact = true makes the log-probabilities of reinforcement learning exact, and was tried without "
            f'teacher and critic only, not under algorithm.kind = "{kind}": remove it',
        )
    if config.lora is not None:
        yield (
            "lora",
            "run.exact = true trains all parameters, and a LoRA adapter's products differ in the engine: remove it",
        )
    for path, allowed in _NEEDED.items():
        section, name = path.split(".")
        value = getattr(getattr(config, section), name)
        if value not in allowed:
            right = str(allowed[-1]).lower() if isinstance(allowed[-1], bool) else allowed[-1]
            yield path, f"{path} = {value} is not among what run.exact = true computes exactly: use {right}"
    for name in _OPTIONS:
        if name in config.inference.options:
            yield "inference.options", f"inference.options.{name} changes what run.exact = true depends on: remove it"
