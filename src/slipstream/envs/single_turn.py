"""Single-turn environments: the base class of most environments, and the tasks that environments give, checked.

A user's file either subclasses `SingleTurn` or defines two functions (`from_python.FunctionEnvironment`):

    def tasks(split, num_tasks, seed): ...      # dictionaries {"prompt", "answer", ...} or `Task`s
    def reward(task, completion): ...           # a number, or {"reward": number, other metrics}; may be async

The answer is graded: the text after the thinking, see `answers.py`.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Awaitable, Generator, Iterable, Mapping, Sequence
from typing import Any, cast, get_args

import msgspec

from slipstream.config.user_code import place_of
from slipstream.data.images.parts import joined, refuse_open
from slipstream.data.plain_values import not_plain
from slipstream.data.tool_calls import calls_of
from slipstream.envs.answers import final_answer
from slipstream.envs.base import Environment, Episode, Policy, Score, Split, scored
from slipstream.envs.conversation import converse
from slipstream.envs.tools.schemas import schemas_of, with_tools
from slipstream.errors import DataError, EnvironmentFault, SlipstreamError, one_line
from slipstream.records import Media, Message, Role, Task
from slipstream.runlog.redaction import redact

RawTask = Task | Mapping[str, Any]
Reward = float | Mapping[str, float] | Score
_CONVERTED = ("role", "content", "tool_calls")
"""Fields of a message that are not passed on as they are."""
TASKS_TIMEOUT_S = 120.0
"""Time limit of `tasks` for all tasks of a run."""


class SingleTurn(Environment):
    """Base class of single-turn environments. Subclasses implement `tasks` and `reward`, or
    `score_episode` in place of `reward`."""

    max_turns = 1

    def reward(self, task: Task, completion: str) -> Reward | Awaitable[Reward]:
        """Reward of an answer; may be a coroutine. A mapping has the key `reward`; its other entries are metrics.
        Or a `Score`, as the rewards of `slipstream.envs.rewards` give."""
        raise NotImplementedError

    @property
    def begins_with_turn(self) -> bool:
        """See `Environment`."""
        return type(self).run is SingleTurn.run and type(self).setup_episode is Environment.setup_episode

    @property
    def grades_texts(self) -> bool:
        """See `Environment`."""
        return type(self).reward is not SingleTurn.reward or type(self).score is not SingleTurn.score

    async def run(self, task: Task, policy: Policy) -> Episode:
        """A single turn, or several where there are tools: see `conversation.py`."""
        return await converse(self, task, policy)

    def score(self, task: Task, completion: str) -> Score | Awaitable[Score]:
        """The reward of the answer; 0 and the metric `unclosed_thinking` if the thinking never ended."""
        answer = final_answer(completion)
        if answer is None:
            return Score(0.0, {"unclosed_thinking": 1.0})
        return scored(self.reward(task, answer))


class _TimedOut(BaseException):
    """Not an Exception, so that user code does not catch it."""


@contextlib.contextmanager
def _deadline(seconds: float) -> Generator[None]:
    """Context manager: raises `_TimedOut` in the block after `seconds`. Only in the main thread, which alone
    receives signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise _TimedOut

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def make_tasks(environment: Environment, split: Split, num_tasks: int) -> list[Task]:
    """Tasks of the environment, checked, with its solved examples in their prompts. Raises `EnvironmentFault` if its
    code raises or does not end, and `DataError` where examples have no gold answer."""
    wanted = environment.num_solved_examples
    if not wanted:
        return _checked_tasks(environment, split, num_tasks)
    shown = _checked_tasks(environment, "train", wanted + (num_tasks if split == "train" else 0))
    tasks = shown[wanted:] if split == "train" else _checked_tasks(environment, split, num_tasks)
    if len(shown) < wanted:
        raise DataError(
            f"environment.num_examples = {wanted}, and {environment.name} has {len(shown)} training tasks: use fewer"
        )
    solved = [message for task in shown[:wanted] for message in _solved(environment, task, wanted)]
    return [msgspec.structs.replace(task, prompt=_with_examples(task.prompt, solved)) for task in tasks]


def _solved(environment: Environment, task: Task, wanted: int) -> tuple[Message, Message]:
    question = [message for message in task.prompt if message.role != "system"]
    gold = gold_turns(environment, task)
    if [message.role for message in (*question, *gold)] != ["user", "assistant"]:
        raise DataError(
            f"environment.num_examples = {wanted}, and task {task.id} of {environment.name} is not one question with "
            "one gold answer: set it to 0"
        )
    return question[0], gold[0]


def _with_examples(prompt: Sequence[Message], solved: Sequence[Message]) -> tuple[Message, ...]:
    num_system = next((place for place, message in enumerate(prompt) if message.role != "system"), len(prompt))
    return (*prompt[:num_system], *solved, *prompt[num_system:])


def _checked_tasks(environment: Environment, split: Split, num_tasks: int) -> list[Task]:
    try:
        with raising_faults(environment, f"tasks({split!r}, {num_tasks})"), _deadline(TASKS_TIMEOUT_S):
            tasks = as_tasks(environment.tasks(split, num_tasks), split, environment.name)
    except _TimedOut:
        raise EnvironmentFault(
            f"tasks({split!r}, {num_tasks}) of {environment.name} did not return within {TASKS_TIMEOUT_S:g} s: does it "
            "loop for ever when there are fewer tasks than asked for? Return what there are"
        ) from None
    return with_schemas(environment, tasks)


def with_schemas(environment: Environment, tasks: list[Task]) -> list[Task]:
    """The tasks with the environment's tools in their prompts, if it does not write them there itself."""
    schemas = () if environment.tools_in_prompts else schemas_of(environment.tools)
    if not schemas:
        return tasks
    return [msgspec.structs.replace(task, prompt=with_tools(task.prompt, schemas)) for task in tasks]


