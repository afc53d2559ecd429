"""The trial of an algorithm's hooks before a run: on two made-up groups of three rollouts with six sampled tokens."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from slipstream.algo.algorithm import (
    READABLE,
    Algorithm,
    algorithm_of,
    custom_metrics,
    loss_of,
    terms_of,
    write_credit,
)
from slipstream.algo.custom import user_function
from slipstream.algo.surrogate_losses import LossInputs, Streams
from slipstream.config.planned import PlannedRL
from slipstream.config.recipes import BUILT_IN
from slipstream.config.user_code import place_of
from slipstream.errors import ConfigError, TrainingError, one_line
from slipstream.records import Rollout, Sequence, Stream, TurnSpan

_LOGPROBS = {
    "behaviour_logprobs": (-0.47, -0.97, -0.07, -1.97, -0.67, -0.17),
    "old_logprobs": (-0.45, -0.95, -0.05, -1.95, -0.65, -0.15),
    "reference_logprobs": (-0.48, -0.91, -0.09, -1.99, -0.61, -0.12),
}
_INDEX = (0, 0, 0, 1, 2, 2)
"""The sequence of each token."""


def check_algorithm(settings: PlannedRL, tokenizer: Any = None) -> None:
    """Try all hooks on two made-up groups of three rollouts with six tokens; in one no reward is above 0. Raises
    ConfigError."""
    algorithm = algorithm_of(settings, tokenizer)
    try:
        own = _try_hooks(algorithm, made_up_group())
        own = _try_hooks(algorithm, made_up_group(solved=False)) or own
    except TrainingError as error:
        raise ConfigError(f"{error} (it was tried on three made-up rollouts)") from error
    if own and settings.advantage in ("gae", "none"):
        raise ConfigError(
            f"{own} gives the advantages, and algorithm.advantage = {settings.advantage!r} does, too: "
            "leave one of them out"
        )
    if own and settings.kl_coef and settings.arguments.kl_in == "reward":
        raise ConfigError(
            f"{own} gives the advantages, and a KL term in the reward would change them: set "
            'algorithm.arguments.kl_in = "loss"'
        )
    if settings.advantage not in BUILT_IN["advantage"]:
        _check_advantage(settings.advantage)


def _check_advantage(name: str) -> None:
    setting = f"algorithm.advantage: {name}"
    try:
        values = user_function("advantage", name)(torch.tensor([1.0, 0.0, 0.5]).double(), torch.tensor([0, 0, 1]))
    except ConfigError:
        raise
    except Exception as error:  # any code of the user's
        raise ConfigError(
            f"{setting} raised {one_line(error)} on three made-up rewards ({place_of(error)}): correct it"
        ) from error
    if not isinstance(values, Tensor) or values.shape != (3,):
        found = f"a tensor of shape {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise ConfigError(f"{setting} returned {found} for 3 rewards: return a tensor with one number for each")
    if not torch.isfinite(values).all():
        raise ConfigError(f"{setting} returned {values.tolist()} for finite inputs: return finite numbers")


def _try_hooks(algorithm: Algorithm, rollouts: list[Rollout]) -> str:
    """Call every hook of the user's; returns the place of the one that gives advantages, if any. Raises TrainingError
    for unusable results."""
    write_credit(algorithm, "credit", rollouts)
    gives = algorithm.place("credit") if _have_advantages(rollouts) else ""
    for name in algorithm.reads:
        if name not in READABLE and (close := get_close_matches(name, READABLE, cutoff=0.8)):
            hooks = algorithm.settings.hooks
            raise TrainingError(f"algorithm.hooks: {hooks}.reads names {name!r}: did you mean {close[0]!r}?")
    for rollout in rollouts:
        for name in algorithm.reads:
            _fill(rollout, name)
    write_credit(algorithm, "credit_batch", rollouts)
    if not gives and _have_advantages(rollouts):
        gives = algorithm.place("credit_batch")
    custom_metrics(algorithm, rollouts)
    sequences = [sequence for rollout in rollouts for sequence in rollout.sequences]
    methods = [term.loss for term in terms_of(algorithm, sequences) if term.loss]
    for method in [*(["loss"] if algorithm.defines("loss") else []), *methods]:
        try_loss(algorithm, rollouts, method=method)
    return gives


def _have_advantages(rollouts: list[Rollout]) -> bool:
    return any("advantages" in sequence.streams for rollout in rollouts for sequence in rollout.sequences)


def try_loss(
    algorithm: Algorithm, rollouts: list[Rollout], kind: type[Streams] = Streams, method: str = "loss"
) -> None:
    """Call the loss, or another method, on six tokens of `rollouts`; `kind`: of its streams. Raises TrainingError for
    unusable results."""
    logprobs_N = torch.tensor([-0.5, -1.0, -0.1, -2.0, -0.7, -0.2], requires_grad=True)
    old_N, behaviour_N = torch.tensor(_LOGPROBS["old_logprobs"]), torch.tensor(_LOGPROBS["behaviour_logprobs"])
    streams = {"advantages": torch.tensor([1.0, 1.0, 1.0, -1.0, 0.5, 0.5]), "behaviour_logprobs": behaviour_N}
    streams |= _joined([sequence for rollout in rollouts for sequence in rollout.sequences])
    settings = algorithm.settings
    inputs = LossInputs(
        logprobs_N,
        old_N,
        streams["advantages"],
        torch.tensor(_INDEX),
        3,
        settings.clip_low,
        settings.clip_high,
        settings.arguments.clip_dual,
        kind(streams),
        torch.linspace(0.2, 1.2, 6, requires_grad=True),
    )
    values = loss_of(algorithm, inputs, method).loss_N
    if not torch.isfinite(values).all():
        found = f"{algorithm.place(method)} returned {values.tolist()}"
        raise TrainingError(f"{found} for finite inputs: return finite numbers")


def made_up_group(*, solved: bool = True) -> list[Rollout]:
    """Two answers and an episode of two turns with a call of a tool; if not `solved`, every reward is 0."""
    answer, other = Sequence([1, 2, 3, 4], [False, True, True, True]), Sequence([1, 4], [False, True])
    episode = Sequence([1, 5, 6, 7, 8], [False, True, False, False, True])
    given = iter(_LOGPROBS["behaviour_logprobs"])
    for sequence in (answer, other, episode):
        sequence.logprobs = [next(given) if trained else 0.0 for trained in sequence.mask]
    spans = [TurnSpan(0, 1, 2), TurnSpan(0, 4, 5)]
    rollouts = [
        Rollout("0.0.0", "t", "0.0", [answer], 1.0, "done", {"in_place": 1.0}, "yes", stop="answer"),
        Rollout("0.0.1", "t", "0.0", [other], 0.0, "truncated", {"in_place": 0.0}, "no", stop="length"),
        Rollout("0.0.2", "t", "0.0", [episode], 0.5, "done", {"tool_calls": 1.0}, "yes", num_turns=2, turn_spans=spans),
    ]
    for rollout in rollouts:
        rollout.prompt, rollout.answer, rollout.reward = "1 + 1 =", "2", rollout.reward * solved
    for rollout in rollouts[:2]:
        rollout.turn_spans = [TurnSpan(0, 1, len(rollout.sequences[0]))]
    return rollouts


def _fill(rollout: Rollout, name: str) -> None:
    """A stream of the trainer or of an environment."""
    values = _LOGPROBS[name] if name in READABLE else (0.0,) * len(_INDEX)
    (sequence,), place = rollout.sequences, int(rollout.id[-1])
    own = [value for value, index in zip(values, _INDEX, strict=True) if index == place]
    sequence.streams.setdefault(name, Stream.of(own))


def _joined(sequences: list[Sequence]) -> dict[str, Tensor]:
    """The streams of all sequences, as the loss gets them."""
    shared = set.intersection(*(set(sequence.streams) for sequence in sequences))
    found: dict[str, Tensor] = {}
    for name in shared:
        streams = [sequence.streams[name] for sequence in sequences]
        values = torch.tensor([value for stream in streams for value in stream.tolist()])
        found[name] = values if streams[0].width == 1 else values.view(-1, streams[0].width)
    return found
