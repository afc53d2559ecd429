"""Derives how long completions and sequences may get."""

from __future__ import annotations

import math
from collections.abc import Sequence

from slipstream.errors import ConfigError
from slipstream.plan.builder import PlanBuilder
from slipstream.plan.memory.sizes import round_up

CHAT_MAX_TOKENS = 2048
LEAST_FOR_THINKING = 256
OUTLIERS = 20
"""One prompt in so many, the longest ones, may be left out."""


def plan_lengths(builder: PlanBuilder) -> None:
    """Derive `sampling.max_tokens` and `inference.max_model_len`."""
    context, data = builder.facts.model.context_length, builder.facts.data
    limit_name = "the model's context"
    if builder.facts.servers and (least := min(server.max_model_len for server in builder.facts.servers)) < context:
        context, limit_name = least, "the servers' --max-length"
    limit, of_context = context, limit_name
    if builder["inference.max_model_len"] != "auto":
        limit, limit_name = builder["inference.max_model_len"], "inference.max_model_len"
        if limit > context:
            raise ConfigError(
                f"inference.max_model_len = {limit} is above {of_context} of {context} tokens: use at most {context}"
            )
    prompt, left = data.max_prompt_tokens, limit - data.max_prompt_tokens
    if left < 1:
        raise ConfigError(
            f"the longest prompt has {prompt} tokens, which leaves no room for a completion in "
            f"{limit_name} of {limit}: use shorter prompts or "
            + ("a model with a longer context" if limit == context else "raise inference.max_model_len")
        )
    wanted, reason = wanted_tokens(
        limit,
        data.max_answer_tokens,
        data.max_turns,
        says_only_answers=builder.facts.model.says_only_answers,
        name=limit_name,
    )
    # Without gold answers a small model gets all the rest.
    cut = reason if wanted == limit else f"what {limit_name} of {limit} leaves beside a prompt of {prompt} tokens"
    builder.derive_auto("sampling.max_tokens", min(wanted, left), reason if wanted <= left else cut)
    max_tokens = builder["sampling.max_tokens"]
    if max_tokens > left:
        raise ConfigError(
            f"sampling.max_tokens = {max_tokens} and the longest prompt of {prompt} tokens do not fit into "
            f"{limit_name} of {limit}: use at most {left}"
        )
    _warn_of_short(builder, max_tokens)
    if data.max_turns > 1:
        reason = f"the model's context: how long {data.max_turns} turns get is not known before"
        builder.derive_auto("inference.max_model_len", context, reason)
    longest, reason = prompt + max_tokens, f"longest prompt of {prompt} and completion of {max_tokens} tokens"
    trained = data.max_sequence_tokens or 0
    if builder.facts.model.original_context and trained > longest:
        longest, reason = trained, f"longest conversation of {trained} tokens: it decides the rotary factors"
    builder.derive_auto("inference.max_model_len", min(context, round_up(longest, 16)), f"{reason}, in multiples of 16")


def wanted_tokens(
    limit: int, max_answer_tokens: int | None, max_turns: int, *, says_only_answers: bool, name: str = "the context"
) -> tuple[int, str]:
    """The longest completion to allow if a sequence may have `limit` tokens, and the reason."""
    if says_only_answers and max_answer_tokens is None:
        return limit, f"no gold answers; what {name} of {limit} leaves"
    if says_only_answers and max_answer_tokens is not None:
        wanted = max(8, math.ceil(1.25 * max_answer_tokens) + 4)
        return wanted, f"1.25 x the longest gold answer of {max_answer_tokens} tokens, and 4, at least 8"
    half = f"half of {name} of {limit}" + (f", shared by {max_turns} turns" if max_turns > 1 else "")
    wanted = max(1, limit // 2 // max_turns)
    if wanted <= CHAT_MAX_TOKENS:
        return wanted, f"{half}: a chat model says more than the gold answer"
    return CHAT_MAX_TOKENS, f"enough for a chat model to reason before it answers; less than {half}"


def least_tokens(prompt_lengths: Sequence[int], limit: int, wanted: int) -> int:
    """The completion length for every prompt to leave within `limit`; longer prompts are dropped. It is `wanted`, or
    the rest after the longest of the shortest 95 % of the prompts: a few long prompts do not shorten all
    completions."""
    lengths = sorted(prompt_lengths)
    usual = lengths[len(lengths) - len(lengths) // OUTLIERS - 1] if lengths else 0
    return max(1, min(wanted, limit - usual))


def _warn_of_short(builder: PlanBuilder, max_tokens: int) -> None:
    answer, thinking = builder.facts.data.max_answer_tokens, builder.original.model.thinking
    if answer is not None and max_tokens < answer:
        builder.warnings.append(
            f"sampling.max_tokens = {max_tokens} is below the longest gold answer of {answer} tokens, "
            "so that task cannot be solved"
        )
    if builder.facts.model.thinks and thinking is not False and max_tokens < LEAST_FOR_THINKING:
        builder.warnings.append(
            f"sampling.max_tokens = {max_tokens} is little for a model that thinks before it answers: use at least "
            f"{LEAST_FOR_THINKING}, or model.thinking = false"
        )
