"""Judges: rewards from a language model at any OpenAI-compatible address, as coroutines.

A judge sends one request at temperature 0 and reads a number, or a JSON object with `score`, from the reply. An
unreadable reply, no answer before the deadline and an exhausted budget are counted failures, never a reward.
`openai_client` repeats requests. Readable replies are kept by the digest of their request, in memory or in a folder.

The key is read from an environment variable and appears in no message, settings or cache. A completion can try to talk
a judge into a high score; nothing here prevents it.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import re
import struct
from collections.abc import Awaitable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlsplit

import msgspec

from slipstream.config.addresses import key_variable_problem
from slipstream.envs.answers import final_answer, last_number
from slipstream.envs.base import RewardFailed, Score
from slipstream.envs.rewards.contract import Graded, right_answer
from slipstream.envs.split import text_of
from slipstream.errors import ConfigError, one_line
from slipstream.records import NON_FINITE, Task
from slipstream.regular_files import read_regular

_NAMES = re.compile(r"\{(prompt|completion|answer)\}")
_FULL_MARKS = re.compile(r"(?:/|\b(?:out )?of\b)[*_`\s]*(\d+(?:\.\d+)?)(?![\d/])")
_DECIMAL_COMMA = re.compile(r"\d,\d{1,2}(?!\d)\D*$")
_SHOWN = 200
_MAX_BYTES = 8 << 20
"""Bound of an answer: a reply of many thousand tokens has a hundredth of it."""
_MAX_COUNT = 1 << 40
_MAX_OBJECT, _MAX_BRACES = 1 << 16, 256
"""Characters at a reply's end, and braces in them, to look for an object at."""


class JudgeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of a judge."""

    url: str
    """Address of the server, up to `/v1`."""
    model: str
    prompt: str
    """The prompt to it: `{completion}`, and perhaps `{prompt}` and `{answer}`, stand for the task's."""
    system: str = ""
    key_variable: str = ""
    """The environment variable with the key; name it in `environment.variables`, too."""
    reply: Literal["number", "json"] = "number"
    """Read after the reply's thinking: the last number, or `score` of the last JSON object; its other numbers are
    metrics. In `8/10` and `8 out of 10` the number is 8, if `scale` ends with 10."""
    scale: tuple[float, float] = (0.0, 1.0)
    """The worst and the best score, mapped to 0 and 1."""
    max_tokens: int = 512
    """Most tokens of a reply."""
    max_calls: int = 0
    """Most requests of each reward worker, repeated ones included; 0: no limit."""
    max_total_tokens: int = 0
    """Most tokens of each reward worker, as the server counts them; 0: no limit."""
    cache: str = ""
    """Folder of replies; empty: they are kept in memory."""
    deadline_s: float = 0.0
    """Time limit with all repetitions; 0: four fifths of `environment.reward_timeout_s`."""


