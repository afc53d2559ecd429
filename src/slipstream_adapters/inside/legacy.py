"""Environments of `verifiers` up to 0.3: `SingleTurnEnv`, `MultiTurnEnv`, `ToolEnv`, `StatefulToolEnv`, with rubrics.

Episodes are played by the environment's own `rollout` and graded by its own rubric. Its client gives the policy's
turns; thinking stays in the text, as these versions' parsers expect.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import importlib.metadata
import inspect
import json
import traceback
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.envs.hosted.inside.host import ContextFull, Refused, RewardRaised, Turns
else:
    from slipstream_environment_process.host import ContextFull, Refused, RewardRaised, Turns

from .openai_format import MODEL, OVERLONG, completion, max_tokens_of, module_id, unsupported

_raised: contextvars.ContextVar[list[str]] = contextvars.ContextVar("raised")
"""What reward functions of this episode raised: rubrics turn exceptions into 0."""
STOPS = {"max_turns_reached": "turn_limit", "prompt_too_long": "context_full", "timeout_reached": "timeout"}


def load(setup: dict[str, Any]) -> Legacy | None:
    """The environment; None if the module has no `load_environment`."""
    try:
        vf: Any = importlib.import_module("verifiers")
        version = importlib.metadata.version("verifiers")
    except ImportError as error:
        raise Refused(f"the interpreter cannot import verifiers ({error}): install it there") from None
    if not hasattr(vf, "load_environment"):  # from 0.4 on
        return None
    if _numbers(version) < (0, 1, 9):
        raise Refused(f"verifiers {version} is not supported, as episodes have no state there: install 0.1.9 to 0.4")
    name = module_id(setup)
    module_name = name.replace("-", "_").rsplit("/", 1)[-1]
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name == module_name:
            raise Refused(
                f"there is no module {module_name!r} in the interpreter: install the environment there"
            ) from None
        raise
    make = getattr(module, "load_environment", None)
    if make is None:
        return None
    _check_arguments(make, setup["settings"], f"load_environment() of {module_name}")
    return Legacy(vf.load_environment(name, **setup["settings"]), setup["max_turns"])


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())


def _check_arguments(function: Any, settings: dict[str, Any], what: str) -> None:
    parameters = inspect.signature(function).parameters.values()
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if not any(p.kind == p.VAR_KEYWORD for p in parameters):
        for key in settings:
            if key not in named:
                raise Refused(f"{what} has no argument {key!r}, but {', '.join(named) or 'none at all'}: leave it out")
    missing = [name for name, p in named.items() if p.default is p.empty and name not in settings]
    if missing:
        raise Refused(
            f"{what} needs {', '.join(missing)}, which nobody supplies: set environment.settings.{missing[0]}"
        )


class Legacy:
    """An environment of `verifiers` up to 0.3, as a `Hosted`."""

    def __init__(self, environment: Any, max_turns: int | None) -> None:
        self._environment = environment
        self._rows: dict[str, Any] = {}
        rubrics = _rubrics(environment.rubric)
        if any(each._is_group_func(function) for each in rubrics for function in each.funcs):
            raise Refused(
                "its rubric grades the rollouts of a group together, which is not supported: use another reward"
            )
        for each in _members(environment):
            if max_turns is not None:
                each.max_turns = max_turns
            _watch_tools(each)
        for each in rubrics:  # notes what reward functions raise, which the rubric itself would count as 0
            each.funcs[:] = [_watched(function) for function in each.funcs]

    def facts(self) -> dict[str, Any]:
        """See `Hosted`."""
        splits = [split for split in ("train", "eval") if self._data(split) is not None]
        turns = [getattr(each, "max_turns", 1) for each in _members(self._environment)]
        sizes = {split: len(self._data(split)) for split in splits}
        return {"max_turns": max(turns) if min(turns) > 0 else 0, "splits": splits, "num_rows": sizes}

    def _data(self, split: str) -> Any:
        if split not in self._rows:
            self._rows[split] = self._built(split)
        return self._rows[split]

    def _built(self, split: str) -> Any:
        name = "dataset" if split == "train" else "eval_dataset"
        build = getattr(self._environment, f"build_{name}", None)
        return build() if build else getattr(self._environment, name, None)

    def rows(self, split: str, start: int, count: int) -> list[dict[str, Any]]:
        """See `Hosted`."""
        data = self._data(split)
        found = data.select(range(start, min(start + count, len(data)))).to_list()
        return [self._row(row, split, start + place) for place, row in enumerate(found)]

    def _row(self, row: dict[str, Any], split: str, place: int) -> dict[str, Any]:
        try:
            task = json.loads(json.dumps(row))
        except (TypeError, ValueError) as error:
            raise Refused(
                f"row {place} of its {split} data holds what JSON has no form for ({error}): convert it"
            ) from None
        prompt = task.get("prompt")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        answer = task.get("answer")
        return {"prompt": messages, "answer": answer if isinstance(answer, str) else None, "task": task}

    def serving(self) -> contextlib.AbstractAsyncContextManager[Any]:
        """See `Hosted`."""
        return contextlib.nullcontext()

    async def play(self, task: Any, turns: Turns) -> dict[str, Any]:
        """See `Hosted`."""
        raised: list[str] = []
        _raised.set(raised)
        environment = self._environment
        client, sampling = _client(turns), {"n": 1, "extra_body": {}}
        if hasattr(environment, "_run_rollout_state"):
            state = await environment._run_rollout_state(task, client, MODEL, sampling)
        else:
            state = await environment.rollout(task, client, MODEL, sampling)
            await environment.rubric.score_rollout(state, score_sem=contextlib.nullcontext())
        if raised:
            raise RewardRaised(raised[0])
        error = state.get("error")
        if error is not None and not turns.context_full:
            raise error if isinstance(error, BaseException) else RuntimeError(str(error))
        stop = state.get("stop_condition") or ""
        return {
            "reward": state["reward"],
            "metrics": dict(state["metrics"] or {}),
            "stop": "context_full" if turns.context_full else STOPS.get(stop, "answer"),
        }


def _members(environment: Any) -> list[Any]:
    """The environments of a group, or the one."""
    return [member for each in getattr(environment, "envs", None) or [] for member in _members(each)] or [environment]


def _rubrics(rubric: Any) -> list[Any]:
    return [rubric, *(found for each in getattr(rubric, "rubrics", None) or [] for found in _rubrics(each))]


def _watched(function: Any) -> Any:
    name = getattr(function, "__name__", repr(function))

    @functools.wraps(function)
    async def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            found = function(*args, **kwargs)
            return await found if inspect.isawaitable(found) else found
        except Exception as error:
            lines = "".join(traceback.format_exception(error, limit=-6))
            _raised.get([]).append(f"reward function {name} raised {type(error).__name__}: {error}\n{lines}")
            raise

    watched.__name__ = name
    return watched


def _watch_tools(environment: Any) -> None:
    """Has a call of a tool end the episode where the environment did not supply an argument that it hides from the
    model: the model could not know what it did wrong."""
    skipped: dict[str, list[str]] = getattr(environment, "skipped_args", None) or {}
    call_tool = getattr(environment, "call_tool", None)
    if call_tool is None:
        return

    async def checked(tool_name: str, tool_args: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        tool = environment.tool_map.get(tool_name)
        parameters = inspect.signature(tool).parameters if tool is not None else {}
        for name in skipped.get(tool_name, ()):
            if name in parameters and parameters[name].default is inspect.Parameter.empty and name not in tool_args:
                raise _NotSupplied(
                    f"tool {tool_name} needs {name}, which is hidden from the model and which update_tool_args() does "
                    "not supply: supply it there"
                )
        return await call_tool(tool_name, tool_args, *args, **kwargs)

    environment.call_tool = checked


class _NotSupplied(BaseException):
    """Passes the handlers that turn a tool's exceptions into messages for the model."""


