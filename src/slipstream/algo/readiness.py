"""Whether reinforcement learning can learn from a policy's rollouts: statistics of groups, and a verdict.

A group's completions teach only if their rewards differ. A running training is judged by the same limits
(`trainer/signal_watch.py`); `EASY` is a further one, for a model with nearly all completions right.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Literal

from slipstream.config.schema import RLConfig
from slipstream.records import TRAINABLE_OUTCOMES, Rollout

Verdict = Literal["ready for RL", "ready, but slow", "more SFT first", "task too easy", "reward broken"]

SignalRule = Callable[[Sequence[Rollout]], bool]
"""Whether a group's rollouts differ in the values compared by training."""
READY_SIGNAL = 0.25
"""Least fraction of groups with reward variance in rollouts of a ready model."""
LOW_SIGNAL = 0.1
"""Fraction of groups with any reward variance; below it there is hardly anything to learn from."""
SOLVED = 0.8
"""From this fraction of right completions on, little reward variance means success."""
EASY = 0.95
"""From this fraction of right completions on, a task is too easy to gain from."""
_MARGIN = 0.05
"""Completions may earn more than gold answers by this fraction of the gold reward: style may count a little."""
_MAJORITY = 0.1
"""A gold answer of at least this fraction of the tasks makes guessing pay."""
MORE_SFT = "more training.steps of SFT, easier tasks, or answers that show their working"
CONTEXT_ADVICE = (
    "make shorter what the environment or its tools answer, raise inference.max_model_len, or lower sampling.max_tokens"
)
_MOSTLY_CUT = 0.5
_FEW_TEXTS = 0.35
"""Least fraction of different texts in a group's completions; below it a group without variance is a collapsed one."""


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of a policy's groups of completions, without failed ones."""

    num_groups: int
    group_size: int
    num_failed: int
    pass_at_1: float
    """Probability of a right completion: its reward reaches the threshold."""
    pass_at_1_interval: tuple[float, float]
    """Its 95 % interval over tasks (normal approximation)."""
    pass_at_k: float
    """Fraction of the groups with a right completion: pass@k (arXiv 2107.03374) for k = `group_size`."""
    signal_fraction: float
    """Fraction of the groups with reward variance."""
    mean_reward: float
    mean_length: float
    """In tokens."""
    truncated_fraction: float
    distinct_fraction: float
    """Mean fraction of different texts in a group's completions."""
    majority_answer: str = ""
    """The most frequent gold answer; empty if no two tasks have the same, or none has one."""
    majority_fraction: float = 0.0
    """Fraction of the tasks with this gold answer: a policy reaches it without reading the question."""
    context_full_fraction: float = 0.0
    """The part of `truncated_fraction` with a full context: a longer `sampling.max_tokens` does not help there."""

    @property
    def is_guessing(self) -> bool:
        """Whether the policy is right no more often than a constant majority answer, itself no solution of the task."""
        return _MAJORITY <= self.majority_fraction < SOLVED and self.pass_at_1 <= self.majority_fraction


@dataclass(frozen=True)
class Judgement:
    """A verdict with its reason and advice, one sentence."""

    verdict: Verdict
    text: str

    @property
    def is_ready(self) -> bool:
        """Whether to begin RL without a change."""
        return self.verdict == "ready for RL"


def has_signal(rewards: Sequence[float], reward_threshold: float | None = None) -> bool:
    """Whether the rewards of a group differ. With `reward_threshold`, a reward counts as 1 from there on, and as 0
    below."""
    return len({reward if reward_threshold is None else reward >= reward_threshold for reward in rewards}) > 1


def turn_returns(reward: float, turn_rewards: Sequence[float]) -> list[float]:
    """The undiscounted return of each turn: `reward`, the sum of all the episode's rewards, less the rewards of earlier
    turns."""
    before = accumulate(turn_rewards[:-1], initial=0.0) if turn_rewards else ()
    return [reward - earlier for earlier in before]


