"""The teacher of on-policy distillation: a frozen model's log-probabilities of the tokens that the policy sampled.

Guarantees: after `score`, a trainable rollout has a finite teacher log-probability for each sampled token. A dead
teacher is restarted, as often as allowed, or its error ends the run. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import Any, Protocol

from slipstream.engine_protocols import Generates
from slipstream.errors import ConfigError, DeadlineError, EngineError
from slipstream.openai_client import OpenAIClient, Unanswered
from slipstream.orchestrator.concurrency import retry_on_restart
from slipstream.records import GenerateRequest, Rollout, SamplingParams

_PATIENCE_S = 120.0
"""How long requests to a server that is busy or restarting are repeated."""
_FIRST_PATIENCE_S = 10.0
"""The same when a run connects for the first time."""
_MAX_CONCURRENT = 64
"""Concurrent requests to a teacher server."""


class Refused(Exception):
    """The teacher cannot score these tokens; the text says why."""


class Source(Protocol):
    """Computes a teacher's log-probabilities."""

    async def logprobs(self, token_ids: list[int]) -> list[float]:
        """Return one log-probability per token, 0.0 for the first. Raises `Refused` for tokens that cannot be scored,
        and `EngineError` when the teacher cannot be reached."""
        ...


async def score(source: Source, rollout: Rollout) -> None:
    """Give every sequence the stream `teacher_logprobs`. A rollout that the teacher
    refuses gets the outcome `engine_error`, and is not trained on."""
    try:
        for sequence in rollout.sequences:
            end = max((index + 1 for index, trained in enumerate(sequence.mask) if trained), default=0)
            values = await source.logprobs(sequence.token_ids[:end]) if end else []
            if not all(map(math.isfinite, itertools.compress(values, sequence.mask))):
                raise Refused("gave a log-probability that is not finite")
            sequence.put("teacher_logprobs", values)
    except Refused as refusal:
        rollout.outcome, rollout.error = "engine_error", f"the teacher {refusal}"


class EngineSource:
    """An engine of this run."""

    def __init__(self, engine: Generates, *, temperature: float, timeout_s: float) -> None:
        self._engine = engine
        # vLLM samples at least one token, which is discarded.
        self._sampling = SamplingParams(max_tokens=1, temperature=temperature)
        self._timeout_s = timeout_s
        self._serial = itertools.count()

    async def logprobs(self, token_ids: list[int]) -> list[float]:
        """See `Source`."""

        async def attempt() -> list[float]:
            request = GenerateRequest(
                f"score.{next(self._serial)}", token_ids, self._sampling, timeout_s=self._timeout_s, scores_prompt=True
            )
            completion = await self._engine.generate(request)
            if completion.prompt_logprobs is None:
                raise Refused(completion.error or "returned no log-probabilities")
            return completion.prompt_logprobs

        try:
            return await retry_on_restart(self._engine, attempt)
        except DeadlineError as error:
            raise DeadlineError(f"the teacher's engine: {error}") from error
        except EngineError as error:
            raise EngineError(f"the teacher's engine: {error}") from error


class ServerSource:
    """An OpenAI-compatible vLLM server outside this run; its log-probabilities are those of temperature 1. Belongs to
    one event loop."""

    def __init__(self, url: str, name: str, key: str, *, timeout_s: float) -> None:
        self._client = OpenAIClient(url, key)
        self._shown = self._client.shown
        self._name = name
        self._timeout_s = timeout_s
        self._patience_s = _FIRST_PATIENCE_S
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT)

    async def connect(self, text: str, token_ids: list[int]) -> None:
        """Find the model, and check that its tokenizer encodes `text` as `token_ids`, as the policy's does. Raises
        ConfigError with what is wrong."""
        try:
            await self._connect(text, token_ids)
            self._patience_s = _PATIENCE_S
        except Refused as refusal:
            raise ConfigError(
                f"the teacher at {self._shown} {refusal}: look at teacher.url and teacher.name"
            ) from refusal

    async def _connect(self, text: str, token_ids: list[int]) -> None:
        listed = await self._request("GET", "/models")
        names = [str(each.get("id")) for each in listed.get("data", [])]
        if not self._name and len(names) == 1:
            self._name = names[0]
        if self._name not in names:
            known = ", ".join(names) or "none"
            raise ConfigError(
                f'teacher.name = "{self._name}" is not served at {self._shown}, which has {known}: name one'
            )
        body = {"model": self._name, "prompt": text, "add_special_tokens": False}
        # vLLM has it beside /v1.
        answer = await self._request("POST", "/../tokenize" if self._client.url.endswith("/v1") else "/tokenize", body)
        if answer.get("tokens") != token_ids:
            raise ConfigError(
                f"the teacher at {self._shown} has another tokenizer than model.path (a text of {len(token_ids)} "
                f"tokens has {len(answer.get('tokens') or [])} there): use a teacher of the same family"
            )

    async def logprobs(self, token_ids: list[int]) -> list[float]:
        """See `Source`."""
        body = {"model": self._name, "prompt": token_ids, "max_tokens": 1, "prompt_logprobs": 0}
        async with self._slots:
            answer = await self._request("POST", "/completions", body)
        try:
            entries: list[dict[str, Any] | None] = answer["choices"][0]["prompt_logprobs"]
            pairs = zip(entries, token_ids, strict=True)
            return [0.0 if entry is None else float(entry[str(token)]["logprob"]) for entry, token in pairs]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineError(
                f"the teacher at {self._shown} returned no prompt_logprobs ({error!r}): serve it with vLLM"
            ) from error

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the JSON answer. A try has the time limit of a request also when it begins after a restart."""
        patience_s = self._patience_s
        try:
            return await self._client.ask(
                method, path, body, deadline_s=self._timeout_s + patience_s, patience_s=patience_s
            )
        except Unanswered as error:
            if error.status == 400:
                raise Refused(str(error)) from None
            kind = DeadlineError if error.is_late else EngineError
            raise kind(
                f"the teacher at {self._shown} cannot be asked ({error}): look at that server, and at teacher.url"
            ) from None
