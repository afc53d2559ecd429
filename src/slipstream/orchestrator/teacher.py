"""The teacher of on-policy distillation: a frozen model's log-probabilities of the policy's sampled tokens, and its own
likeliest tokens in their places.

Guarantees: after `score`, a trainable rollout has a finite teacher log-probability for each sampled token. A dead
teacher is restarted, as often as allowed, or its error ends the run. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import Any, NamedTuple, Protocol

from slipstream.engine_protocols import Generates
from slipstream.errors import ConfigError, DeadlineError, EngineError
from slipstream.openai_client import OpenAIClient, Unanswered
from slipstream.orchestrator.concurrency import retry_on_restart
from slipstream.records import GenerateRequest, Likeliest, Rollout, SamplingParams, Stream

_PATIENCE_S = 120.0
"""How long requests to a busy or restarting server are repeated."""
_FIRST_PATIENCE_S = 10.0
"""The same when a run connects for the first time."""
_MAX_CONCURRENT = 64
"""Concurrent requests to a teacher server."""


class Refused(Exception):
    """The teacher cannot score these tokens; the text says why."""


class Scored(NamedTuple):
    """A teacher's judgement of tokens."""

    logprobs: list[float]
    """One for each token; 0.0 for the first."""
    likeliest: Likeliest | None = None
    """Under `teacher.top_k`, in the place of each token."""


class Source(Protocol):
    """Computes a teacher's log-probabilities."""

    async def scores(self, token_ids: list[int]) -> Scored:
        """Score the tokens. Raises `Refused` if they cannot be scored, and `EngineError` when the teacher cannot
        be reached."""
        ...


async def score(source: Source, rollout: Rollout) -> None:
    """Give every sequence the stream `teacher_logprobs`, and `teacher_top_ids` and `teacher_top_logprobs` if there are
    any. A rollout refused by the teacher gets the outcome `engine_error`, and is not trained on."""
    try:
        for sequence in rollout.sequences:
            end = max((index + 1 for index, trained in enumerate(sequence.mask) if trained), default=0)
            values, likeliest = await source.scores(sequence.token_ids[:end]) if end else Scored([])
            if not all(map(math.isfinite, itertools.compress(values, sequence.mask))):
                raise Refused("gave a log-probability that is not finite")
            sequence.streams["teacher_logprobs"] = Stream.of(itertools.compress(values, sequence.mask))
            if likeliest is not None:
                own = likeliest.where(sequence.mask)
                sequence.streams |= {"teacher_top_ids": own.token_ids, "teacher_top_logprobs": own.logprobs}
    except Refused as refusal:
        rollout.outcome, rollout.error = "engine_error", f"the teacher {refusal}"


class EngineSource:
    """An engine of this run."""

    def __init__(self, engine: Generates, *, temperature: float, timeout_s: float, top_k: int = 0) -> None:
        self._engine = engine
        self._top_k = top_k
        # vLLM samples at least one token; it is discarded.
        self._sampling = SamplingParams(max_tokens=1, temperature=temperature)
        self._timeout_s = timeout_s
        self._serial = itertools.count()

    async def scores(self, token_ids: list[int]) -> Scored:
        """See `Source`."""

        async def attempt() -> Scored:
            request = GenerateRequest(
                f"score.{next(self._serial)}",
                token_ids,
                self._sampling,
                timeout_s=self._timeout_s,
                scores_prompt=True,
                num_likeliest=self._top_k,
            )
            completion = await self._engine.generate(request)
            if completion.prompt_logprobs is None:
                raise Refused(completion.error or "returned no log-probabilities")
            return Scored(completion.prompt_logprobs, completion.likeliest)

        try:
            return await retry_on_restart(self._engine, attempt)
        except DeadlineError as error:
            raise DeadlineError(f"the teacher's engine: {error}") from error
        except EngineError as error:
            raise EngineError(f"the teacher's engine: {error}") from error


class ServerSource:
    """An OpenAI-compatible vLLM server outside this run; its log-probabilities are of temperature 1. Belongs to
    one event loop."""

    def __init__(self, url: str, name: str, key: str, *, timeout_s: float, top_k: int = 0) -> None:
        self._client = OpenAIClient(url, key)
        self._top_k = top_k
        self._shown = self._client.shown
        self._name = name
        self._timeout_s = timeout_s
        self._patience_s = _FIRST_PATIENCE_S
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT)

    async def connect(self, text: str, token_ids: list[int]) -> None:
        """Find the model, and check its tokenizer: it must encode `text` as `token_ids`, like the policy's. Raises
        ConfigError with the problem."""
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
        if self._top_k:
            await self._try_likeliest(token_ids)

    async def _try_likeliest(self, token_ids: list[int]) -> None:
        try:
            await self.scores(token_ids)
        except Refused as refusal:
            raise ConfigError(
                f"teacher.top_k = {self._top_k}: the teacher at {self._shown} {refusal}: start it with vLLM's "
                f"--max-logprobs {self._top_k}, or lower teacher.top_k"
            ) from refusal

    async def scores(self, token_ids: list[int]) -> Scored:
        """See `Source`."""
        body = {"model": self._name, "prompt": token_ids, "max_tokens": 1, "prompt_logprobs": self._top_k}
        async with self._slots:
            answer = await self._request("POST", "/completions", body)
        try:
            entries: list[dict[str, Any] | None] = answer["choices"][0]["prompt_logprobs"]
            places = [
                None if entry is None else {int(token): float(each["logprob"]) for token, each in entry.items()}
                for entry in entries
            ]
            pairs = zip(places, token_ids, strict=True)
            logprobs = [0.0 if place is None else place[token] for place, token in pairs]
            return Scored(logprobs, Likeliest.of(places, self._top_k) if self._top_k else None)
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
