"""The objective of a loss in one step of a session: "sft", a built-in loss, or a function of the caller's.

All other hooks, masks, divisors, importance weights and the KL term stay those of the run. Guarantees: a function is
tried on made-up inputs first, and every error in it names the function, its file and the line.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slipstream.algo.algorithm import Algorithm, Credits, LossTerm
from slipstream.algo.custom import user_function
from slipstream.algo.surrogate_losses import LOSSES, LossInputs, PolicyLoss, Streams
from slipstream.algo.trial import made_up_group, try_loss
from slipstream.errors import ConfigError, TrainingError
from slipstream.records import Rollout, Sequence
from slipstream.trainer.loss import TERM, Objective, PolicyObjective, SFTObjective

SFT = "sft"
Loss = str | Callable[[LossInputs], Any]


def objective_of(loss: Loss, base: PolicyObjective, num_ranks: int = 1) -> Objective:
    """The objective with this loss, and all else as in `base`, the run's own. With several ranks, each imports a
    function of the caller's by its file and name. Raises ConfigError for an unusable loss."""
    if loss == SFT:
        return SFTObjective(SFT)
    if isinstance(loss, str) and loss.startswith(TERM):
        return base.term(loss.removeprefix(TERM))
    if not isinstance(loss, str) and not callable(loss):
        raise ConfigError(f'loss = {loss!r:.60} is no loss: give "sft", a name, or a function of LossInputs')
    if not isinstance(loss, str) and num_ranks > 1:
        loss = importable(loss, num_ranks)
    name = loss if isinstance(loss, str) else name_of(loss)
    function = (LOSSES.get(loss) or user_function("loss", loss)) if isinstance(loss, str) else loss
    chosen = WithLoss(base.algorithm, function, name)
    if name not in LOSSES:
        try:
            try_loss(chosen, made_up_group(), _AnyStream)
        except TrainingError as error:
            raise ConfigError(f"{error} (it was tried on three made-up rollouts)") from error
    return base.with_algorithm(chosen, name)


def name_of(function: Callable[..., Any]) -> str:
    """How messages call a function: its file and its name."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    try:
        file = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:
        file = None
    return f"{file}:{name}" if file else name


def importable(function: Callable[..., Any], num_ranks: int) -> str:
    """The name for another process to import the function, as in `algorithm.loss`. Raises ConfigError for a closure."""
    name, owner = name_of(function), sys.modules.get(getattr(function, "__module__", ""))
    known = getattr(function, "__qualname__", "<none>")
    why = ""
    if "<" in known or "." in known or getattr(owner, known, None) is not function:
        why = "is no function at the top level of a file"
    elif owner is None or owner.__name__ == "__main__":
        why = "is in the program itself"
    if why:
        raise ConfigError(
            f"the loss {name} {why}, and each of the training.ranks = {num_ranks} processes must import it: put it "
            "into a file of its own"
        )
    return name


class WithLoss(Algorithm):
    """An algorithm with another loss."""

    def __init__(self, base: Algorithm, function: Callable[[LossInputs], Any], name: str) -> None:
        self.settings = base.settings
        self._base, self._function, self._name = base, function, name

    @property
    def reads(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Those of the run's algorithm, and the function's attribute `reads`, if it has one."""
        return (*self._base.reads, *getattr(self._function, "reads", ()))

    def credit(self, group: list[Rollout]) -> Credits | None:
        """See the base."""
        return self._base.credit(group)

    def credit_batch(self, rollouts: list[Rollout]) -> Credits | None:
        """See the base."""
        return self._base.credit_batch(rollouts)

    def loss(self, inputs: LossInputs) -> PolicyLoss | Tensor:
        """The function's."""
        return self._function(inputs)

    def metrics(self, rollouts: list[Rollout]) -> dict[str, float]:
        """See the base."""
        return self._base.metrics(rollouts)

    def terms(self, sequences: list[Sequence]) -> list[LossTerm]:
        """See the base."""
        return self._base.terms(sequences)

    def defines(self, hook: str) -> bool:
        """See the base."""
        return self._name not in LOSSES if hook == "loss" else self._base.defines(hook)

    def place(self, hook: str) -> str:
        """See the base."""
        return f"the loss {self._name}" if hook == "loss" else self._base.place(hook)


class _AnyStream(Streams):
    """Streams of any name: the caller's are in his sequences."""

    def __missing__(self, name: str) -> Tensor:
        return torch.linspace(-1.0, -0.1, 6)
