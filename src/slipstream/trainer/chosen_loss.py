"""The objective of a loss in one step of a session: "sft", a built-in loss, or a function of the
caller's, `(LossInputs) -> Tensor`.

Guarantees: a function is tried on made-up inputs before it is used, and every error in it names the function, its file
and the line.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.algo.custom import check_user_function, user_function
from slipstream.algo.surrogate_losses import LOSSES, LossFunction, LossInputs, PolicyLoss
from slipstream.config.user_code import place_of
from slipstream.errors import ConfigError, SlipstreamError, TrainingError, one_line
from slipstream.trainer.loss import Objective, PolicyObjective, SFTObjective

SFT = "sft"
Loss = str | Callable[[LossInputs], Any]


def objective_of(loss: Loss, base: PolicyObjective, num_ranks: int = 1) -> Objective:
    """The objective with this loss, and all else as in `base`, the run's own. With several ranks, each imports a
    function of the caller's by its file and name. Raises ConfigError for an unusable loss."""
    if loss == SFT:
        return SFTObjective(SFT)
    if not isinstance(loss, str) and not callable(loss):
        raise ConfigError(f'loss = {loss!r:.60} is no loss: give "sft", a name, or a function of LossInputs')
    if not isinstance(loss, str) and num_ranks > 1:
        loss = importable(loss, num_ranks)
    if isinstance(loss, str):
        check_user_function("loss", loss)
        own = None if loss in LOSSES else CheckedLoss(user_function("loss", loss), loss)
        return base.with_loss(loss, own)
    checked = CheckedLoss(loss, name_of(loss))
    checked.try_out()
    return base.with_loss(checked.name, checked)


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


def name_of(function: Callable[..., Any]) -> str:
    """How messages call a function: its file and its name."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    try:
        file = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:
        file = None
    return f"{file}:{name}" if file else name


@dataclass(frozen=True)
class CheckedLoss:
    """A loss of the caller's."""

    function: LossFunction
    name: str

    def __call__(self, inputs: LossInputs) -> Tensor | PolicyLoss:
        """See `LossFunction`. Raises TrainingError for its exceptions, and for unusable results."""
        try:
            result: Any = self.function(inputs)
        except SlipstreamError:
            raise
        except Exception as error:  # the user's code, whatever it raises
            raise TrainingError(
                f"the loss {self.name} raised {one_line(error)} ({place_of(error)}): correct it"
            ) from error
        values: Any = result.loss_N if isinstance(result, PolicyLoss) else result
        size = tuple(inputs.logprobs_N.shape)
        if not isinstance(values, Tensor) or tuple(values.shape) != size:
            found = f"a tensor of shape {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise TrainingError(
                f"the loss {self.name} returned {found} for {size[0]} tokens: return a tensor with one number for each"
            )
        if not values.requires_grad:
            raise TrainingError(
                f"the loss {self.name} returned numbers without a gradient: make them depend on inputs.logprobs_N"
            )
        if values.device.type == "cpu" and not torch.isfinite(values).all():
            raise TrainingError(
                f"the loss {self.name} returned infinity or NaN, not a finite number: look at its divisions"
            )
        return result

    def try_out(self) -> None:
        """Call it on six made-up tokens of three sequences. Raises ConfigError for an unusable loss."""
        logprobs_N = torch.tensor([-0.5, -1.0, -0.1, -2.0, -0.7, -0.2], requires_grad=True)
        old_N, index_N = logprobs_N.detach() + 0.05, torch.tensor([0, 0, 0, 1, 1, 2])
        advantages_N = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, 0.5])
        entropy_N = torch.linspace(0.2, 1.2, 6, requires_grad=True)
        streams = _MadeUp({"behaviour_logprobs": old_N - 0.02, "advantages": advantages_N})
        try:
            self(LossInputs(logprobs_N, old_N, advantages_N, index_N, 3, 0.2, 0.28, None, streams, entropy_N))
        except TrainingError as error:
            raise ConfigError(f"{error} (it was tried on six made-up tokens)") from error


class _MadeUp(dict[str, Tensor]):
    """Streams of any name."""

    def __missing__(self, name: str) -> Tensor:
        return torch.linspace(-1.0, -0.1, 6)
