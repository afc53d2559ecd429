"""Judges a run's first batch (`algo/readiness.py`), and warns, during the run, when its metrics show little left to
learn: low signal, or collapsed entropy."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from slipstream.algo.readiness import (
    CONTEXT_ADVICE,
    LOW_SIGNAL,
    SOLVED,
    Judgement,
    group_has_signal,
    group_statistics,
    judge,
    signal_rule,
)
from slipstream.config.planned import PlannedConfig
from slipstream.config.schema import EvaluationConfig, RLConfig
from slipstream.records import Rollout

STEPS = 3
"""Consecutive steps below a limit before a warning."""
COLLAPSED = 0.1
"""Fraction of the run's highest entropy; below it the policy's entropy has collapsed."""
QUIET = 50
"""Steps before a warning is repeated, at first."""
_MORE_SIGNAL = "use easier tasks, start from a model that is right more often (more SFT), or raise algorithm.group_size"
_GROUP_BASELINES = ("group_mean", "leave_one_out")


class SignalWatch:
    """See the module. Silent for SFT, for runs with a teacher, and when the tasks are nearly solved. Warns of groups
    only if the baseline compares the rewards of a group, and nothing else teaches (`has_terms`)."""

    def __init__(self, config: PlannedConfig, *, has_terms: bool = False) -> None:
        algorithm = config.algorithm
        self._is_rl = isinstance(algorithm, RLConfig) and config.teacher is None
        self._compares = isinstance(algorithm, RLConfig) and algorithm.advantage in _GROUP_BASELINES
        self._compares &= not has_terms
        self._threshold = (config.evaluation or EvaluationConfig()).threshold
        self._solved = SOLVED * self._threshold
        self._has_signal = signal_rule(algorithm) if isinstance(algorithm, RLConfig) else group_has_signal
        self._is_refilled = isinstance(algorithm, RLConfig) and algorithm.max_refills != 0
        self._signals: deque[float] = deque(maxlen=STEPS)
        self._entropies: deque[float] = deque(maxlen=STEPS)
        self._highest = 0.0
        self._num_steps = 0
        self._num_low = 0
        """Steps of low signal since its last warning."""
        self._said: dict[str, int] = {}
        """After how many steps each warning was last given."""
        self._quiet: dict[str, int] = {}
        """For how many steps it is not repeated."""

    def judge_first(self, rollouts: Sequence[Rollout]) -> Judgement | None:
        """The verdict on a run's first batch. None if groups are not compared, or groups without signal are
        replaced."""
        if not self._compares or not self._is_rl or self._is_refilled:
            return None
        found = group_statistics(rollouts, self._threshold, self._has_signal)
        return judge(found) if found else None

    def observe(self, metrics: Mapping[str, float]) -> list[str]:
        """Warnings after a step, one sentence each. One is repeated after `QUIET` steps, and then after twice as many
        each time, if its condition holds there."""
        if not self._is_rl or "reward/mean" not in metrics:
            return []
        self._num_steps += 1
        reward, is_solved = metrics["reward/mean"], metrics["reward/mean"] >= self._solved
        warnings: list[str] = []
        self._signals.append(metrics.get("reward/signal_fraction", 1.0))
        self._num_low += self._signals[-1] < LOW_SIGNAL
        since = self._num_steps - self._said.get("signal", 0)
        if self._is_due("signal", self._compares and not is_solved and _all_below(self._signals, LOW_SIGNAL)):
            is_full = metrics.get("rollout/stop_context_full_fraction", 0.0) > 0.5
            warnings.append(
                f"in {self._num_low} of the last {since} steps fewer than {100 * LOW_SIGNAL:.0f} % of the groups had "
                f"both better and worse answers (mean reward {reward:.3g}), so there was hardly anything to learn "
                f"from: {CONTEXT_ADVICE if is_full else _MORE_SIGNAL}"
            )
            self._num_low = 0
        if (entropy := metrics.get("train/entropy")) is not None:
            self._entropies.append(entropy)
            self._highest = max(self._highest, entropy)
        if self._is_due("entropy", not is_solved and _all_below(self._entropies, COLLAPSED * self._highest)):
            warnings.append(
                f"the policy's entropy fell from {self._highest:.2g} to {self._entropies[-1]:.2g} nats a token at a "
                f"mean reward of {reward:.3g}: it says the same whatever is rewarded, and learns no more; begin again "
                "from an earlier checkpoint with a lower training.learning_rate, a higher algorithm.clip_high, or some "
                "algorithm.entropy_coef"
            )
        return warnings

    def _is_due(self, name: str, is_so: bool) -> bool:
        """Whether to give a warning now; `is_so`: its condition."""
        quiet = self._quiet.get(name, 0)
        if not is_so or (name in self._said and self._num_steps - self._said[name] < quiet):
            return False
        self._said[name], self._quiet[name] = self._num_steps, max(QUIET, 2 * quiet)
        return True


def _all_below(values: deque[float], limit: float) -> bool:
    return len(values) == STEPS and max(values) < limit