def turns_have_signal(returns: Sequence[Sequence[float]]) -> bool:
    """Whether the returns of any turn differ among a group's episodes with this turn. Equal sums of rewards do not
    exclude it. Different sums do not imply it: the difference may be a turn of one episode alone."""
    longest = max(map(len, returns), default=0)
    return any(has_signal([own[turn] for own in returns if turn < len(own)]) for turn in range(longest))


def group_has_signal(
    group: Sequence[Rollout],
    reward_threshold: float | None = None,
    *,
    by_turns: bool = False,
    trains_truncated: bool = True,
) -> bool:
    """Whether a group's rollouts differ in the values compared by training, before any penalty: rewards (`has_signal`),
    or `by_turns` (`algorithm.credit = "turn"`) the returns of their turns. Without `trains_truncated`
    (`algorithm.arguments.train_on_truncated`) one of them must have ended by itself."""
    usable = [rollout for rollout in group if rollout.outcome in TRAINABLE_OUTCOMES]
    if not trains_truncated and all(rollout.outcome == "truncated" for rollout in usable):
        return False
    given = [sequence.values("advantages") for rollout in usable for sequence in rollout.sequences]
    if any(map(any, filter(None, given))):
        return True  # its maker has compared them
    if given and None not in given:
        return False
    if by_turns:
        return turns_have_signal(
            [turn_returns(each.reward, each.turn_rewards or [0.0] * len(each.turn_spans)) for each in usable]
        )
    return has_signal([rollout.reward for rollout in usable], reward_threshold)


def signal_rule(algorithm: RLConfig) -> SignalRule:
    """`group_has_signal` under the settings of `algorithm`."""
    return partial(
        group_has_signal,
        reward_threshold=algorithm.arguments.reward_threshold,
        by_turns=algorithm.credit == "turn",
        trains_truncated=algorithm.arguments.train_on_truncated,
    )


def group_statistics(
    rollouts: Sequence[Rollout], threshold: float, rule: SignalRule = group_has_signal
) -> GroupStatistics | None:
    """Sum up `rollouts`, grouped by `group_id`; None if all failed. A completion is right from a reward of `threshold`
    on."""
    usable = [rollout for rollout in rollouts if rollout.outcome in TRAINABLE_OUTCOMES]
    if not usable:
        return None
    groups: dict[str, list[Rollout]] = {}
    for rollout in usable:
        groups.setdefault(rollout.group_id, []).append(rollout)
    right = [statistics.fmean(each.reward >= threshold for each in group) for group in groups.values()]
    pass_at_1 = statistics.fmean(right)
    half = 1.96 * statistics.stdev(right) / math.sqrt(len(right)) if len(right) > 1 else 1.0

    answers = Counter(group[0].answer for group in groups.values() if group[0].answer)
    majority, num_majority = max(answers.items(), key=lambda item: item[1], default=("", 0))

    return GroupStatistics(
        num_groups=len(groups),
        group_size=max(map(len, groups.values())),
        num_failed=len(rollouts) - len(usable),
        pass_at_1=pass_at_1,
        pass_at_1_interval=(max(0.0, pass_at_1 - half), min(1.0, pass_at_1 + half)),
        pass_at_k=statistics.fmean(part > 0 for part in right),
        signal_fraction=statistics.fmean(rule(group) for group in groups.values()),
        mean_reward=statistics.fmean(each.reward for each in usable),
        mean_length=statistics.fmean(each.num_sampled for each in usable),
        truncated_fraction=statistics.fmean(each.outcome == "truncated" for each in usable),
        distinct_fraction=statistics.fmean(
            len({each.completion for each in group}) / len(group) for group in groups.values()
        ),
        majority_answer=majority if num_majority > 1 else "",
        majority_fraction=num_majority / len(groups) if num_majority > 1 else 0.0,
        context_full_fraction=statistics.fmean(
            each.outcome == "truncated" and each.stop == "context_full" for each in usable
        ),
    )


