"""Records the answers of vLLM's handlers to agents, by hooks within them; `http/recorder.py` stands around them.

A request's key (`Authorization: Bearer`, `x-api-key`) names its session; requests without one pass through untouched.
Within a session the run's sampling holds, and the prompt's tokens continue the recorded ones (`sessions.py`). An answer
is recorded just before its last bytes go out; a cancelled, cut or refused one never.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from slipstream.inference.plugin.completions import expert_choices
from slipstream.inference.plugin.patches.undelivered import sampled_logprobs
from slipstream.inference.plugin.sessions import (
    Chat,
    Conversation,
    Match,
    Session,
    marked,
    overridden,
    plain,
    rest_after,
)
from slipstream.inference.plugin.wire_answers import Answer, answers_in
from slipstream.records import Completion, ExpertChoices, SessionOpening, SessionTurn, VersionSpan

CURRENT: ContextVar[Recording | None] = ContextVar("slipstream_recording", default=None)
"""The recording of this task's request; set by `http/recorder.py`."""


class Refusal(ValueError):
    """A request without a possible answer in a session; the text says why."""


class Sessions:
    """The open sessions of an engine, by key."""

    def __init__(self) -> None:
        self._open: dict[str, Session] = {}

    def open(self, opening: SessionOpening) -> None:
        """Begin to record requests with this key."""
        self._open[opening.key] = Session(opening)

    def close(self, key: str) -> list[SessionTurn] | None:
        """End a session and forget its key; returns the recorded turns, or None for an unknown key."""
        session = self._open.pop(key, None)
        return session.turns if session is not None else None

    def clear(self) -> None:
        """Forget all sessions."""
        self._open.clear()

    def of(self, headers: Iterable[tuple[bytes, bytes]]) -> Session | None:
        """The session of a request with these headers."""
        for name, value in headers:
            key = value.decode("latin-1")
            if name == b"authorization" and key[:7].lower() == "bearer ":
                key = key[7:].strip()
            elif name != b"x-api-key":
                continue
            if key in self._open:
                return self._open[key]
        return None


