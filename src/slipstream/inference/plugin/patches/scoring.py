"""Patches vLLM to compute prompt log-probabilities at the request's temperature.

vLLM scores a prompt's tokens at temperature 1, whatever the request says. A student sampling at another temperature
has to be compared with its teacher at the student's. The patch divides the logits, in float32 as the sampler does,
before the log-softmax. It changes the engine's actual model runner: `GPUModelRunner._get_prompt_logprobs_dict`
(vLLM 0.26, and 0.32 on a CPU) or `PromptLogprobsWorker` (the second model runner, on GPUs).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slipstream.inference.plugin.patches.patch_table import Absent
from slipstream.records import GenerateRequest, Likeliest

PATCH = "scores_at_temperature"


def check(request: GenerateRequest, applied: tuple[str, ...]) -> None:
    """Raises ValueError if this engine cannot score the request as asked."""
    if request.images:
        raise ValueError("a prompt with images cannot be scored: leave out the images, or scores_prompt")
    temperature = request.sampling.temperature
    if temperature <= 0.0:
        raise ValueError(f"temperature {temperature:g} has no log-probabilities: score at one above 0")
    if temperature != 1.0 and PATCH not in applied:
        raise ValueError(
            f"this vLLM scores given tokens at temperature 1 only, and {temperature:g} is asked for: use "
            "sampling.temperature = 1"
        )


def prompt_scores(output: Any, request: GenerateRequest) -> tuple[list[float], Likeliest | None]:
    """The log-probability of each prompt token, from vLLM's output, and the likeliest tokens in its place; zeros for
    the first."""
    entries = output.prompt_logprobs
    if entries is None or len(entries) != len(request.prompt_ids):
        found = "none" if entries is None else f"{len(entries)}"
        raise RuntimeError(f"vLLM scored {found} of {len(request.prompt_ids)} tokens")
    pairs = zip(entries, request.prompt_ids, strict=True)
    logprobs = [0.0 if entry is None else entry[token].logprob for entry, token in pairs]
    if not request.num_likeliest:
        return logprobs, None
    places = (entry and {token: each.logprob for token, each in entry.items()} for entry in entries)
    return logprobs, Likeliest.of(places, request.num_likeliest)


def at_request_temperature(runner: Any) -> None:
    """Patch `runner`, vLLM's model runner."""
    if hasattr(runner, "_get_prompt_logprobs_dict") and hasattr(runner, "num_prompt_logprobs"):
        _patch_runner(runner)
    elif hasattr(getattr(runner, "prompt_logprobs_worker", None), "compute_prompt_logprobs"):
        _patch_prompt_worker(runner.prompt_logprobs_worker)
    else:
        raise Absent("known way of scoring a prompt")


def _patch_runner(runner: Any) -> None:
    original: Callable[..., dict[str, Any]] = runner._get_prompt_logprobs_dict
    normalise: Callable[[Tensor], Tensor] = runner.sampler.compute_logprobs

    def scored(hidden_states: Tensor, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        wanted: dict[str, int] = runner.num_prompt_logprobs
        by_temperature: dict[float, dict[str, int]] = {}
        for name, number in wanted.items():
            params = runner.requests[name].sampling_params
            by_temperature.setdefault(params.temperature or 1.0, {})[name] = number
        found: dict[str, Any] = {}
        try:
            for temperature, group in by_temperature.items():
                runner.num_prompt_logprobs = group  # vLLM removes requests after scoring their last token
                runner.sampler.compute_logprobs = lambda logits, by=temperature: normalise(logits.float() / by)
                found |= original(hidden_states, num_scheduled_tokens)
        finally:
            runner.sampler.compute_logprobs = normalise
            runner.num_prompt_logprobs = wanted
        left = {name for group in by_temperature.values() for name in group}
        for name in [name for name in wanted if name not in left]:
            del wanted[name]
        return found

    runner._get_prompt_logprobs_dict = scored


def _patch_prompt_worker(worker: Any) -> None:
    add, remove, compute = worker.add_request, worker.remove_request, worker.compute_prompt_logprobs
    temperatures: dict[str, float] = {}

    def add_request(name: str, index: int, params: Any) -> None:
        add(name, index, params)
        if params.prompt_logprobs is not None:
            temperatures[name] = params.temperature or 1.0

    def remove_request(name: str) -> None:
        temperatures.pop(name, None)
        remove(name)

    def compute_prompt_logprobs(logits_of: Callable[[Tensor], Tensor], hidden: Tensor, batch: Any, *rest: Any) -> Any:
        wanted = [temperatures.get(name, 1.0) for name in batch.req_ids]
        if set(wanted) <= {1.0}:
            return compute(logits_of, hidden, batch, *rest)
        # vLLM computes the logits of the step's tokens in order, some at a time.
        by_token = torch.tensor(wanted).repeat_interleave(torch.as_tensor(batch.num_scheduled_tokens))
        left = by_token.to(hidden.device, non_blocking=True)[:, None]

        def divided(some: Tensor) -> Tensor:
            nonlocal left
            mine, left = left[: len(some)], left[len(some) :]
            return logits_of(some).float() / mine

        found = compute(divided, hidden, batch, *rest)
        if 0 < len(left) < len(by_token):
            raise RuntimeError(f"vLLM scored {len(by_token) - len(left)} of the {len(by_token)} tokens of a step")
        return found

    worker.add_request, worker.remove_request = add_request, remove_request
    worker.compute_prompt_logprobs = compute_prompt_logprobs
