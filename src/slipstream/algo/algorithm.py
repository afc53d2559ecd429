"""An algorithm as an object: the hooks of a recipe. A class of the user's replaces any of them (`algorithm.hooks`), a
function one (`algorithm.credit`, `algorithm.loss`).

Guarantee: every error in a user's code is one sentence with file, hook and line.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Literal, cast

from torch import Tensor

from slipstream.algo.custom import user_function
from slipstream.algo.surrogate_losses import LOSSES, LossInputs, PolicyLoss
from slipstream.config.planned import PlannedRL
from slipstream.config.recipes import BUILT_IN
from slipstream.config.schema import ArgumentsConfig
from slipstream.config.user_code import place_of
from slipstream.errors import ConfigError, TrainingError, one_line
from slipstream.records import TRAINABLE_OUTCOMES, Rollout, Sequence, Stream

Credits = Collection[float | Iterable[float]]
"""For each rollout one advantage, or one for each of its sampled tokens, over all sequences as stored."""
Hook = Literal["credit", "credit_batch", "loss", "metrics", "terms"]
Readable = Literal["old_logprobs", "reference_logprobs"]
READABLE: tuple[Readable, ...] = ("old_logprobs", "reference_logprobs")


@dataclass(frozen=True)
class LossTerm:
    """A further loss of an optimizer step: the mean over the trained tokens of its own sequences."""

    name: str
    """Of its metric, `term/<name>`."""
    sequences: list[Sequence]
    """Their masks say which tokens carry this loss."""
    weight: float = 1.0
    loss: str = ""
    """The name of a method of the class: `LossInputs` to a loss for each token, `[N]`. Empty: cross-entropy."""


class Algorithm:
    """The recipe of a run. A subclass replaces the hooks it defines; `super()` calls the recipe's. Each process has its
    own object, so hooks share no state; a stream of a sequence carries values from `credit` to `loss` and `terms`."""

    reads: ClassVar[Collection[str]] = ()
    """Per-token values for `credit_batch` and `loss`. The trainer computes `old_logprobs` (by the weights before the
    batch) and `reference_logprobs` (by the initial model) if they are named. Others are streams of rollouts."""
    settings: PlannedRL
    """The section [algorithm] as planned; set after construction."""
    tokenizer: Any = None
    """The model's `slipstream.plugins.ChatTokenizer`, for `credit` alone; set after construction."""

    def credit(self, group: list[Rollout]) -> Credits | None:
        """Advantages of a complete group, without failed rollouts, in the orchestrator. None: `credit_batch` has them,
        or the recipe."""
        name = self.settings.credit
        own = None if name is None or name in BUILT_IN["credit"] else user_function("credit", name)
        return None if own is None else own(group)

    def credit_batch(self, rollouts: list[Rollout]) -> Credits | None:
        """Advantages of a whole batch, without failed rollouts, in the trainer. None: those of `credit`, or else of the
        recipe, from the rewards."""
        return None

    def loss(self, inputs: LossInputs) -> PolicyLoss | Tensor:
        """The loss of each token, `[N]`. Importance weights, a KL term and an entropy bonus are the objective's."""
        name = self.settings.loss
        return (LOSSES.get(name) or user_function("loss", name))(inputs)

    def terms(self, sequences: list[Sequence]) -> list[LossTerm]:
        """Further losses of an optimizer step, given all its sequences, in the trainer, on one rank. Their gradients
        add up with that of `loss`."""
        return []

    def metrics(self, rollouts: list[Rollout]) -> dict[str, float]:
        """More metrics of each batch, with the prefix `custom/`."""
        return {}

    def defines(self, hook: str) -> bool:
        """Whether a hook is the user's."""
        if getattr(type(self), hook) is not getattr(Algorithm, hook, None):
            return True
        name = getattr(self.settings, hook, None)
        return name is not None and name not in BUILT_IN.get(hook, ())

    def place(self, hook: str) -> str:
        """The setting and the code of a hook, for messages."""
        if getattr(type(self), hook) is not getattr(Algorithm, hook, None):
            return f"algorithm.hooks: {self.settings.hooks}.{hook}"
        return f"algorithm.{hook}: {getattr(self.settings, hook)}"


def algorithm_of(settings: PlannedRL, tokenizer: Any = None) -> Algorithm:
    """The algorithm of `settings`; `tokenizer`: for `credit`. Raises ConfigError for an unusable class."""
    if settings.hooks is None:
        made = Algorithm()
    else:
        own, place = user_function("hooks", settings.hooks), f"algorithm.hooks: {settings.hooks}"
        if not (isinstance(own, type) and issubclass(own, Algorithm)):
            raise ConfigError(f"{place} is no subclass of slipstream.Algorithm: derive it from that class")
        given = settings.arguments.model_extra or {}
        for name in inspect.signature(own).parameters.keys() & ArgumentsConfig.model_fields:
            raise ConfigError(f"{place} takes {name}, and algorithm.arguments.{name} is the recipe's: rename it")
        try:
            made = own(**given)
        except Exception as error:  # the user's code, whatever it raises
            where = f"{place} cannot be made with algorithm.arguments = {given}"
            raise ConfigError(f"{where} ({one_line(error)}, {place_of(error)}): correct it") from error
    made.settings, made.tokenizer = settings, tokenizer
    return made


