"""Looks at a run's numbers for what leaves it nothing to learn, and says so once, while it goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from slipstream.config.planned import PlannedConfig
from slipstream.config.schema import EvaluationConfig, RLConfig

STEPS = 3
"""So many in a row make a warning."""
LITTLE_SIGNAL = 0.1
"""Part of the groups with better and worse answers; below it there is hardly anything to learn from."""
COLLAPSED = 0.1
"""Part of the entropy that the run began with."""
SOLVED = 0.8
"""Part of the reward that counts as right; from there on few groups that differ, and little entropy, are success."""
_OF_GROUPS = ("group_mean", "leave_one_out")


class SignalWatch:
    """See the module. Says nothing of SFT, of a run whose tasks are nearly solved, or where a teacher teaches; and of
    groups only where it is their own rewards that are compared."""

    def __init__(self, config: PlannedConfig) -> None:
        algorithm = config.algorithm
        self._is_rl = isinstance(algorithm, RLConfig) and config.teacher is None
        self._compares = isinstance(algorithm, RLConfig) and algorithm.advantage in _OF_GROUPS
        self._solved = SOLVED * (config.evaluation or EvaluationConfig()).threshold
        self._signals: deque[float] = deque(maxlen=STEPS)
        self._entropies: deque[float] = deque(maxlen=STEPS)
        self._highest = 0.0
        self._is_told: set[str] = set()

    def observe(self, metrics: Mapping[str, float]) -> list[str]:
        """What there is to say after a step: one sentence each. Each is said again only when it was over meanwhile."""
        if not self._is_rl or "reward/mean" not in metrics:
            return []
        reward, is_solved = metrics["reward/mean"], metrics["reward/mean"] >= self._solved
        said: list[str] = []
        self._signals.append(metrics.get("reward/signal_fraction", 1.0))
        if self._is_new("signal", self._compares and not is_solved and _all_below(self._signals, LITTLE_SIGNAL)):
            said.append(
                f"in the last {STEPS} steps at most {100 * max(self._signals):.0f} % of the groups had both better and "
                f"worse answers (mean reward {reward:.3g}), so there was hardly anything to learn from: use easier "
                "tasks, start from a model that is right more often (more SFT), or raise algorithm.group_size"
            )
        if (entropy := metrics.get("train/entropy")) is not None:
            self._entropies.append(entropy)
            self._highest = max(self._highest, entropy)
        if self._is_new("entropy", not is_solved and _all_below(self._entropies, COLLAPSED * self._highest)):
            said.append(
                f"the policy's entropy fell from {self._highest:.2g} to {self._entropies[-1]:.2g} nats a token at a "
                f"mean reward of {reward:.3g}: it says the same whatever is rewarded, and learns no more; begin again "
                "from an earlier checkpoint with a lower training.learning_rate, a higher algorithm.clip_high, or some "
                "algorithm.entropy_coef"
            )
        return said

    def _is_new(self, name: str, is_so: bool) -> bool:
        was_told = name in self._is_told
        (self._is_told.add if is_so else self._is_told.discard)(name)
        return is_so and not was_told


def _all_below(values: deque[float], limit: float) -> bool:
    return len(values) == STEPS and max(values) < limit
