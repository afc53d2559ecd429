"""Does the reward tell right answers from wrong ones? Played before a run, with gold answers against junk.

A pure judgement of scores: rendering it and deciding what follows are the caller's. The rules, with accuracy the
part of the scores that reach `threshold`:

- gold accuracy is at least 0.99: an environment that refuses its own answers cannot be learnt;
- `empty` and `prompt` (the question said back) are right at most 0.05 times as often as gold: whoever says nothing must
  not be paid;
- `shuffled` (gold's characters in another order) and `other_row` (another task's answer with another text) are right
  at most half as often as gold. Some tasks have several right answers, so a few hits are fair; for a choice
  between two answers `other_row` is always the wrong one, because equal texts are never played;
- the mean reward of each kind of junk lies below gold's by at least a twentieth of the range of all rewards, so that a
  reward that pays by degrees still has a slope;
- the reward fails on none of it: junk is what a young policy says;
- fewer than half of the held-out prompts are training prompts: others ignore `split`.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from slipstream.envs.base import Environment, RewardError, RewardTimeout, Scorer
from slipstream.envs.single_turn import gold_of, make_tasks
from slipstream.records import Task

Kind = Literal["gold", "empty", "shuffled", "other_row", "prompt"]
KINDS: tuple[Kind, ...] = ("gold", "empty", "shuffled", "other_row", "prompt")

MIN_GOLD_ACCURACY = 0.99
# Of junk, as part of gold's.
MAX_ACCURACY: Mapping[Kind, float] = {"empty": 0.05, "prompt": 0.05, "shuffled": 0.5, "other_row": 0.5}
MIN_MARGIN = 0.05
MAX_SHARED = 0.5
"""Part of the held-out prompts; a run leaves such training prompts out."""
_NUM_HELD_OUT = 8
_STOP_AFTER_TIMEOUTS = 3
_AT_ONCE = 32
_WORDS: Mapping[Kind, str] = {
    "empty": "an empty answer",
    "prompt": "the question said back",
    "shuffled": "the gold answer with its characters shuffled",
    "other_row": "another task's answer",
}


@dataclass(frozen=True)
class KindResult:
    """How one kind of completion did."""

    kind: Kind
    rewards: list[float] = field(repr=False)
    threshold: float
    num_failed: int = 0
    num_timeouts: int = 0
    first_failure: str = ""
    first_failed: str = ""
    """The completion that it was, and the prompt."""

    @property
    def num_scored(self) -> int:
        """Completions that got a reward."""
        return len(self.rewards)

    @property
    def mean_reward(self) -> float:
        """Their mean reward; 0 if there are none."""
        return statistics.fmean(self.rewards) if self.rewards else 0.0

    @property
    def accuracy(self) -> float:
        """Part of them whose reward reaches the threshold; 0 if there are none."""
        return sum(reward >= self.threshold for reward in self.rewards) / max(1, len(self.rewards))


@dataclass(frozen=True)
class EnvironmentCheck:
    """The outcome; it passed when `failures` is empty."""

    environment: str
    num_tasks: int
    threshold: float
    results: list[KindResult]
    failures: list[str]
    """One sentence each."""

    @property
    def passed(self) -> bool:
        """Whether right and wrong can be told apart."""
        return not self.failures


async def check_environment(
    environment: Environment,
    scorer: Scorer,
    num_tasks: int = 100,
    *,
    threshold: float = 1.0,
    seed: int = 0,
    held_out: bool = True,
) -> EnvironmentCheck:
    """Grade gold and junk for `num_tasks` training tasks and judge the outcome; with `held_out`, look whether a few
    held-out tasks are among them.

    Stops playing after three timeouts: a reward that hangs would take a deadline for each.
    """
    tasks = make_tasks(environment, "train", num_tasks)
    golds = [gold_of(environment, task) for task in tasks]
    known = [(task, gold) for task, gold in zip(tasks, golds, strict=True) if gold is not None]
    if not known:
        said = f"none of {len(tasks)} tasks has a gold answer, so nothing can be said about the reward: give them"
        return EnvironmentCheck(environment.name, len(tasks), threshold, [], [said])
    results: list[KindResult] = []
    for kind, plays in completions(known, seed).items():
        results.append(await _play(kind, plays, scorer, threshold))
        if sum(result.num_timeouts for result in results) >= _STOP_AFTER_TIMEOUTS:
            break
    failures = judge_results(results)
    if held_out:
        failures += shared_prompts(tasks, make_tasks(environment, "eval", min(num_tasks, _NUM_HELD_OUT)))
    if len(known) < len(tasks):
        failures.append(f"{len(tasks) - len(known)} of {len(tasks)} tasks have no gold answer: give them")
    return EnvironmentCheck(environment.name, len(tasks), threshold, results, failures)


def completions(known: Sequence[tuple[Task, str]], seed: int = 0) -> dict[Kind, list[tuple[Task, str]]]:
    """What is played for tasks with gold answers; junk that equals gold but for case or space is left out."""
    draw = random.Random(seed)
    golds = [gold for _, gold in known]
    plays: dict[Kind, list[tuple[Task, str]]] = {kind: [] for kind in KINDS}
    for row, (task, gold) in enumerate(known):
        junk: dict[Kind, str | None] = {
            "empty": "",
            "shuffled": _shuffled(gold, draw),
            "other_row": _other(golds, row),
            "prompt": task.prompt[-1].content,
        }
        plays["gold"].append((task, gold))
        for kind, text in junk.items():
            if text is not None and not _same(text, gold):
                plays[kind].append((task, text))
    return plays


def judge_results(results: Sequence[KindResult]) -> list[str]:
    """What the rules of this module say against the results, one sentence each."""
    failures: list[str] = []
    # Mostly it is one mistake that shows in every kind.
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
        return failures or ["no gold answer was graded"]
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
    """What there is to say against tasks of which many are in both splits."""
    trained = {_asked(task) for task in train}
    shared = [task for task in held_out if _asked(task) in trained]
    if len(shared) < MAX_SHARED * len(held_out) or not shared:
        return []
    return [
        f"{len(shared)} of {len(held_out)} held-out prompts are training prompts too, first "
        f"{_short(_asked(shared[0]))}: have tasks() heed its argument split (slipstream.envs.split_of says which text "
        "is held out)"
    ]


def _asked(task: Task) -> str:
    return "\n".join(message.content for message in task.prompt if message.role != "system")


async def _play(kind: Kind, plays: Sequence[tuple[Task, str]], scorer: Scorer, threshold: float) -> KindResult:
    rewards: list[float] = []
    errors: list[RewardError] = []
    failed: list[str] = []

    async def grade(task: Task, completion: str) -> None:
        try:
            rewards.append((await scorer.score(task, completion)).reward)
        except RewardError as error:  # counted, and a reason to fail the check
            errors.append(error)
            failed.append(f"{_short(completion)} to {_short(task.prompt[-1].content)}")

    num_timeouts = 0
    # The first ones alone: a reward that always hangs should cost a few deadlines, not a whole batch of them.
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
    # A short text often shuffles to itself; turned around it is another one, if it can be one.
    return gold[::-1] if _same(text, gold) else text


def _other(golds: Sequence[str], row: int) -> str | None:
    """The next row's answer that has another text."""
    following = (golds[(row + step) % len(golds)] for step in range(1, len(golds)))
    return next((gold for gold in following if not _same(gold, golds[row])), None)