def check_reads(algorithm: Algorithm, rollouts: Iterable[Rollout]) -> None:
    """Raise TrainingError for a name in `reads` without a stream in any of the rollouts' sequences."""
    found = {name for rollout in rollouts for sequence in rollout.sequences for name in sequence.streams}
    for name in algorithm.reads:
        if name not in found:
            place, known = f"algorithm.hooks: {algorithm.settings.hooks}", ", ".join(sorted(found))
            raise TrainingError(f"{place}.reads names {name!r}, and rollouts have {known}: correct it")


def call(algorithm: Algorithm, hook: str, argument: Any) -> Any:
    """The result of a hook; raises TrainingError for an exception in the user's code."""
    try:
        return getattr(algorithm, hook)(argument)
    except (TrainingError, ConfigError):
        raise
    except Exception as error:  # the user's code, whatever it raises
        if not algorithm.defines(hook):
            raise
        raise TrainingError(
            f"{algorithm.place(hook)} raised {one_line(error)} ({place_of(error)}): correct it"
        ) from error


def loss_of(algorithm: Algorithm, inputs: LossInputs, method: str = "loss") -> PolicyLoss:
    """The loss of each token, by the hook or by the `method` of a term. Raises TrainingError for unusable values of a
    user's loss."""
    found = call(algorithm, method, inputs)
    if algorithm.defines(method):
        values, size = (found.loss_N if isinstance(found, PolicyLoss) else found), len(inputs.logprobs_N)
        if not isinstance(values, Tensor) or values.shape != (size,):
            kind = f"a tensor of shape {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise TrainingError(
                f"{algorithm.place(method)} returned {kind} for {size} tokens: return a tensor with one number for each"
            )
        if not values.requires_grad:
            raise TrainingError(
                f"{algorithm.place(method)} returned a loss without a gradient: make it depend on inputs.logprobs_N"
            )
    return (
        found
        if isinstance(found, PolicyLoss)
        else PolicyLoss(found, inputs.logprobs_N.detach() - inputs.old_logprobs_N)
    )


def write_credit(algorithm: Algorithm, hook: Literal["credit", "credit_batch"], rollouts: Iterable[Rollout]) -> None:
    """Write the advantages of a hook to the streams of `rollouts`. Raises TrainingError for unusable values."""
    usable = [rollout for rollout in rollouts if rollout.outcome in TRAINABLE_OUTCOMES]
    if not usable or not algorithm.defines(hook):
        return
    if (found := call(algorithm, hook, usable)) is None:
        return
    try:
        each = [_tokens_of(rollout, value) for rollout, value in zip(usable, found, strict=True)]
    except (TypeError, ValueError) as error:
        first = usable[0].group_id
        raise TrainingError(f"{algorithm.place(hook)}: {one_line(error)} (group {first}): correct it") from error
    for rollout, tokens in zip(usable, each, strict=True):
        given = iter(tokens)
        for sequence in rollout.sequences:
            sequence.streams["advantages"] = Stream.of(islice(given, sequence.num_trainable))


def _tokens_of(rollout: Rollout, value: float | Iterable[float]) -> list[float]:
    """The advantage of each sampled token, over all sequences. Raises ValueError for another number of them."""
    tokens = [*value] if isinstance(value, Iterable) else [value] * rollout.num_sampled
    found = [float(each) for each in tokens]
    if len(found) != rollout.num_sampled:
        raise ValueError(f"{len(found)} advantages for the {rollout.num_sampled} sampled tokens of {rollout.id}")
    if not all(map(math.isfinite, found)):
        raise ValueError(f"the advantages of {rollout.id} are not finite")
    return found


def terms_of(algorithm: Algorithm, sequences: list[Sequence]) -> list[LossTerm]:
    """The further losses with a trained token. Raises TrainingError for unusable ones."""
    if not algorithm.defines("terms"):
        return []
    found = call(algorithm, "terms", sequences)
    place = algorithm.place("terms")
    if not isinstance(found, list) or not all(isinstance(term, LossTerm) for term in cast("list[Any]", found)):
        raise TrainingError(f"{place} returned {type(found).__name__}: return a list of slipstream.LossTerm")
    terms = cast("list[LossTerm]", found)
    for term in terms:
        if term.loss and not callable(getattr(algorithm, term.loss, None)):
            raise TrainingError(f"{place}: the class has no method {term.loss!r} for the term {term.name!r}: define it")
        if any(len(sequence.mask) != len(sequence.token_ids) for sequence in term.sequences):
            raise TrainingError(f"{place}: a mask of the term {term.name!r} is not as long as its tokens: correct it")
    return [term for term in terms if any(sequence.num_trainable for sequence in term.sequences)]


def custom_metrics(algorithm: Algorithm, rollouts: Iterable[Rollout]) -> dict[str, float]:
    """The metrics of a user's hook, by their names in `metrics.jsonl`. Raises TrainingError for other values."""
    if not algorithm.defines("metrics"):
        return {}
    found = call(algorithm, "metrics", [rollout for rollout in rollouts if rollout.outcome in TRAINABLE_OUTCOMES])
    try:
        return {f"custom/{name}": float(value) for name, value in found.items()}
    except (AttributeError, TypeError, ValueError) as error:
        place = algorithm.place("metrics")
        raise TrainingError(f"{place} returned {type(found).__name__}: return numbers by name ({error})") from error
