"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): replaces groups with all rewards equal by new ones.

Guarantees: the choice follows from rewards and the order of the tasks, never from the rollouts' order of finishing.
Every dropped group is counted by reason. A batch without any group with signal keeps its first groups: the trainer
sees and counts it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from slipstream.algo.readiness import SignalRule, group_has_signal
from slipstream.records import TRAINABLE_OUTCOMES, Rollout, Task

MAX_TASKS = 64
"""Most tasks with own metrics in a batch; further ones are counted, those of a mixture's part together."""


@dataclass(frozen=True)
class Refills:
    """The source of further groups for a batch."""

    tasks: Callable[[int, int], Sequence[Task]]
    """(step, number of the refill, from 1) -> at most as many tasks as a batch has."""
    max_refills: int
    has_signal: SignalRule = group_has_signal

    def num_wanted(self, groups: Sequence[Sequence[Rollout]], size: int) -> int:
        """Number of tasks to sample, expected to give the groups with signal missing in a batch of `size`; at most
        `size`, and 0 when it has enough."""
        found = sum(map(self.has_signal, groups))
        return min(size, math.ceil((size - found) * len(groups) / found)) if 0 < found < size else size * (found == 0)


@dataclass(frozen=True)
class Choice:
    """The groups of a batch in sampling order."""

    groups: list[list[Rollout]]
    metrics: dict[str, float]
    reasons: dict[str, str]
    """The reason against each other group, by its id."""


def choose(
    refills: Refills, groups: list[list[Rollout]], size: int, num_refills: int, *, may_be_empty: bool = False
) -> Choice:
    """Choose the first `size` of `groups` with signal. The first `size` of all are the batch's own, the others
    refills. Without any signal the own ones are chosen, unless the choice `may_be_empty`: then the first orchestrator
    makes another part."""
    with_signal = [index for index, group in enumerate(groups) if refills.has_signal(group)]
    chosen = with_signal[:size] or ([] if may_be_empty else list(range(min(size, len(groups)))))
    surplus = set(with_signal[size:])
    others = set(range(len(groups))) - set(chosen)
    reasons = {groups[index][0].group_id: "surplus" if index in surplus else "no_signal" for index in others}
    metrics = drawn_metrics(groups, len(chosen), sum(index >= size for index in chosen))
    metrics["rollout/refills"] = float(num_refills)
    return Choice([groups[index] for index in chosen], metrics, reasons)


def drawn_metrics(groups: Sequence[Sequence[Rollout]], num_chosen: int, num_refilled: int) -> dict[str, float]:
    """Metrics of a batch from the generated `groups`; `num_refilled` of its groups took others' places."""
    metrics = {
        "rollout/drawn_groups": float(len(groups)),
        "rollout/refilled_groups": float(num_refilled),
        "rollout/groups": float(num_chosen),
    }
    rewards = [r.reward for group in groups for r in group if r.outcome in TRAINABLE_OUTCOMES]
    if rewards:
        metrics["reward/drawn_mean"] = sum(rewards) / len(rewards)
    return metrics


def losses(groups: Sequence[Sequence[Rollout]], reasons: Mapping[str, str]) -> tuple[dict[str, int], dict[str, float]]:
    """The losses of `groups`: the number of untrained rollouts by reason, and metrics of their sampled tokens and of
    groups left out as a whole. `reasons`: why these are left out, by their ids. A failed rollout of any group counts by
    its outcome."""
    rollouts, metrics = Counter[str](), Counter[str]()
    for group in groups:
        left_out = reasons.get(group[0].group_id) if group else None
        if left_out is not None:
            metrics[f"dropped_groups/{left_out}"] += 1
        for rollout in group:
            reason = left_out if rollout.outcome in TRAINABLE_OUTCOMES else rollout.outcome
            if reason is not None:
                rollouts[reason] += 1
                metrics[f"dropped_tokens/{reason}"] += rollout.num_sampled
    return dict(rollouts), {name: float(value) for name, value in metrics.items() if value}


def task_counts(
    groups: Sequence[Sequence[Rollout]],
    has_signal: Callable[[Sequence[Rollout]], bool],
    parts: Collection[str] = (),
) -> dict[str, float]:
    """Counts the groups generated for a batch, by the tasks' source: all, with signal, and failed
    rollouts. Empty without sources. `parts`: the parts of a mixture; its curriculum needs all groups of each."""
    found: dict[str, float] = {}
    tasks: set[str] = set()
    left_out: set[str] = set()
    for group in groups:
        name = group[0].source if group else ""
        if not name:
            continue
        if name not in tasks and len(tasks) == MAX_TASKS:
            left_out.add(name)
            if (part := name.partition("/")[0]) not in parts:
                continue
            name = f"{part}/further"
        else:
            tasks.add(name)
        failed = sum(rollout.outcome not in TRAINABLE_OUTCOMES for rollout in group)
        for key, value in (("drawn_groups", 1), ("signal_groups", has_signal(group)), ("dropped", failed)):
            found[f"task/{name}/{key}"] = found.get(f"task/{name}/{key}", 0.0) + value
    if left_out:
        found["task/left_out"] = float(len(left_out))
    return found
