"""From a group of Atropos to rollouts. Pure.

Guarantee: a group is taken whole or refused with a reason; nothing in it is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

from slipstream import records
from slipstream.atropos.protocol import ScoredData
from slipstream.records import Rollout, TurnSpan

MASKED = -100
NO_LOGPROB = 1.0
_SAME = 1e-6


class Refused(Exception):
    """A group cannot be trained on. `reason` names the kind, for metrics."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True)
class Terms:
    """Requirements of the run."""

    max_tokens: int
    """Longest sequence."""
    vocab_size: int
    temperature: float
    needs_logprobs: bool
    needs_teacher: bool = False
    decode: Callable[[Sequence[int]], str] = lambda tokens: ""


def rollouts_of(data: ScoredData, terms: Terms, source: str = "") -> list[Rollout]:
    """The rollouts of a group, without their versions. `source`: the environment's name. Raises `Refused`."""
    _check_shape(data)
    _check_temperature(data, terms.temperature)
    return [_rollout(data, index, terms, source) for index in range(len(data.tokens))]


def _check_shape(data: ScoredData) -> None:
    size = len(data.tokens)
    if not size:
        raise Refused("shape", "the group has no sequence")
    if not all(map(math.isfinite, data.scores)):
        raise Refused("shape", f"the scores {data.scores[:4]} are not finite")
    if data.images:
        raise Refused("images", "the group has images, and groups from Atropos are trained on as text: leave them out")
    whole: dict[str, Any] = {"masks": data.masks, "scores": data.scores}
    by_token = {"masks": data.masks}
    for name in ("advantages", "inference_logprobs", "distill_token_ids", "distill_logprobs"):
        if value := getattr(data, name):  # absent ones come as [] too
            whole[name] = by_token[name] = value
    for name in ("messages", "overrides"):
        if value := getattr(data, name):
            whole[name] = value
    for name, value in whole.items():
        if len(value) != size:
            raise Refused("shape", f"{name} has {len(value)} entries for {size} sequences")
    for name, value in by_token.items():
        for tokens, own in zip(data.tokens, value, strict=True):
            if len(own) != len(tokens):
                raise Refused("shape", f"{name} has {len(own)} entries for {len(tokens)} tokens")


def _check_temperature(data: ScoredData, wanted: float) -> None:
    """Log-probabilities are of one temperature."""
    said: list[Any] = [
        (data.generation_params or {}).get("temperature"),
        (data.group_overrides or {}).get("temperature"),
    ]
    said += [each.get("temperature") for each in data.overrides or ()]
    for value in said:
        if isinstance(value, int | float) and abs(value - wanted) > _SAME:
            raise Refused(
                "temperature",
                f"the group was sampled at temperature {value:g}, and sampling.temperature = {wanted:g}: use one",
            )


def _rollout(data: ScoredData, index: int, terms: Terms, source: str) -> Rollout:
    tokens = data.tokens[index]
    mask = _mask(tokens, data.masks[index], terms)
    override = data.overrides[index] if data.overrides else {}
    advantages: list[float] | None = None
    if override.get("set_advantage_to_zero"):
        advantages = [0.0] * len(tokens)
    elif data.advantages:
        advantages = data.advantages[index]
        if not all(map(math.isfinite, compress(advantages, mask))):
            raise Refused("shape", "an advantage is not finite")
    sequence = records.Sequence(tokens, mask, _logprobs(data, index, mask, terms))
    if advantages is not None:
        sequence.put("advantages", advantages)
    if terms.needs_teacher:
        sequence.put("teacher_logprobs", _teacher_logprobs(data, index, tokens, mask))
    spans = list(_turns(mask))
    first = spans[0].start if spans else len(tokens)
    said = data.messages[index] if data.messages else []
    prompt = next((str(each["content"]) for each in reversed(said) if each["role"] == "user"), "")
    return Rollout(
        id="",
        task_id="",
        group_id="",
        sequences=[sequence],
        reward=data.scores[index],
        outcome="done" if spans else "no_tokens",
        completion="".join(terms.decode(tokens[span.start : span.end]) for span in spans),
        prompt=prompt or terms.decode(tokens[:first]),
        source=source,
        stop="answer",
        num_turns=max(1, len(spans)),
        turn_spans=spans,
    )


def _mask(tokens: list[int], labels: list[int], terms: Terms) -> list[bool]:
    if not tokens or len(tokens) > terms.max_tokens:
        raise Refused(
            "too_long",
            f"a sequence has {len(tokens)} tokens, and inference.max_model_len = {terms.max_tokens}: use shorter ones",
        )
    if not (min(tokens) >= 0 and max(tokens) < terms.vocab_size):
        raise Refused("shape", f"a token is not below {terms.vocab_size}, the size of the model's vocabulary")
    for place, (token, label) in enumerate(zip(tokens, labels, strict=True)):
        if label not in (MASKED, token):
            raise Refused(
                "labels",
                f"masks has {label} at place {place}, and tokens has {token}: give the token, or -100 to mask it",
            )
    mask = [label != MASKED for label in labels]
    mask[0] = False  # nothing comes before it
    return mask


def _logprobs(data: ScoredData, index: int, mask: list[bool], terms: Terms) -> list[float] | None:
    given = data.inference_logprobs[index] if data.inference_logprobs else None
    if given is None or any(trained and not value < NO_LOGPROB for value, trained in zip(given, mask, strict=True)):
        if terms.needs_logprobs:
            raise Refused(
                "no_logprobs",
                "a trained token has no log-probability in inference_logprobs, and algorithm.importance_sampling "
                "needs it: send them from collect_trajectories (the default merge of atroposlib drops them), or set "
                'algorithm.importance_sampling = "none" and algorithm.old_policy = "trainer"',
            )
        return None
    if not all(math.isfinite(value) for value, trained in zip(given, mask, strict=True) if trained):
        raise Refused("shape", "a log-probability is not finite")
    return [value if trained else 0.0 for value, trained in zip(given, mask, strict=True)]


def _teacher_logprobs(data: ScoredData, index: int, tokens: list[int], mask: list[bool]) -> list[float]:
    """The teacher's log-probability of each trained token."""
    if not data.distill_token_ids or not data.distill_logprobs:
        raise Refused("no_teacher", "distill_token_ids and distill_logprobs are missing, and [teacher] needs them")
    found: list[float] = []
    for token, trained, ids, values in zip(
        tokens, mask, data.distill_token_ids[index], data.distill_logprobs[index], strict=True
    ):
        value = dict(zip(ids, values, strict=False)).get(token) if trained else 0.0
        if value is None or not math.isfinite(value):
            raise Refused("no_teacher", f"the teacher's log-probabilities lack the sampled token {token}")
        found.append(value)
    return found


def _turns(mask: Iterable[bool]) -> Iterable[TurnSpan]:
    start: int | None = None
    end = -1
    for end, trained in enumerate(mask):
        if trained and start is None:
            start = end
        elif not trained and start is not None:
            yield TurnSpan(0, start, end)
            start = None
    if start is not None:
        yield TurnSpan(0, start, end + 1)