def judge(found: GroupStatistics, gold_reward: float | None = None) -> Judgement:
    """The verdict on a policy, from its rollouts. `gold_reward`: the mean reward of the gold answers, if known: a
    policy with a higher one is rewarded for something else."""
    signal, solved = _percent(found.signal_fraction), _percent(found.pass_at_1)
    passes = f"pass@1 {solved}, pass@{found.group_size} {_percent(found.pass_at_k)}"
    with_signal = f"{signal} of the groups have better and worse completions"
    if gold_reward is not None and found.mean_reward > gold_reward + _MARGIN * abs(gold_reward):
        return Judgement(
            "reward broken",
            f"the model's completions earn {found.mean_reward:.3g} on average, more than the gold answers' "
            f"{gold_reward:.3g}: the reward pays for something else than a right answer; correct it",
        )
    if found.pass_at_1 >= EASY:
        return Judgement(
            "task too easy", f"{passes}: there is hardly anything left to gain; use harder tasks or a smaller model"
        )
    if found.is_guessing and found.pass_at_k > 0.0:
        return Judgement(
            "more SFT first",
            f"{passes}, and always answering {found.majority_answer!r} would be right in "
            f"{_percent(found.majority_fraction)} of the tasks: the model guesses, and RL would teach it that one "
            f"answer; {MORE_SFT}, until it is right more often than that",
        )
    if found.signal_fraction >= READY_SIGNAL:
        if found.pass_at_k > 0.0:
            return Judgement("ready for RL", f"{passes}; {with_signal}")
        if gold_reward is None:  # whether any reward is meant to reach the threshold is not known
            return Judgement("ready for RL", f"{with_signal}; no reward reaches evaluation.threshold, so {passes}")
        return Judgement(
            "more SFT first",
            f"no completion is right ({passes}), and the groups differ by partial credit alone, which is then all "
            f"that the model would learn: {MORE_SFT}",
        )
    if found.pass_at_1 >= SOLVED:
        return Judgement(
            "task too easy",
            f"{passes}, and only {with_signal}: use harder tasks, or keep the groups that teach "
            '(algorithm.kind = "dapo")',
        )
    if found.context_full_fraction > 0.5 * found.truncated_fraction >= 0.5 * _MOSTLY_CUT:
        return Judgement(
            "more SFT first",
            f"{_percent(found.context_full_fraction)} of the episodes end as the context is full ({passes}): "
            f"{CONTEXT_ADVICE}",
        )
    if found.truncated_fraction >= _MOSTLY_CUT:
        return Judgement(
            "more SFT first",
            f"{_percent(found.truncated_fraction)} of the completions are cut at sampling.max_tokens, or at a limit of "
            f"the environment ({passes}): raise it, or teach the model to end by more SFT",
        )
    if found.distinct_fraction < _FEW_TEXTS:
        return Judgement(
            "more SFT first",
            f"only {with_signal}, as the model says nearly the same in each "
            f"({_percent(found.distinct_fraction)} of a group's completions are different texts; {passes}): use a "
            "model from earlier in its SFT, a higher sampling.temperature, or SFT on more tasks",
        )
    if found.signal_fraction >= LOW_SIGNAL:
        return Judgement(
            "ready, but slow",
            f"{passes}; only {with_signal}: learning is faster after more training.steps of SFT, with a larger "
            'algorithm.group_size, or with algorithm.kind = "dapo", which keeps the groups that teach',
        )
    return Judgement("more SFT first", f"{passes}, and only {with_signal}: {MORE_SFT}")


def _percent(fraction: float) -> str:
    return (
        f"{100 * fraction:.0f} %" if fraction in (0.0, 1.0) or 0.01 <= fraction <= 0.99 else f"{100 * fraction:.1f} %"
    )
