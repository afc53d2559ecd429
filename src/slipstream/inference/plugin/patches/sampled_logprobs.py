"""Patches vLLM's samplers to compute the log-probability of the sampled token alone, without ranks and top tokens.

With `logprobs=0` vLLM as shipped also runs a top-k of size 0, and counts in one more pass over the vocabulary how many
tokens are likelier. The log-probability itself still comes from vLLM's own code and the same logits, bit for bit.
"""

from __future__ import annotations

from typing import Any

from slipstream.inference.plugin.patches.patch_table import Absent, changeable


def without_ranks() -> None:
    """Patch `Sampler.gather_logprobs`."""
    from vllm.v1.sample.sampler import Sampler

    _without_ranks(changeable(Sampler, "gather_logprobs"))


def second_without_ranks() -> None:
    """Patch `compute_topk_scores` of vLLM's second model runner (`v1.worker.gpu`)."""
    try:
        from vllm.v1.worker.gpu.sample import logprob
        from vllm.v1.worker.gpu.sample import sampler as second
    except ImportError:  # no Triton, or a vLLM that has one sampler only
        raise Absent("second sampler") from None
    if not (hasattr(second, "compute_topk_scores") and hasattr(logprob, "compute_token_logprobs")):
        raise Absent("compute_topk_scores of its second sampler")
    _second_without_ranks(second, logprob.compute_token_logprobs)


def _without_ranks(sampler: Any) -> None:
    from vllm.v1.outputs import LogprobsTensors

    gather = sampler.gather_logprobs

    def gather_logprobs(logprobs: Any, num_logprobs: int, token_ids: Any) -> Any:
        if num_logprobs:
            return gather(logprobs, num_logprobs, token_ids)
        ids = token_ids.unsqueeze(-1)
        return LogprobsTensors(ids.int(), logprobs.gather(-1, ids), token_ids.new_zeros(len(token_ids)))

    sampler.gather_logprobs = staticmethod(gather_logprobs)


def _second_without_ranks(module: Any, compute: Any) -> None:
    from vllm.v1.outputs import LogprobsTensors

    scores = module.compute_topk_scores

    def compute_topk_scores(
        logits: Any, num_logprobs: int, sampled_token_ids: Any, cu_num_logits: Any = None, **kwargs: Any
    ) -> Any:
        if num_logprobs or kwargs.get("max_per_req_token_ids") or kwargs.get("logits_mode"):
            return scores(logits, num_logprobs, sampled_token_ids, cu_num_logits, **kwargs)
        ids = sampled_token_ids.unsqueeze(-1)
        ranks = sampled_token_ids.new_zeros(len(sampled_token_ids))
        return LogprobsTensors(ids, compute(logits, ids), ranks, cu_num_logits)

    module.compute_topk_scores = compute_topk_scores
