"""Methods called by `Orchestrator` and `RolloutReader` around updates, evaluations and batches."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from slipstream.errors import SlipstreamError
from slipstream.orchestrator.evaluate import Evaluation
from slipstream.records import ApplyReport


class TrainerHooks:
    """Methods without effect unless a subclass overrides them; called by the trainer's thread."""

    def waiting_for_engine(self) -> AbstractContextManager[None]:
        """Entered while the first update waits for the engine to start."""
        return nullcontext()

    def before_update(self) -> None:
        """A version is about to be published."""

    def repeats_update(self, error: SlipstreamError) -> bool:
        """Whether to publish an update a second time after it failed with `error`."""
        return False

    def wants_weights(self) -> bool:
        """Whether servers have lost their weights and wait for them."""
        return False

    def version_applied(self, report: ApplyReport, metrics: Mapping[str, float]) -> None:
        """The engine has taken a version and proved it; `metrics` are of several engines since the last update."""

    def version_evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Version `step` was evaluated on the held-out tasks."""

    def version_released(self, step: int) -> None:
        """Rollouts may be made with version `step`, the newest."""

    def batch_taken(self) -> None:
        """The trainer has taken a batch."""