def gold_of(environment: Environment, task: Task) -> str | None:
    """The text of the task's gold answer, if known, the last one where there are several turns."""
    turns = gold_turns(environment, task)
    return turns[-1].content if turns else None


def gold_turns(environment: Environment, task: Task) -> list[Message]:
    """What should follow the task's prompt, if known; raises `EnvironmentFault` if the environment's code raises."""
    with raising_faults(environment, f"gold() for task {task.id}"):
        answer: Any = environment.gold(task)
    if answer is None:
        return []
    if isinstance(answer, str):
        return [Message("assistant", f"<answer>{answer}</answer>" if environment.graded_text == "tag" else answer)]
    turns = cast("list[Any]", list(answer)) if isinstance(answer, Sequence) else []
    if not turns or not all(isinstance(turn, Message) for turn in turns) or turns[-1].role != "assistant":
        raise DataError(
            f"gold() of {environment.name} returned {_kind_of(answer)} for task {task.id}: return text, or messages "
            "that end with the policy's answer"
        )
    return cast("list[Message]", turns)


@contextlib.contextmanager
def raising_faults(environment: Environment, call: str) -> Generator[None]:
    """Turns an exception of the user's code, in this call of it, into `EnvironmentFault`."""
    try:
        yield
    except SlipstreamError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvironmentFault(
            f"{call} of {environment.name} raised {one_line(error)} ({place_of(error)}"
            f"{shown_settings(environment.given_settings)}): correct it"
        ) from error


def shown_settings(settings: Mapping[str, Any]) -> str:
    """The settings in effect, for error messages: `; environment.settings.length = 'abc'`."""
    named = cast("Mapping[str, object]", redact(settings))
    return "".join(f"; environment.settings.{name} = {value!r:.60}" for name, value in named.items())


def _kind_of(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def as_tasks(raw: Any, split: Split, where: str) -> list[Task]:
    """Converts the result of `tasks` of the environment `where`, dictionaries or tasks, to tasks. Raises `DataError`
    with the row, also for repeated ids."""
    if isinstance(raw, str | Mapping) or not isinstance(raw, Iterable):
        raise DataError(f"tasks() of {where} returned {_kind_of(raw)}: return a list of tasks")
    raw = cast("Iterable[RawTask]", raw)
    tasks = [as_task(item, f"{split}/{row}", f"{split} task {row} of {where}") for row, item in enumerate(raw)]
    seen: dict[str, int] = {}
    for row, task in enumerate(tasks):
        first = seen.setdefault(task.id, row)
        if first != row:
            raise DataError(f"{split} tasks {first} and {row} of {where} have the same id {task.id!r}: use unique ids")
    return tasks


def as_task(raw: object, default_id: str, where: str) -> Task:
    """Converts a task or a dictionary {"prompt", "answer"?, "id"?, anything else -> `info`} to a task. `prompt` is text
    or a list of messages; their content may have parts as in OpenAI's requests, an image being a path, bytes, a `data:`
    URI or one of PIL. Raises `DataError` that names `where`."""
    if isinstance(raw, Task):
        task = raw
    elif not isinstance(raw, Mapping):
        raise DataError(f"{where} is a {type(raw).__name__}: give a Task or a dictionary with 'prompt'")
    else:
        rest = {str(key): value for key, value in cast("Mapping[Any, Any]", raw).items()}
        if "prompt" not in rest:
            raise DataError(f"{where} has no 'prompt', only {', '.join(sorted(rest)) or 'nothing'}: add it")
        prompt = as_messages(rest.pop("prompt"), where)
        answer = rest.pop("answer", None)
        if answer is not None and not isinstance(answer, str):
            raise DataError(f"{where} has the answer {answer!r:.60}, a {type(answer).__name__}: give it as text")
        task = Task(str(rest.pop("id", default_id)), prompt, answer, rest)
    if not task.prompt:
        raise DataError(f"{where} has an empty prompt: give at least one message")
    complaint = not_plain(task.info, "info")
    if complaint:
        raise DataError(f"{where}: {complaint}: keep to text, numbers, booleans, lists and dictionaries")
    return task


def as_messages(prompt: Any, where: str) -> tuple[Message, ...]:
    """The messages of a prompt: a text, or a list of messages and dictionaries. `where`: its place, for errors."""
    if isinstance(prompt, str):
        return (Message("user", prompt),)
    if not isinstance(prompt, Sequence):
        raise DataError(f"{where} has a prompt that is a {type(prompt).__name__}: give a text or a list of messages")
    messages: list[Message] = []
    for turn in cast("Sequence[Any]", prompt):
        if isinstance(turn, Message):
            messages.append(turn)
            continue
        role, content = (turn.get("role"), turn.get("content")) if isinstance(turn, Mapping) else (None, None)
        media: tuple[Media, ...] = ()
        if isinstance(content, list | tuple):
            content, media = joined(cast("Sequence[Any]", content), f"{where}: content", None)
            refuse_open(media, where)
        calls = calls_of(turn.get("tool_calls"), f"{where}: tool_calls") if isinstance(turn, Mapping) else ()
        content = "" if content is None and calls else content
        if role not in get_args(Role) or not isinstance(content, str):
            raise DataError(f"{where} has a message {turn!r:.80}: give {{'role': 'user', 'content': 'text'}}")
        extra = {str(key): value for key, value in turn.items() if key not in _CONVERTED}
        if complaint := not_plain(extra, "a message"):
            raise DataError(f"{where}: {complaint}: keep to text, numbers, booleans, lists and dictionaries")
        messages.append(Message(cast("Role", role), content, media, calls, extra=extra))
    return tuple(messages)