class Recording:
    """One request of a session and its answer."""

    def __init__(self, session: Session, number: int, path: str, body: Mapping[str, Any]) -> None:
        self._session = session
        self._number, self._path = number, path
        self._overridden = overridden(body, session.opening.sampling)
        self._prompt = body.get("prompt")
        self._conversation: Conversation | None = None
        self._match: Match | None = None
        self._prompt_ids: list[int] | None = None
        self._asked_ids: list[int] | None = None
        """The prompt with images, with one placeholder for each."""
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._finish: str | None = None
        self._versions: list[VersionSpan] | None = None
        self._experts: ExpertChoices | None = None
        self._takes_pieces = self._is_recorded = False
        self._tokenizer: Any = None
        self._skips_special = True
        self._is_whole = False
        """Whether its client reads nothing before the end: vLLM then gives all tokens at once, without text."""

    @property
    def is_urgent(self) -> bool:
        """Whether it comes before others, as an evaluation's."""
        return self._session.opening.is_urgent

    async def render(
        self, render: Callable[..., Awaitable[Any]], messages: Sequence[Any], params: Any, text: Any
    ) -> Any:
        """vLLM's `render_messages_async`, by `render`; the prompt has recorded tokens for recorded answers. `text`:
        vLLM's tokenizer."""
        opening = self._session.opening
        chat = plain(messages)
        if opening.system_prompt and not any(message.get("role") in ("system", "developer") for message in chat):
            chat = [{"role": "system", "content": opening.system_prompt}, *chat]
        params = params.with_defaults(opening.template_kwargs)
        kwargs = params.chat_template_kwargs
        setting = json.dumps([params.chat_template, kwargs], sort_keys=True, default=str)
        self._conversation, self._match = Conversation(chat, setting), None
        goes_on = kwargs.get("continue_final_message") or kwargs.get("add_generation_prompt") is False
        match = None if goes_on else self._session.find(self._conversation)
        if match is not None:
            found = await self._continued(render, chat, params, match, text)
            if found is not None:
                self._match = match
                return found
        return self._tokenized(await render(chat, params), text)

    def _tokenized(self, found: tuple[Any, Any], text: Any) -> tuple[Any, Any]:
        """vLLM's rendering; a prompt with images as tokens, which a later one may continue."""
        parsed, prompt = found
        if "multi_modal_data" not in prompt:
            return found
        rendered = prompt.get("prompt")
        if isinstance(rendered, str):
            prompt = {name: value for name, value in prompt.items() if name != "prompt"}
            prompt["prompt_token_ids"] = text.encode(rendered, add_special_tokens=False)
        self._asked_ids = list(prompt["prompt_token_ids"])
        return parsed, prompt

    async def _continued(
        self, render: Callable[..., Awaitable[Any]], chat: list[Chat], params: Any, match: Match, text: Any
    ) -> tuple[Any, Any] | None:
        end = self._session.ends_turn(match.turn)
        if end is None and chat[match.place].get("tool_calls"):
            return None
        for conversation in marked(chat, match.place):
            try:
                parsed, prompt = await render(conversation, params)
            except Exception:  # noqa: BLE001 (the template's code; the conversation itself is rendered next)
                continue
            rendered = prompt.get("prompt")
            if not isinstance(rendered, str):
                continue
            rest = rest_after(rendered, "" if end is None else text.decode([end], skip_special_tokens=False))
            if rest is not None:
                media = {name: value for name, value in prompt.items() if name.startswith("multi_modal_")}
                recorded = self._session.asked_of(match.turn, has_images=bool(media))
                if recorded is None:
                    return None
                ids = [*recorded, *text.encode(rest, add_special_tokens=False)]
                return self._tokenized((parsed, {**media, "prompt_token_ids": ids}), text)
        return None

    def prepare(self, prompt: Any, params: Any, *, max_model_len: int, text: Any) -> tuple[Any, Any]:
        """The prompt and vLLM's `SamplingParams` instead of these. Raises `Refusal`."""
        if self._prompt_ids is not None:
            raise Refusal("a request with several prompts cannot be recorded: send one for each")
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
        has_images = self._asked_ids is not None and set(prompt.get("mm_placeholders", ())) == {"image"}
        if ids is None or prompt.get("type", "token") != ("multimodal" if has_images else "token"):
            raise Refusal("an agent's requests can hold text and images only: leave all else out")
        if self._match is None and not has_images:
            ids = self._session.retokenized(
                list(ids),
                lambda tokens: text.decode(tokens, skip_special_tokens=False),
                lambda rest: text.encode(rest, add_special_tokens=False),
            )
        room = max_model_len - len(ids)
        if room < 1:
            raise Refusal(
                f"This model's maximum context length is {max_model_len} tokens, and the conversation has {len(ids)}"
            )
        self._prompt_ids, self._takes_pieces = list(ids), params.output_kind.name == "DELTA"
        self._tokenizer = text
        # A text would be tokenized again.
        replaced = {name: value for name, value in prompt.items() if name not in ("prompt", "prompt_token_offsets")}
        return {**replaced, "prompt_token_ids": self._prompt_ids}, self._sampling(params, room)

    def _sampling(self, params: Any, room: int) -> Any:
        """The run's sampling, with the agent's limit of tokens and stop strings."""
        ours = self._session.opening.sampling
        if params.n != 1:
            raise Refusal(f"n = {params.n} cannot be recorded: send the request as often")
        if params.prompt_logprobs is not None:
            raise Refusal("log-probabilities of the prompt cannot be recorded: leave echo or logprobs out")
        limits = [ours.max_tokens, room, *([params.max_tokens] if params.max_tokens is not None else [])]
        stop = [*ours.stop, *(params.stop or ())]
        self._is_whole = params.output_kind.name == "FINAL_ONLY" and not stop and params.logprobs is None
        self._skips_special, self._shows_stop = params.skip_special_tokens, params.include_stop_str_in_output
        whole: dict[str, Any] = {"detokenize": False, "flat_logprobs": True} if self._is_whole else {}
        if hasattr(params, "skip_clone"):  # these are nobody else's; a copy costs a tenth of a millisecond
            whole["skip_clone"] = True
        return type(params)(
            max_tokens=min(limits),
            temperature=ours.temperature,
            top_p=ours.top_p,
            top_k=ours.top_k,
            min_p=ours.min_p,
            seed=self._session.seed(self._prompt_ids or []),
            stop=stop or None,
            stop_token_ids=[*dict.fromkeys((*ours.stop_token_ids, *(params.stop_token_ids or ())))] or None,
            include_stop_str_in_output=params.include_stop_str_in_output,
            logprobs=max(0, params.logprobs or 0),
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            output_kind=params.output_kind,
            **whole,
        )

    def take(self, output: Any) -> None:
        """A `RequestOutput` of vLLM: a piece under DELTA, otherwise all so far."""
        out = output.outputs[0]
        token_ids = list(out.token_ids)
        logprobs = list(sampled_logprobs(out.logprobs, token_ids) or []) if token_ids else []
        if self._takes_pieces:
            self._token_ids += token_ids
            self._logprobs += logprobs
        else:
            self._token_ids, self._logprobs = token_ids, logprobs
        self._finish = out.finish_reason or self._finish
        if self._is_whole and output.finished:
            spoken = token_ids[:-1] if out.finish_reason == "stop" and not self._shows_stop else token_ids
            out.text, out.logprobs = self._tokenizer.decode(spoken, skip_special_tokens=self._skips_special), None
        if output.finished and getattr(out, "routed_experts", None) is not None:
            self._experts = expert_choices(out.routed_experts, len(self._prompt_ids or ()) + len(self._token_ids))

    def finish(self, spans: Sequence[tuple[int, str]]) -> None:
        """vLLM has ended the request; `spans` are the versions of its tokens."""
        self._versions = [VersionSpan(start, version) for start, version in spans]

    @property
    def is_complete(self) -> bool:
        """Whether all tokens have come, and are not recorded yet."""
        return self._versions is not None and not self._is_recorded

    def answer(self, body: bytes, *, is_stream: bool, is_whole: bool) -> None:
        """Record the answer if it is in these bytes of the response, once."""
        if self._versions is None or self._is_recorded or self._finish not in ("stop", "length"):
            return
        try:
            answers = answers_in(self._path, body, is_stream=is_stream)
        except ValueError:  # not whole yet, or an error
            return
        if not answers and not is_whole:
            return
        self._is_recorded = True
        completion = Completion(
            f"request-{self._number}", self._token_ids, self._logprobs, self._finish, self._versions
        )
        completion.experts = self._experts
        conversation = self._conversation
        if conversation is None and isinstance(self._prompt, str):
            conversation = Conversation([{"role": "user", "content": self._prompt}], "text")
        self._session.record(
            self._number,
            self._prompt_ids or [],
            completion,
            answers[0] if answers else Answer(),
            conversation,
            self._match,
            self._overridden,
            self._asked_ids,
            has_special=self._has_special(),
        )

    def _has_special(self) -> bool:
        spoken = self._token_ids[:-1] if self._finish == "stop" else self._token_ids
        return not set(spoken).isdisjoint(self._tokenizer.all_special_ids)


def hook_renderer(renderer: Any) -> None:
    """Have vLLM's renderer put in recorded tokens, for requests of sessions."""
    render = renderer.render_messages_async
    if getattr(render, "records", False):  # another listener of this engine has done it
        return

    async def render_messages_async(messages: Any, params: Any) -> Any:
        recording = CURRENT.get()
        if recording is None:
            return await render(messages, params)
        return await recording.render(render, messages, params, renderer.get_tokenizer())

    render_messages_async.records = True  # type: ignore[attr-defined]
    renderer.render_messages_async = render_messages_async
