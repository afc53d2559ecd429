"""The settings that `run.exact` refuses. The plan checks the needs of `model.shared_kernels` (`plan/derive.py`)."""

from __future__ import annotations

from operator import attrgetter

from slipstream.config.bounds import Problems
from slipstream.config.parse.messages import show
from slipstream.config.schema import RLConfig, RunConfig
from slipstream.config.sft import SFTConfig
from slipstream.config.traits import uses_critic

_NEEDED = {
    "model.shared_kernels": ("auto", True),
    "model.train_tower": (False,),
    "sampling.temperature": (1.0,),
    "sampling.top_p": (1.0,),
    "sampling.top_k": (0,),
    "sampling.min_p": (0.0,),
    "training.staleness": (0,),
    "training.order": ("auto", "data"),
    "training.optimizer": ("adamw_bf16", "muon", "adamw"),
    "inference.enforce_eager": ("auto", False),
    "run.orchestrators": (1,),
}
"""Keys, and the values that they may have."""


def exact_problems(config: RunConfig) -> Problems:
    """See `checks.contradictions`."""
    if not config.run.exact:
        return
    algorithm = config.algorithm
    learns_apart = isinstance(algorithm, SFTConfig) or algorithm.kind == "distill"
    if learns_apart or config.teacher is not None or uses_critic(config):
        has_teacher = config.teacher is not None and algorithm.kind != "distill"
        found = "with [teacher]" if has_teacher else f'under algorithm.kind = "{algorithm.kind}"'
        yield (
            "run.exact = true makes the log-probabilities of reinforcement learning exact, and was tried without "
            f"teacher and critic only, not {found}: remove it"
        )
    if isinstance(algorithm, RLConfig) and algorithm.old_policy == "engine":
        yield (
            "algorithm.old_policy = \"engine\" takes the engine's log-probabilities for the trainer's, and run.exact = "
            'true compares them: use "trainer"'
        )
    for path, allowed in _NEEDED.items():
        value = attrgetter(path)(config)
        if value not in allowed:
            yield f"{path} = {show(value)} is not among what run.exact = true computes exactly: use {show(allowed[-1])}"
