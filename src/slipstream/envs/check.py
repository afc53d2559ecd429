"""Checks before a run that the reward separates correct answers from junk (`slipstream env test`).

Environments with several turns, tools or a `run` of their own have their episodes played: gold
conversations turn by turn, and junk in every turn. The caller renders the result. Accuracy is the fraction of scores
of at least `threshold`. The rules:

- gold accuracy is at least 0.99: an environment that rejects its own answers cannot be learnt;
- `empty` and `prompt` (the question repeated) are right at most 0.05 times as often as gold;
- `shuffled` (gold's characters in another order) and `other_row` (a different answer of another task) are right at most
  half as often as gold. Some tasks have several correct answers, so a few hits are allowed; with only two possible
  answers `other_row` is always the wrong one, because equal texts are left out;
- the mean reward of each kind of junk is below gold's by at least a twentieth of the range of all rewards: a graded
  reward still has a slope;
- no kind of junk makes the reward fail: an untrained policy writes junk;
- without gold answers (RL needs none) `empty` and `prompt` are right in one task of twenty at most;
- fewer than half of the held-out prompts are training prompts: otherwise `split` is ignored.

The rules hold for each part of a mixture by itself.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from slipstream.envs.answers import until_stop
from slipstream.envs.base import Environment, RewardError, RewardTimeout, Score, Scorer
from slipstream.envs.mixed import parts_of
from slipstream.envs.scoring.rehearsal import Rehearsal
from slipstream.envs.single_turn import gold_turns, make_tasks
from slipstream.envs.split import text_of
from slipstream.records import Message, Task

Kind = Literal["gold", "empty", "shuffled", "other_row", "prompt"]
KINDS: tuple[Kind, ...] = ("gold", "empty", "shuffled", "other_row", "prompt")

MIN_GOLD_ACCURACY = 0.99
# Accuracy of junk as a fraction of gold's.
MAX_ACCURACY: Mapping[Kind, float] = {"empty": 0.05, "prompt": 0.05, "shuffled": 0.5, "other_row": 0.5}
MIN_MARGIN = 0.05
MAX_SHARED = 0.5
"""Fraction of the held-out prompts; a run drops held-out prompts from training."""
_NUM_HELD_OUT = 8
_STOP_AFTER_TIMEOUTS = 3
_AT_ONCE = 32
_WORDS: Mapping[Kind, str] = {
    "empty": "an empty answer",
    "prompt": "the question repeated",
    "shuffled": "the gold answer with its characters shuffled",
    "other_row": "another task's answer",
}


@dataclass(frozen=True)
class KindResult:
    """Results of one kind of completion."""

    kind: Kind
    rewards: list[float] = field(repr=False)
    threshold: float
    num_failed: int = 0
    num_timeouts: int = 0
    first_failure: str = ""
    first_failed: str = ""
    """The first failed completion, and its prompt."""
    part: str = ""
    """The part of a mixture with these tasks."""

    @property
    def num_scored(self) -> int:
        """Number of completions with a reward."""
        return len(self.rewards)

    @property
    def mean_reward(self) -> float:
        """Their mean reward; 0 if there are none."""
        return statistics.fmean(self.rewards) if self.rewards else 0.0

    @property
    def accuracy(self) -> float:
        """Fraction of rewards of at least the threshold; 0 if there are none."""
        return sum(reward >= self.threshold for reward in self.rewards) / max(1, len(self.rewards))


@dataclass(frozen=True)
class EnvironmentCheck:
    """The result; the check passed if `failures` is empty."""

    environment: str
    num_tasks: int
    threshold: float
    results: list[KindResult]
    failures: list[str]
    """One sentence each."""
    without_gold: str = ""
    """Says that tasks have no gold answer: parts are unchecked, and SFT on them is not possible."""
    num_gold: int = 0
    """Tasks with a gold answer."""
    notes: tuple[str, ...] = ()
    """Further information."""


async def check_environment(
    environment: Environment,
    scorer: Scorer,
    num_tasks: int = 100,
    *,
    threshold: float = 1.0,
    held_out: bool = True,
    rehearsal: Rehearsal | None = None,
    stop: Sequence[str] = (),
) -> EnvironmentCheck:
    """Grades gold and junk for `num_tasks` training tasks, in a mixture of each part, and applies the rules; with
    `held_out`, also checks whether held-out tasks are among them. `rehearsal` plays the episodes; without it texts
    alone are graded. All texts end with the first string of `stop` in them, as the policy's do. Stops after three
    timeouts: a hanging reward would take a deadline for each completion."""
    parts = list(parts_of(environment))
    made = make_tasks(environment, "train", num_tasks * len(parts))
    hosted = [part for part, each in parts_of(environment).items() if each.plays_itself]
    tasks = [task for task in made if environment.plays_itself or task.part not in hosted]
    golds = {task.id: _ended(turns, stop) for task in tasks if (turns := gold_turns(environment, task))}
    if environment.plays_itself:
        reason = (
            f"{environment.name} plays and grades its episodes in its own process and gives no gold answers, so "
            "nothing is checked without a model: use slipstream env test RUN --model"
        )
        return EnvironmentCheck(environment.name, len(tasks), threshold, [], [], reason)
    held_out_tasks = make_tasks(environment, "eval", min(num_tasks, _NUM_HELD_OUT) * len(parts)) if held_out else []
    results: list[KindResult] = []
    failures: list[str] = []
    for part in parts:
        own = [task for task in tasks if task.part == part]
        known = [(task, golds[task.id][-1].content if task.id in golds else None) for task in own]
        of_part: list[KindResult] = []
        for kind, plays in completions(known).items():
            if not plays and not any(task.id in golds for task in own):
                continue  # without gold answers there is nothing of most kinds

            async def grade(task: Task, completion: str, kind: Kind = kind) -> Score:
                completion = until_stop(completion, stop)
                if rehearsal is None:
                    return await scorer.score(task, completion)
                turns = golds[task.id] if kind == "gold" else [Message("assistant", completion)]
                return await rehearsal.score(task, turns, is_gold=kind == "gold")

            if sum(result.num_timeouts for result in results + of_part) < _STOP_AFTER_TIMEOUTS:
                of_part.append(replace(await _play(kind, plays, grade, threshold), part=part))
        results += of_part
        found = judge_results(of_part) if of_part else []
        found += shared_prompts(own, [task for task in held_out_tasks if task.part == part])
        cut = sum(golds[task.id] != gold_turns(environment, task) for task in own if task.id in golds) if stop else 0
        if found and cut:
            found.append(
                f"{cut} of {len(own)} gold answers continue after a string of sampling.stop = {list(stop)}, which ends "
                "a turn: remove the string, or end the answers with it"
            )
        failures += [f"{part}: {text}" if part else text for text in found]
    reason = _without_gold(tasks, golds)
    notes: tuple[str, ...] = ()
    if rehearsal and (found := rehearsal.differences):
        notes = (
            f"warning: {len(found)} of {len(golds)} gold answers hold other messages than {environment.name} gives, "
            f"first {found[0]}: SFT would imitate a conversation that does not happen",
        )
    if len(tasks) < len(made):
        notes += (f"{len(made) - len(tasks)} tasks are of environments that grade themselves, and were not checked",)
    return EnvironmentCheck(environment.name, len(tasks), threshold, results, failures, reason, len(golds), notes)


def _ended(turns: Sequence[Message], stop: Sequence[str]) -> list[Message]:
    """Gold turns as the policy can say them."""
    return [
        msgspec.structs.replace(turn, content=until_stop(turn.content, stop)) if turn.role == "assistant" else turn
        for turn in turns
    ]


def _without_gold(tasks: Sequence[Task], golds: Mapping[str, object]) -> str:
    """The complaint about tasks without a gold answer; empty if there are none."""
    missing = Counter(task.part for task in tasks if task.id not in golds)
    if not missing:
        return ""
    parts = "" if [*missing] == [""] else f" (of {', '.join(f'{part}: {number}' for part, number in missing.items())})"
    return (
        f"{missing.total()} of {len(tasks)} tasks have no gold answer{parts}: SFT cannot imitate them, and of their "
        "rewards only those of an empty answer and of the repeated question were checked; give gold answers, or use "
        "slipstream env test RUN --model"
    )


def completions(known: Sequence[tuple[Task, str | None]]) -> dict[Kind, list[tuple[Task, str]]]:
    """The completions to grade for tasks and their gold answers, if any; junk that equals gold except for case or white
    space is left out."""
    draw = random.Random(0)
    golds = [gold for _, gold in known if gold is not None]
    plays: dict[Kind, list[tuple[Task, str]]] = {kind: [] for kind in KINDS}
    row = 0
    for task, gold in known:
        junk: dict[Kind, str | None] = {"empty": "", "prompt": task.prompt[-1].content}
        if gold is not None:
            junk |= {"shuffled": _shuffled(gold, draw), "other_row": _other(golds, row)}
            plays["gold"].append((task, gold))
            row += 1
        for kind, text in junk.items():
            if text is not None and (gold is None or not _same(text, gold)):
                plays[kind].append((task, text))
    return plays


def judge_results(results: Sequence[KindResult]) -> list[str]:
    """One sentence for each rule broken by the results."""
    failures: list[str] = []
    # Usually one mistake shows in every kind.
    failed = sorted((result for result in results if result.num_failed), key=lambda result: result.first_failure)
    for reason, group in itertools.groupby(failed, key=lambda result: result.first_failure):
        alike = list(group)
        number = sum(result.num_failed for result in alike)
        total = number + sum(result.num_scored for result in alike)
        kinds = ", ".join(f"'{result.kind}'" for result in alike)
        failures.append(
            f"the reward failed on {number} of {total} completions of kind {kinds}, first on {alike[0].first_failed}: "
            f"{reason}"
        )
    by_kind: dict[Kind, KindResult] = {result.kind: result for result in results if result.num_scored}
    gold = by_kind.get("gold")
    if gold is None:
        return failures + [
            f"{_WORDS[kind]} counts as right in {result.accuracy:.1%} of the tasks: make the reward stricter"
            for kind, result in by_kind.items()
            if result.accuracy > MAX_ACCURACY[kind]
        ]
    rewards = [reward for result in by_kind.values() for reward in result.rewards]
    spread = max(rewards) - min(rewards)
    if gold.accuracy < MIN_GOLD_ACCURACY:
        failures.append(
            f"gold answers reach the threshold {gold.threshold:g} in {gold.accuracy:.1%} of the tasks (mean reward "
            f"{gold.mean_reward:.3g}): correct the answers or the reward, or lower evaluation.threshold"
        )
    if len(by_kind) > 1 and spread == 0.0:
        return [*failures, f"the reward is {rewards[0]:g} whatever the completion: nothing can be learnt from it"]
    for kind, result in by_kind.items():
        if kind == "gold":
            continue
        limit = MAX_ACCURACY[kind] * gold.accuracy
        if result.accuracy > limit:
            failures.append(
                f"{_WORDS[kind]} counts as right in {result.accuracy:.1%} of the tasks, more than {limit:.1%}: "
                "make the reward stricter"
            )
        elif result.mean_reward > gold.mean_reward - MIN_MARGIN * spread:
            failures.append(
                f"{_WORDS[kind]} earns {result.mean_reward:.3g} on average, hardly less than gold's "
                f"{gold.mean_reward:.3g}: make the reward stricter"
            )
    return failures


def shared_prompts(train: Sequence[Task], held_out: Sequence[Task]) -> list[str]:
    """The complaint if many tasks are in both splits; empty otherwise."""
    trained = {text_of(task) for task in train}
    shared = [task for task in held_out if text_of(task) in trained]
    if len(shared) < MAX_SHARED * len(held_out) or not shared:
        return []
    return [
        f"{len(shared)} of {len(held_out)} held-out prompts are training prompts too, first "
        f"{_short(text_of(shared[0]))}: have tasks() use its argument split (slipstream.envs.split_of says which text "
        "is held out)"
    ]


async def _play(
    kind: Kind,
    plays: Sequence[tuple[Task, str]],
    score: Callable[[Task, str], Awaitable[Score]],
    threshold: float,
) -> KindResult:
    rewards: list[float] = []
    errors: list[RewardError] = []
    failed: list[str] = []

    async def grade(task: Task, completion: str) -> None:
        try:
            rewards.append((await score(task, completion)).reward)
        except RewardError as error:  # counted, and a reason to fail the check
            errors.append(error)
            failed.append(f"{_short(completion)} to {_short(task.prompt[-1].content)}")

    num_timeouts = 0
    # The first ones one at a time: a reward in a constant hang should cost a few deadlines, not a batch of them.
    starts = [*range(min(_STOP_AFTER_TIMEOUTS, len(plays))), *range(_STOP_AFTER_TIMEOUTS, len(plays), _AT_ONCE)]
    for start, end in itertools.pairwise([*starts, len(plays)]):
        await asyncio.gather(*(grade(task, completion) for task, completion in plays[start:end]))
        num_timeouts = sum(isinstance(error, RewardTimeout) for error in errors)
        if num_timeouts >= _STOP_AFTER_TIMEOUTS:
            break
    first = str(errors[0]) if errors else ""
    return KindResult(kind, rewards, threshold, len(errors), num_timeouts, first, failed[0] if failed else "")


def _short(text: str, most: int = 60) -> str:
    return repr(text if len(text) <= most else f"{text[: most - 3]}...")


def _same(text: str, other: str) -> bool:
    return text.split() == other.split() or text.strip().lower() == other.strip().lower()


def _shuffled(gold: str, draw: random.Random) -> str:
    characters = list(gold)
    draw.shuffle(characters)
    text = "".join(characters)
    # A short text often shuffles to itself; reversed it usually differs.
    return gold[::-1] if _same(text, gold) else text


def _other(golds: Sequence[str], row: int) -> str | None:
    """The next row's answer with a different text."""
    following = (golds[(row + step) % len(golds)] for step in range(1, len(golds)))
    return next((gold for gold in following if not _same(gold, golds[row])), None)
