"""Chat with a model: starts an engine, verified as in a run, and keeps the conversation.

Guarantees: prompts are rendered as in training; the engine ends with the session, however that ends; every wait has a
deadline and ends at Ctrl-C.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, cast

from slipstream.commands.evaluate import verified_plan
from slipstream.data.chat_template import ChatTokenizer
from slipstream.engine_protocols import Generates
from slipstream.envs.answers import THINK_CLOSE, THINK_OPEN, final_answer
from slipstream.envs.policy import RecordingPolicy
from slipstream.errors import ConfigError, DataError
from slipstream.launch.deployable import Deployable, adapter_config_of, deployed_engine_plan
from slipstream.launch.engines import create_engine
from slipstream.orchestrator.thread import EventLoopThread
from slipstream.processes.temporary import temporary
from slipstream.records import Completion, GenerateRequest, Message, SamplingParams

_GRACE_S = 10.0


@dataclass(frozen=True)
class ChatOptions:
    """Options of a chat; None: as in the run that the model comes from, or the model's default."""

    system: str | None = None
    temperature: float = 0.7
    max_tokens: int | None = None
    """Longest answer in tokens; None: up to the context length."""
    thinking: bool | None = None
    single_turn: bool = False
    """Every message starts a new conversation."""
    seed: int | None = None
    """Makes sampling repeatable."""
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.8
    trust_remote_code: bool = False
    start_timeout_s: float = 600.0
    request_timeout_s: float = 600.0


@dataclass(frozen=True)
class Answer:
    """The model's reply to one message."""

    text: str
    """The text after its thinking; empty when the thinking did not end."""
    thinking: str
    finish_reason: Literal["stop", "length"]
    num_tokens: int


class Conversation:
    """The messages so far, and the engine that answers them."""

    def __init__(self, engine: Generates, tokenizer: ChatTokenizer, options: ChatOptions, max_model_len: int) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._options = options
        self._max_model_len = max_model_len
        self._numbers = itertools.count()
        self._messages: list[Message] = []

    def restart(self) -> None:
        """Forget all messages."""
        self._messages = []

    async def ask(self, text: str) -> Answer:
        """Return the model's reply to `text`. Raises `DataError`, and forgets `text`, when the context is too short."""
        if self._options.single_turn:
            self.restart()
        policy = RecordingPolicy(self._generate, self._tokenizer)
        messages = [*self._messages, Message("user", text)]
        reply = await policy.chat(messages)
        self._messages = [*messages, reply.message]
        answer = final_answer(reply.text)
        thinking = reply.text if answer is None else reply.text[: len(reply.text) - len(answer)]
        thinking = thinking.replace(THINK_OPEN, "").replace(THINK_CLOSE, "").strip()
        return Answer(answer or "", thinking, reply.finish_reason, policy.sequences[0].num_trainable)

    async def _generate(self, prompt_ids: list[int], *_: object) -> Completion:
        num_left, number = self._max_model_len - len(prompt_ids), next(self._numbers)
        if num_left < 1:
            raise DataError(
                f"the conversation has {len(prompt_ids)} tokens, which leaves no room for an answer within "
                f"{self._max_model_len}: begin a new one with /new, or raise --max-model-len where the model allows it"
            )
        options = self._options
        sampling = SamplingParams(
            max_tokens=min(num_left, options.max_tokens or num_left),
            temperature=options.temperature,
            stop_token_ids=tuple(self._tokenizer.stop_token_ids),
        )
        seed = None if options.seed is None else options.seed + number
        request = GenerateRequest(f"chat-{number}", prompt_ids, sampling, seed, options.request_timeout_s)
        return await self._engine.generate(request)


class ChatSession:
    """The caller's handle to a conversation, whose engine client runs in another thread."""

    def __init__(self, thread: EventLoopThread, conversation: Conversation, timeout_s: float) -> None:
        self._thread = thread
        self._conversation = conversation
        self._timeout_s = timeout_s

    def ask(self, text: str) -> Answer:
        """See `Conversation`."""
        return self._thread.call(self._conversation.ask(text), self._timeout_s, "the model's answer")

    def restart(self) -> None:
        """See `Conversation`."""
        self._conversation.restart()


def chat_tokenizer(deployable: Deployable, options: ChatOptions) -> ChatTokenizer:
    """Load the model's tokenizer, with the settings of the run that made the model where the options give none."""
    run = deployable.run_settings
    system = run.get("environment.system_prompt", "") if options.system is None else options.system
    given = run.get("model.chat_template_kwargs", {})
    thinking = run.get("model.thinking") if options.thinking is None else options.thinking
    if not isinstance(system, str) or not isinstance(given, dict) or thinking not in (True, False, None):
        raise ConfigError(f"the settings of the run that {deployable.name} comes from cannot be used: export its model")
    switch = cast("bool | None", thinking)
    variables = cast("dict[str, Any]", given)
    return ChatTokenizer(deployable.model, system, options.trust_remote_code, variables, thinking=switch)


@contextlib.contextmanager
def chat_session(deployable: Deployable, tokenizer: ChatTokenizer, options: ChatOptions) -> Generator[ChatSession]:
    """Start an engine on the model and verify its weights; stop it at the end. SIGTERM ends the session as Ctrl-C
    does."""
    plan = deployed_engine_plan(
        deployable,
        max_model_len=options.max_model_len,
        gpu_memory_utilization=options.gpu_memory_utilization,
        enforce_eager=True,
        trust_remote_code=options.trust_remote_code,
        start_timeout_s=options.start_timeout_s,
    )
    adapter = adapter_config_of(deployable, trust_remote_code=options.trust_remote_code)
    # SIGINT too: it is ignored where a shell started this process in the background.
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with temporary("chat") as folder:
            verified = verified_plan(plan, Path(folder), deployable.adapter, adapter)
            thread = EventLoopThread(lambda: False)
            engine = create_engine(verified, Path(folder), lambda kind, **fields: None)
            try:
                engine.launch()
                thread.call(engine.wait_ready(), options.start_timeout_s + _GRACE_S, "the engine")
                conversation = Conversation(engine, tokenizer, options, plan.settings.max_model_len)
                yield ChatSession(thread, conversation, options.request_timeout_s + _GRACE_S)
            finally:
                with _uninterrupted():
                    if not thread.stop(engine.stop()):
                        engine.kill()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _uninterrupted() -> Generator[None]:
    """Ignore further signals inside, so that a second Ctrl-C leaves no process behind."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
