"""`GuestClient`: vLLM's `EngineClient`, for its HTTP handlers, over `EngineServer`.

Guarantees:
- A request begins while the engine is in service, waits while an update is under way, and otherwise fails with 503.
- An output with a token of an unverified version waits for the verification. When that fails, the output is dropped and
  the request ends with an error.
- Every complete answer has its version spans in the exchange of its HTTP request.

No token is looked at here: vLLM's own outputs pass through as they are.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import AsyncGenerator, Iterable
from http import HTTPStatus
from typing import Any

from vllm import exceptions
from vllm.engine.protocol import EngineClient

from slipstream.inference.plugin.guests import Guest, exchange_of_task
from slipstream.inference.plugin.recording import CURRENT, Recording
from slipstream.inference.plugin.server import EngineServer
from slipstream.inference.plugin.service import OutOfService

MAX_ANSWERS = 1024
"""Answers of one HTTP request: prompts times `n`."""
_EngineClient: Any = EngineClient


def _retryable() -> Any:
    """vLLM's error with a status code; its handlers put it into streams, too."""
    found = getattr(exceptions, "RetryableRequestError", None)
    if found is None:  # before 0.28
        from vllm.entrypoints.openai.engine.protocol import GenerationError as found  # type: ignore[no-redef]
    return found


_Retryable: Any = _retryable()


class Unavailable(_Retryable):
    """The engine cannot answer now; vLLM's handlers make it a 503, or an error event within a stream."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the engine is out of service: {reason}")
        self.status_code = HTTPStatus.SERVICE_UNAVAILABLE


class GuestClient(_EngineClient):
    """Generation for foreign clients; calls to control the engine are refused (see the end of this module)."""

    def __init__(self, server: EngineServer, base_name: str = "") -> None:
        """`base_name`: under LoRA, the name by which vLLM's handlers ask for the base model."""
        self._server = server
        self._base_name = base_name
        self._numbers = itertools.count()
        engine = server.host.vllm
        self.vllm_config = engine.vllm_config
        self.model_config = engine.model_config
        self.renderer: Any = engine.renderer
        self.input_processor = engine.input_processor

    @property
    def is_running(self) -> bool:
        """Whether vLLM lives."""
        return not self._server.host.is_dead

    @property
    def is_stopped(self) -> bool:
        """Whether vLLM has failed for good."""
        return self._server.host.is_dead

    @property
    def errored(self) -> bool:
        """Whether vLLM has failed for good."""
        return self._server.host.is_dead

    @property
    def dead_error(self) -> BaseException:
        """What requests get then."""
        return Unavailable("vLLM has failed")

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Called by vLLM's handlers before they begin to answer."""
        limit = min(MAX_ANSWERS, self._server.settings.max_num_seqs)
        if n > limit:
            raise exceptions.VLLMValidationError(f"n is {n}: at most {limit} answers to a prompt")

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> AsyncGenerator[Any]:
        """See `EngineClient`. The id is the client's, and may be any text; vLLM gets one of ours."""
        params, recording = sampling_params, CURRENT.get()
        self.check_admission(params.n)
        if recording is not None:
            length = self.model_config.max_model_len
            prompt, params = recording.prepare(prompt, params, max_model_len=length, text=self.renderer.get_tokenizer())
        exchange = exchange_of_task.get()
        guest = Guest(f"guest-{next(self._numbers)}", params.n)
        first = exchange.begin(params.n) if exchange is not None else 0
        if exchange is not None and len(exchange.answers) > MAX_ANSWERS:
            raise exceptions.VLLMValidationError(
                f"more than {MAX_ANSWERS} answers are asked for: send several requests"
            )
        lora = options.get("lora_request")
        known = {
            "prompt_text": options.get("prompt_text"),
            "reasoning_ended": options.get("reasoning_ended"),
            "reasoning_parser_kwargs": options.get("reasoning_parser_kwargs"),
            "trace_headers": options.get("trace_headers"),
            "priority": max(0, options.get("priority", 0)),  # before nobody else's, the run's least of all
        }
        if recording is not None and recording.is_urgent:
            known["priority"] = -1
        is_base = lora is not None and lora.lora_name == self._base_name
        return self._outputs(guest, exchange, first, prompt, params, is_base, known, recording)

    async def _outputs(
        self,
        guest: Guest,
        exchange: Any,
        first: int,
        prompt: Any,
        params: Any,
        is_base: bool,
        known: dict[str, Any],
        recording: Recording | None,
    ) -> AsyncGenerator[Any]:
        service, guests = self._server.service, self._server.guests
        async with guests.places:
            try:
                await service.until_serving()
            except OutOfService as error:
                raise Unavailable(str(error)) from error
            is_over = False
            while not is_over:
                if not (service.is_serving or service.is_updating):
                    raise Unavailable(service.reason)
                num_discarded = service.num_discarded
                outputs = guests.begin(guest, self._salted(prompt), params, {**known, **self._adapted(guest, is_base)})
                try:
                    async for output in outputs:
                        if output.finished and (guest.refusal or guest.is_restarted):
                            if guest.refusal:
                                raise Unavailable(guest.refusal)
                            break
                        if service.unproved or service.num_discarded != num_discarded:
                            try:
                                await service.until_proved(num_discarded)
                            except OutOfService as error:
                                raise Unavailable(str(error)) from error
                        if recording is not None:
                            recording.take(output)
                        if output.finished:
                            is_over = True
                            guests.end(guest)
                            if exchange is not None:
                                exchange.end(first, guest.spans)
                            if recording is not None:
                                recording.finish(guest.spans[0])
                        yield output
                finally:
                    guests.end(guest)
                    await outputs.aclose()

    def _salted(self, prompt: Any) -> Any:
        salt = self._server.cache_salt
        if not salt:
            return prompt
        own = prompt.get("cache_salt")
        return {**prompt, "cache_salt": f"{salt}-{own}" if own else salt}

    def _adapted(self, guest: Guest, is_base: bool) -> dict[str, Any]:
        """Under LoRA: the adapter in service, or the base model by its own name."""
        if self._server.settings.lora_rank is None:
            return {"lora_request": None}
        adapter = None if is_base else self._server.adapter
        if adapter is None and not is_base:
            raise Unavailable("it holds no adapter yet")
        version = self._server.base if is_base else self._server.version
        guest.adapter, guest.version = adapter, version.name if version else "base"
        return {"lora_request": adapter.request() if adapter else None}

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Nobody but a request's own client ends it, by closing its connection."""

    async def get_supported_tasks(self) -> tuple[Any, ...]:
        """See `EngineClient`."""
        return ("generate",)

    async def is_tracing_enabled(self) -> bool:
        """See `EngineClient`."""
        return False

    async def do_log_stats(self) -> None:
        """See `EngineClient`."""

    async def check_health(self) -> None:
        """See `EngineClient`."""
        if self._server.host.is_dead:
            raise self.dead_error


def _refused(name: str) -> Any:
    async def method(*arguments: Any, **options: Any) -> Any:
        raise NotImplementedError(f"{name} controls the engine, and clients of this listener only ask it")

    return method


for _name in GuestClient.__abstractmethods__:  # what vLLM's handlers of inference never call
    setattr(GuestClient, _name, _refused(_name))
abc.update_abstractmethods(GuestClient)