class Judge(Graded):
    """A judge; see the module. Raises ConfigError for unusable settings."""

    needs_answers = False

    def __init__(self, settings: JudgeSettings, name: str = "judge", reward_timeout_s: float = 10.0) -> None:
        self.name = name
        self._settings = settings
        self._deadline_s = settings.deadline_s or 0.8 * reward_timeout_s
        _check(settings, name, self._deadline_s, reward_timeout_s)
        if settings.key_variable and not os.environ.get(settings.key_variable):
            raise ConfigError(f"the judge {name} has no key: {self._without_key}")
        # Imported here, and not at the first request: a fork of this process for each reward would import it each time.
        from slipstream.openai_client import OpenAIClient

        try:
            OpenAIClient(settings.url, self._key)
        except ConfigError as error:
            raise ConfigError(f"environment.settings.judges.{name}: {error}") from None
        self._where = urlsplit(settings.url).netloc
        self._memory: dict[str, _Reply] = {}
        self._spent = _Spent()

    @property
    def _key(self) -> str:
        """The key; it is kept nowhere."""
        if not (variable := self._settings.key_variable):
            return ""
        if not (key := os.environ.get(variable, "")):
            raise RewardFailed(f"the judge {self.name} has no key here: {self._without_key}")
        return key

    @property
    def _without_key(self) -> str:
        return (
            f"set the variable {self._settings.key_variable}, and add it to environment.variables, which names those "
            "that reward workers get"
        )

    def grade(self, task: Task, answer: str) -> Awaitable[Score]:
        """Asks the judge about an answer."""
        return self._score(task, answer)

    async def _score(self, task: Task, answer: str) -> Score:
        settings = self._settings
        messages = [{"role": "user", "content": _filled(settings.prompt, task, answer)}]
        if settings.system:
            messages.insert(0, {"role": "system", "content": settings.system})
        body = {"model": settings.model, "messages": messages, "temperature": 0, "max_tokens": settings.max_tokens}
        digest = hashlib.sha256(json.dumps([settings.url, body]).encode("utf-8", "surrogatepass")).hexdigest()
        reply = self._kept(digest)
        metrics = {"cached": float(reply is not None)}
        if reply is not None:
            reward, parts = self._read(reply.text)
        else:
            reply = await self._ask(body)
            reward, parts = self._read(reply.text)
            self._keep(digest, reply)  # not an unreadable one: the next request may get a better one
            metrics["tokens"] = float(reply.tokens)
        return Score(reward, {**parts, **metrics})

    async def _ask(self, body: Mapping[str, Any]) -> _Reply:
        from slipstream.openai_client import OpenAIClient, Unanswered

        try:
            # A separate client: coroutines of one worker may run in different event loops.
            async with OpenAIClient(self._settings.url, self._key, max_bytes=_MAX_BYTES) as client:
                found = await client.ask(
                    "POST", "/chat/completions", body, deadline_s=self._deadline_s, on_try=self._take_from_budget
                )
        except Unanswered as error:
            remedy = ": check the address, lower environment.reward_concurrency, or raise reward_timeout_s"
            raise RewardFailed(
                f"the judge {self.name} at {self._where}: {error}{remedy if error.is_late else ''}"
            ) from None
        return self._reply(found)

    def _take_from_budget(self) -> None:
        settings = self._settings
        calls, tokens = self._spent.read()
        if settings.max_calls and calls >= settings.max_calls:
            raise RewardFailed(f"the judge {self.name} has used its max_calls = {settings.max_calls}: raise it")
        if settings.max_total_tokens and tokens >= settings.max_total_tokens:
            raise RewardFailed(
                f"the judge {self.name} has used {tokens} of max_total_tokens = {settings.max_total_tokens}: raise it"
            )
        self._spent.add(1, 0)

    def _reply(self, found: Mapping[str, Any]) -> _Reply:
        try:
            choice = found["choices"][0]
            text, end = choice["message"]["content"], choice.get("finish_reason")
            count = (found.get("usage") or {}).get("total_tokens") or 0
        except (KeyError, IndexError, TypeError, AttributeError):
            text = count = end = None
        if count is not None and not (isinstance(count, int | float) and 0 <= count <= _MAX_COUNT):
            raise RewardFailed(
                f"the judge {self.name} at {self._where} counts {count!r:.40} tokens, which max_total_tokens cannot be "
                "held to: correct the server"
            )
        tokens = int(count or 0)
        self._spent.add(0, tokens)
        if end == "length":
            # Its last number need not be the score.
            raise RewardFailed(
                f"the reply of the judge {self.name} was cut at max_tokens = {self._settings.max_tokens}: raise it"
            )
        if not isinstance(text, str):
            shown = self._shown(json.dumps(found))
            raise RewardFailed(f"the judge {self.name} at {self._where} sent no chat completion: {shown}")
        if end == "content_filter":
            raise RewardFailed(f"the judge {self.name} at {self._where} sent no reply: its content filter ended it")
        return _Reply(text, tokens)

    def _read(self, text: str) -> tuple[float, dict[str, float]]:
        """The reward in a reply, and its metrics."""
        metrics: dict[str, float] = {}
        found: Any = None
        low, high = self._settings.scale
        answer = final_answer(text) or ""
        if self._settings.reply == "number":
            number = _score_in(answer, max(low, high))
            found = None if number is None else _as_float(number)
        elif (table := _last_object(answer)) is not None:
            named = {key: _as_float(value) for key, value in table.items() if type(value) in (int, float, bool)}
            found = named.pop("score", None)
            if isinstance(table["score"], bool) and (low, high) != (0.0, 1.0):
                found = None
            metrics = {key: value for key, value in named.items() if math.isfinite(value)}
            if left_out := len(named) - len(metrics):
                metrics[NON_FINITE] = float(left_out)
        if found is None or not min(low, high) <= found <= max(low, high):
            what = "a number" if self._settings.reply == "number" else "a JSON object with a score"
            raise RewardFailed(
                f"the judge {self.name} did not reply with {what} from {low:g} to {high:g}: {self._shown(text)}"
            )
        return (found - low) / (high - low), metrics

    def _shown(self, text: str) -> str:
        """The end of a text of the server, on one line, without the key."""
        if key := self._key:
            text = text.replace(key, "***")
        return repr(" ".join(text.split())[-_SHOWN:])

    def _kept(self, digest: str) -> _Reply | None:
        if not self._settings.cache:
            return self._memory.get(digest)
        try:
            return msgspec.json.decode(
                read_regular(Path(self._settings.cache) / f"{digest}.json", _MAX_BYTES), type=_Reply
            )
        except (OSError, msgspec.DecodeError):
            return None

    def _keep(self, digest: str, reply: _Reply) -> None:
        if not self._settings.cache:
            self._memory[digest] = reply
            return
        file = Path(self._settings.cache) / f"{digest}.json"
        part = file.with_suffix(f".{os.getpid()}.part")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(msgspec.json.encode(reply))
            part.replace(file)
        except OSError as error:
            raise RewardFailed(
                f"the judge {self.name} cannot keep a reply in {self._settings.cache} ({error.strerror}): correct cache"
            ) from None