def _client(turns: Turns) -> Any:
    """What the environment takes for its client: the version's own class, or OpenAI's in form."""

    async def create(**body: Any) -> Any:
        from openai import BadRequestError
        from openai.types.chat import ChatCompletion

        if what := unsupported(body):
            raise _NotSupplied(f"the environment asks for {what}, which is not supported: leave it out")
        messages = [_plain(message) for message in body["messages"]]
        tools = [_plain(tool) for tool in body.get("tools") or []]
        try:
            reply = await turns.chat(messages, tools, max_tokens_of(body))
        except ContextFull:
            response: Any = SimpleNamespace(status_code=400, text=OVERLONG, headers={}, request=None)
            raise BadRequestError(OVERLONG, response=response, body=None) from None
        return ChatCompletion.model_validate(completion(reply, split_thinking=False))

    try:
        base: Any = importlib.import_module("verifiers.clients").OpenAIChatCompletionsClient
    except ImportError:
        return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)), base_url="")
    overlong: Any = importlib.import_module("verifiers.errors").OverlongPromptError

    class PolicyClient(base):
        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **kwargs: Any
        ) -> Any:
            from openai import BadRequestError

            try:
                return await create(messages=prompt, tools=tools, **sampling_args)
            except BadRequestError as error:
                raise overlong(str(error)) from error

        async def raise_from_native_response(self, response: Any) -> None:
            """An empty turn is the policy's, and graded."""

        async def from_native_response(self, response: Any) -> Any:
            found = await super().from_native_response(response)
            if found.message.content is None and not found.message.tool_calls:
                found.message.content = ""
            return found

        async def close(self) -> None:
            return None

    return PolicyClient(SimpleNamespace(base_url=""))


def _plain(value: Any) -> Any:
    """A message or tool as JSON, without fields that are None."""
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    return {key: part for key, part in value.items() if part is not None}
