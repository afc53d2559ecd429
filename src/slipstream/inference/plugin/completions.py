"""Converts vLLM's `RequestOutput` to `Completion` records, and checks that tokens and log-probabilities agree."""

from __future__ import annotations

import logging
from typing import Any

from slipstream.inference.plugin.patches import scoring
from slipstream.inference.plugin.patches.undelivered import sampled_logprobs
from slipstream.inference.plugin.tools.reader import Reading
from slipstream.inference.plugin.version_labels import Spans
from slipstream.records import AbortCause, Completion, ExpertChoices, GenerateRequest, VersionSpan

_log = logging.getLogger("slipstream.engine")


class Refused(Exception):
    """A request rejected by vLLM, or by Slipstream before it; the text says why."""


def refusals() -> tuple[type[Exception], ...]:
    """vLLM's exceptions for rejected requests."""
    from vllm import exceptions

    theirs: Any = getattr(exceptions, "VLLMClientError", ValueError)  # in vLLM 0.26 they are ValueErrors
    return (ValueError, NotImplementedError, theirs)


def completion(request: GenerateRequest, output: Any, spans: Spans, reading: Reading | None = None) -> Completion:
    """The completion of vLLM's finished output, with the calls read in it. Any exception means that the output
    contradicts itself: tokens without their log-probabilities, or the reverse."""
    out = output.outputs[0]
    token_ids = list(out.token_ids)
    logprobs = sampled_logprobs(out.logprobs, token_ids)
    reason = out.finish_reason if out.finish_reason in ("stop", "length") else "abort"
    scores, likeliest = scoring.prompt_scores(output, request) if request.scores_prompt else (None, None)
    versions = [VersionSpan(start, version) for start, version in spans]
    cause: AbortCause = "aborted" if reason == "abort" else ""
    answer = Completion(request.id, token_ids, logprobs, reason, versions, cause=cause, prompt_logprobs=scores)
    answer.likeliest = likeliest
    if reason != "abort" and getattr(out, "routed_experts", None) is not None:
        answer.experts = expert_choices(out.routed_experts, len(output.prompt_token_ids) + len(token_ids))
    if request.images:
        answer.prompt_ids = list(output.prompt_token_ids)
    if reading is not None:
        answer.tool_calls, answer.content, answer.parser_failure = reading.calls, reading.content, reading.failure
    return answer


def expert_choices(rows: Any, num_tokens: int) -> ExpertChoices:
    """vLLM's array `[tokens, layers, experts per token]` as a record. Raises ValueError unless it has a row for each of
    the request's tokens but the last."""
    if rows.ndim != 3 or len(rows) != num_tokens - 1:
        raise ValueError(f"experts of shape {tuple(rows.shape)} for {num_tokens} tokens")
    width: Any = min(rows.dtype.itemsize, 2)
    _, num_layers, per_token = rows.shape
    return ExpertChoices(rows.astype(f"<u{width}").tobytes(), num_layers, per_token, width)


def aborted(request: GenerateRequest, cause: AbortCause, why: str) -> Completion:
    """The completion of an unfinished request."""
    return Completion(request.id, [], None, "abort", error=why, cause=cause)


def contradiction(request: GenerateRequest, error: Exception) -> Completion:
    """The completion of a request with a contradictory output (`completion`); logs the traceback."""
    _log.error("the answer to request %s contradicts itself", request.id, exc_info=error)
    what = f"{type(error).__name__}: {error}"
    return Completion(request.id, [], None, "abort", error=f"contradicted itself: {what}", contradiction=what)