class _Reply(msgspec.Struct, frozen=True):
    text: str
    tokens: int


class _Spent:
    """Requests and tokens of this process and of its forks."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 16)

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__()

    def read(self) -> tuple[int, int]:
        calls, tokens = struct.unpack("qq", self._shared[:16])
        return calls, tokens

    def add(self, calls: int, tokens: int) -> None:
        before = self.read()
        self._shared[:16] = struct.pack("qq", before[0] + calls, before[1] + tokens)


def judge_of(table: Any, name: str, reward_timeout_s: float) -> Judge:
    """The judge of the settings `judges.<name>`. Raises ConfigError."""
    try:
        settings = msgspec.convert(table, JudgeSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"environment.settings.judges.{name}: {one_line(error)}: it has "
            f"{', '.join(JudgeSettings.__struct_fields__)}"
        ) from None
    return Judge(settings, name, reward_timeout_s)


def _check(settings: JudgeSettings, name: str, deadline_s: float, reward_timeout_s: float) -> None:
    """Raises ConfigError for unusable settings."""
    where = f"environment.settings.judges.{name}"
    if "@" in settings.url:
        raise ConfigError(f"{where}.url holds a name or a password: give the key by key_variable")
    if problem := key_variable_problem(f"{where}.key_variable", settings.key_variable):
        raise ConfigError(problem)
    if "{completion}" not in settings.prompt:
        raise ConfigError(f"{where}.prompt does not show the completion: write {{completion}} where it belongs")
    if settings.scale[0] == settings.scale[1] or not all(map(math.isfinite, settings.scale)):
        raise ConfigError(f"{where}.scale has equal or infinite ends: give the worst and the best score")
    if not 0 < deadline_s < reward_timeout_s:
        raise ConfigError(
            f"{where}.deadline_s = {deadline_s:g} is not below environment.reward_timeout_s = {reward_timeout_s:g}, at "
            "which the reward is killed: lower it, or raise that"
        )


def _filled(template: str, task: Task, answer: str) -> str:
    """The template with its names replaced, once: names in a completion are not replaced again."""
    right = right_answer(task)
    values = {
        "prompt": text_of(task),
        "completion": answer,
        "answer": right if isinstance(right, str) else "" if right is None else json.dumps(right),
    }
    return _NAMES.sub(lambda found: values[found[1]], template)


def _score_in(text: str, best: float) -> Fraction | None:
    """The last number in a text; before the full marks, if it ends with these. None if they are not `best`."""
    if _DECIMAL_COMMA.search(text):
        return None
    if not (found := [*_FULL_MARKS.finditer(text)]) or last_number(text[found[-1].end() :]) is not None:
        return last_number(text)
    marks = found[-1]
    number, full = last_number(text[: marks.start()]), Fraction(marks[1])
    if number is None or full == best:
        return number
    return number / full if best == 1 and full else None


def _last_object(text: str) -> dict[str, Any] | None:
    """The last JSON object with a score in a text, among the last `_MAX_BRACES` of its end."""
    decoder = json.JSONDecoder()
    text = text[-_MAX_OBJECT:]
    for place in [found.start() for found in re.finditer(r"\{", text)][: -_MAX_BRACES - 1 : -1]:
        try:
            found, _ = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and "score" in found:
            return cast("dict[str, Any]", found)
    return None


def _as_float(number: float | Fraction) -> float:
    """A number of a reply; infinite if it is too large."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf
