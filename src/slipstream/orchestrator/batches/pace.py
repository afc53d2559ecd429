"""Generated amounts and their time, for the speed in a batch's metrics. Pure.

If groups of several batches are generated at once, several batches may be cut at one moment. The time between two of
them then says nothing: `Pace` looks at the last few.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slipstream.records import TRAINABLE_OUTCOMES, Rollout

_SHORTEST_S = 1e-3


@dataclass(frozen=True)
class Generated:
    """Amounts generated in some time."""

    seconds: float
    rollouts: float
    tokens: float
    """Sampled by trainable rollouts."""

    @classmethod
    def of(cls, groups: Iterable[Sequence[Rollout]], seconds: float = 0.0) -> Generated:
        """All of these groups."""
        rollouts = [rollout for group in groups for rollout in group]
        tokens = sum(rollout.num_sampled for rollout in rollouts if rollout.outcome in TRAINABLE_OUTCOMES)
        return cls(max(seconds, _SHORTEST_S), len(rollouts), tokens)

    def rates(self) -> dict[str, float]:
        """As metrics."""
        return {
            "time/generate_s": self.seconds,
            "throughput/generated_tokens_per_s": self.tokens / self.seconds,
            "throughput/rollouts_per_s": self.rollouts / self.seconds,
        }


class Pace:
    """Amounts generated for each of the last batches, on average."""

    def __init__(self, num_batches: int) -> None:
        self._cuts: deque[tuple[float, int, int]] = deque(maxlen=num_batches + 1)
        self._rollouts = self._tokens = 0

    def begin(self, now: float) -> None:
        """Generation begins; `now` is by the clock of `cut`."""
        self._cuts.append((now, 0, 0))

    def add(self, group: Sequence[Rollout]) -> None:
        """A group has been generated."""
        made = Generated.of([group])
        self._rollouts += int(made.rollouts)
        self._tokens += int(made.tokens)

    def cut(self, now: float) -> Generated:
        """A batch is made."""
        self._cuts.append((now, self._rollouts, self._tokens))
        then, rollouts, tokens = self._cuts[0]
        number = len(self._cuts) - 1
        return Generated(
            max(now - then, _SHORTEST_S) / number,
            (self._rollouts - rollouts) / number,
            (self._tokens - tokens) / number,
        )
