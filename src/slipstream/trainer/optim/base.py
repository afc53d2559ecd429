"""Optimizers in two halves: computing the update, then writing it to the live weights. The default is AdamW on fp32
master weights; others are in `muon.py`, `adamw_bf16.py` and `bitsandbytes.py`.

Guarantees: gradients of any dtype are accumulated in fp32 after each micro-batch. Updates far below the live dtype's
resolution are not lost. A zero or non-finite gradient raises instead of being applied. Training continues bit for bit
after `load_state`. The caller decides when to step, and at what learning rate.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from slipstream.errors import TrainingError, ZeroGradientError
from slipstream.trainer.model import fused_weight_gradients
from slipstream.trainer.optim.loss_scale import LossScale

NamedParameters = Iterable[tuple[str, nn.Parameter]]
RateOf = Callable[[str], float]
"""By parameter name, the factor on the learning rate."""

ADAM_EPSILON = 1e-8
_SHAPED = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""Optimizer states of floats in the shape of their parameter."""


@dataclass(frozen=True)
class OptimStats:
    """Results of one optimizer step."""

    learning_rate: float
    grad_norm: float
    """Global norm before clipping."""
    clipped: bool
    loss_scale: float = 1.0
    """For the next step, in float16."""
    overflowed: bool = False
    """The gradient was too large for float16 and is discarded: nothing was updated."""
    num_overflows: int = 0
    """Overflows before this gradient."""


def learning_rate_at(
    step: int,
    *,
    peak: float,
    schedule: Literal["constant", "linear", "cosine"] = "constant",
    warmup_steps: int = 0,
    num_steps: int,
) -> float:
    """Learning rate of optimizer step `step`, counted from 0.

    Rises linearly to `peak` over `warmup_steps`, the first step included; then stays constant, or decays to reach zero
    at step `num_steps`, one after the last.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    if schedule == "linear":
        return peak * (1.0 - progress)
    if schedule == "cosine":
        return peak * 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak


def one_rate(name: str) -> float:
    """The `RateOf` with the same learning rate for every parameter."""
    return 1.0


class Optimizer(ABC):
    """Base of all optimizers: fp32 gradients, their norm and clipping, and the two halves of a step.

    A tied parameter counts once, under its first name. A parameter's gradient is accumulated in its holder's `grad` as
    soon as backward has computed it, or directly (`fused_weight_gradients.py`).
    """

    weights_key: ClassVar[str]
    """The key of the weights in `state()`."""

    def __init__(self, named_parameters: NamedParameters, max_grad_norm: float) -> None:
        self.max_grad_norm = max_grad_norm
        self.step = 0
        """Optimizer steps made so far."""
        self.sums_over_ranks: Callable[[list[float]], list[float]] | None = None
        """For sharded parameters: all-reduces sums over this rank's shards, in float64."""
        self._prepared = False
        self._parameters: dict[str, nn.Parameter] = {}
        seen: set[int] = set()
        for name, parameter in named_parameters:
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                self._parameters[name] = parameter
        if not self._parameters:
            raise TrainingError("the model has no trainable parameter: check what was frozen")
        self.loss_scale = LossScale(is_needed=any(each.dtype == torch.float16 for each in self._parameters.values()))
        """The caller multiplies the loss by it."""
        self._holders = {name: self._make_holder(live) for name, live in self._live.items()}
        for name, parameter in self._parameters.items():
            parameter.register_post_accumulate_grad_hook(partial(_move_gradient, self._holders[name]))
            fused_weight_gradients.register_holder(parameter, self._holders[name])

    @property
    def _live(self) -> dict[str, Tensor]:
        """The current live weights, or this rank's shards of them."""
        return {name: local_tensor(parameter) for name, parameter in self._parameters.items()}

    def prepare(self, learning_rate: float) -> OptimStats:
        """Clip the accumulated gradient to global norm `max_grad_norm` and compute the update; live weights do not
        change. A gradient with an overflow in float16 is discarded, and the loss scale halved (`OptimStats`).

        Raises TrainingError if the gradient is not finite, and ZeroGradientError if it is zero; in both cases nothing
        has changed."""
        if self._prepared:
            raise TrainingError("optim_prepare without optim_commit: the last update is not written yet")
        gradients = [holder.grad for holder in self._holders.values() if holder.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients).item() if gradients else 0.0
        if self.sums_over_ranks is not None:
            norm = math.sqrt(self.sums_over_ranks([norm * norm])[0])
        if norm == 0.0:
            raise ZeroGradientError(
                f"optimizer step {self.step} has a gradient that is zero or not finite: it is zero in all "
                f"{len(self._holders)} parameters, {next(iter(self._holders))} among them, because the batch "
                "teaches nothing (equal rewards?); skip the step"
            )
        if not math.isfinite(norm):
            if self.loss_scale.lower():
                self.discard_gradients()
                return OptimStats(learning_rate, norm, clipped=False, loss_scale=self.loss_scale.value, overflowed=True)
            raise TrainingError(self._explain(norm))
        norm /= self.loss_scale.value
        clipped = norm > self.max_grad_norm
        factor = (self.max_grad_norm / (norm + 1e-6) if clipped else 1.0) / self.loss_scale.value
        if factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        self.loss_scale.count_good()
        del gradients  # to free each as soon as its update is computed
        self._update(learning_rate)
        self.discard_gradients()
        self._prepared = True
        self.step += 1
        return OptimStats(learning_rate, norm, clipped, self.loss_scale.value)

    @torch.no_grad()
    def commit(self) -> None:
        """Write the new values to the live weights, in their dtype. Only after `prepare`."""
        if not self._prepared:
            raise TrainingError("optim_commit without optim_prepare: there is no update to write")
        values = self._take_values()
        live = self._live
        torch._foreach_copy_([live[name] for name in values], list(values.values()))
        self._prepared = False

    def discard_gradients(self) -> None:
        """Discard the gradients accumulated since the last step."""
        for holder in self._holders.values():
            holder.grad = None

    def state(self) -> dict[str, Tensor]:
        """The state for `load_state`, as tensors: `step`, and `KEY.NAME` for each parameter: its weights, its optimizer
        states, and its number of updates (`updates`)."""
        if self._prepared:
            raise TrainingError("the optimizer's state was asked for between optim_prepare and optim_commit")
        tensors: dict[str, Tensor] = {"step": torch.tensor(self.step), **self.loss_scale.state()}
        for name, weights in self._weights().items():
            tensors[f"{self.weights_key}.{name}"] = weights
            memory = self._memory_of(name)
            tensors.update({f"{key}.{name}": memory[key] for key in memory if key != "step"})
            if "step" in memory:
                tensors[f"updates.{name}"] = torch.tensor(int(memory["step"]))
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Load the `state()` of an optimizer of the same kind and parameters, and write the live weights. Raises
        TrainingError for another kind or model, before anything changes."""
        saved: dict[str, dict[str, Tensor]] = {}
        for path, tensor in tensors.items():
            key, _, name = path.partition(".")
            if name:
                saved.setdefault(name, {})[key] = tensor
        self._check(saved)
        if "step" not in tensors:
            raise TrainingError("the saved optimizer state has no step: resume from another checkpoint")
        self.step = int(tensors["step"])
        self.loss_scale.load(tensors)
        for name, weights in self._weights().items():
            memory: dict[str, Any] = saved[name]
            weights.copy_(memory.pop(self.weights_key))
            updates = memory.pop("updates", None)
            rule = self._memory_of(name)
            rule.clear()
            rule.update({key: self._placed(key, value, name) for key, value in memory.items()})
            if updates is not None:
                rule["step"] = self._as_step(int(updates), name)
        self.discard_gradients()
        values = self._weights()
        torch._foreach_copy_(list(self._live.values()), list(values.values()))
        self._prepared = False

    def _check(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Raise TrainingError for the state of another optimizer or model."""
        live = self._live
        if saved.keys() != live.keys():
            names = sorted(saved.keys() ^ live.keys())
            raise TrainingError(f"the saved optimizer state is for another model: {names[0]} is in only one of them")
        for name, memory in saved.items():
            expected = self._mark_of(name)
            has_memory = not memory.keys() <= {self.weights_key, "updates"}
            is_foreign = has_memory and (expected not in memory or self._is_foreign(memory))
            if self.weights_key not in memory or is_foreign:
                raise TrainingError(
                    f"the saved optimizer state is another optimizer's: of {name} it has {', '.join(sorted(memory))}, "
                    f"and {self.weights_key} and {expected} are needed, as this one makes them; resume with the "
                    "training.optimizer that it was made with"
                )
            if "exp_avg" in memory and "updates" not in memory:
                raise TrainingError(
                    f"the saved optimizer state does not say how often {name} was updated, which its moments are "
                    "corrected by: start a new run from the checkpoint's weights"
                )
            for key in {self.weights_key, *_SHAPED} & memory.keys():
                if (shape := memory[key].shape) != live[name].shape:
                    raise TrainingError(
                        f"the saved optimizer state is for another model: {name} has shape {list(shape)} there and "
                        f"{list(live[name].shape)} here"
                    )
                if not memory[key].is_floating_point():
                    raise TrainingError(
                        f"the saved optimizer state has {key} of {name} in {memory[key].dtype}, and it needs a float: "
                        "resume from another checkpoint"
                    )

    def _is_foreign(self, memory: Mapping[str, Tensor]) -> bool:
        """Whether a parameter's states are another optimizer's with the same keys."""
        return False

    @abstractmethod
    def _make_holder(self, live: Tensor) -> Tensor:
        """Make the tensor to hold a parameter's fp32 gradient in its `grad`."""

    @abstractmethod
    def _update(self, learning_rate: float) -> None:
        """Compute new values from the holders' gradients."""

    @abstractmethod
    def _take_values(self) -> Mapping[str, Tensor]:
        """The values to write to the live weights, by name."""

    @abstractmethod
    def _weights(self) -> Mapping[str, Tensor]:
        """The weights to save, by name."""

    @abstractmethod
    def _memory_of(self, name: str) -> dict[str, Any]:
        """A parameter's optimizer states: tensors, and `step`."""

    @abstractmethod
    def _mark_of(self, name: str) -> str:
        """A key always in a parameter's optimizer states."""

    def _placed(self, key: str, value: Tensor, name: str) -> Tensor:
        """A copy of a loaded optimizer state in the optimizer's memory."""
        return value.to(self._parameters[name].device, copy=True)

    def _as_step(self, updates: int, name: str) -> Any:
        """A number of updates in the optimizer's own form."""
        return torch.tensor(float(updates), dtype=torch.float32, device=self._parameters[name].device)

    def _explain(self, norm: float) -> str:
        """Describe the non-finite gradient in one sentence."""
        gradients = [holder.grad for holder in self._holders.values()]
        bad = [0.0 if gradient is None else float((~torch.isfinite(gradient)).sum()) for gradient in gradients]
        if self.sums_over_ranks is not None:
            bad = self.sums_over_ranks(bad)
        counts = dict(zip(self._holders, bad, strict=True))
        worst = max(counts, key=lambda name: counts[name])
        if not counts[worst]:
            return f"optimizer step {self.step} has a gradient whose norm is {norm}: lower the learning rate"
        return (
            f"optimizer step {self.step} has a gradient that is zero or not finite: {counts[worst]:.0f} of "
            f"{self._parameters[worst].numel()} values of {worst} are NaN or infinite"
        )


class MasterOptimizer(Optimizer):
    """One or more torch optimizers (rules) on fp32 master weights of all trainable parameters."""

    weights_key = "master"

    def __init__(self, named_parameters: NamedParameters, max_grad_norm: float, rate_of: RateOf) -> None:
        super().__init__(named_parameters, max_grad_norm)
        self._rate_of = rate_of
        self._rules: list[torch.optim.Optimizer] = []
        self._rule_of: dict[str, tuple[torch.optim.Optimizer, str]] = {}
        """By parameter name, its rule, and a key always in the rule's states."""

    def masters(self) -> dict[str, Tensor]:
        """The fp32 master weights by parameter name; the `grad` of each is the accumulated gradient."""
        return dict(self._holders)

    def _add_rule(
        self,
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        mark: str,
        names: Collection[str],
        weight_decay: float,
    ) -> None:
        """Add the torch optimizer built by `make`, with the key `mark` always in its states, for the parameters
        `names`: in groups of equal rate, with weight decay for matrices only."""
        groups: dict[tuple[float, float], list[Tensor]] = {}
        for name in names:
            master = self._holders[name]
            decay = weight_decay if master.ndim > 1 else 0.0
            groups.setdefault((self._rate_of(name), decay), []).append(master)
        if groups:
            rule = make(
                [{"params": masters, "rate": rate, "weight_decay": decay} for (rate, decay), masters in groups.items()]
            )
            self._rules.append(rule)
            self._rule_of |= dict.fromkeys(names, (rule, mark))

    def _make_holder(self, live: Tensor) -> Tensor:
        return live.float().clone()

    def _update(self, learning_rate: float) -> None:
        for rule in self._rules:
            for group in rule.param_groups:
                group["lr"] = learning_rate * group["rate"]
            rule.step()

    def _take_values(self) -> Mapping[str, Tensor]:
        return self._holders

    def _weights(self) -> Mapping[str, Tensor]:
        return self._holders

    def _memory_of(self, name: str) -> dict[str, Any]:
        rule, _ = self._rule_of[name]
        return rule.state[self._holders[name]]

    def _mark_of(self, name: str) -> str:
        return self._rule_of[name][1]


def fused_adamw(groups: list[dict[str, Any]], *, betas: tuple[float, float]) -> torch.optim.Optimizer:
    """torch's AdamW on parameter groups, fused on CPU and CUDA."""
    devices = {tensor.device.type for group in groups for tensor in group["params"]}
    return torch.optim.AdamW(groups, betas=betas, eps=ADAM_EPSILON, fused=devices <= {"cpu", "cuda"})


class MasterAdamW(MasterOptimizer):
    """Decoupled weight decay Adam (arXiv 1711.05101) over fp32 copies of all trainable parameters.

    Vectors (norms, biases) are not decayed.
    """

    rule: ClassVar[Any] = staticmethod(fused_adamw)
    """A torch optimizer's class, or a factory of one."""
    mark: ClassVar[str] = "exp_avg"
    """A key always in the rule's states."""

    def __init__(
        self,
        named_parameters: NamedParameters,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        rate_of: RateOf = one_rate,
    ) -> None:
        super().__init__(named_parameters, max_grad_norm, rate_of)
        self._add_rule(partial(self.rule, betas=betas), self.mark, self._holders.keys(), weight_decay)


def local_tensor(tensor: Tensor) -> Tensor:
    """The detached tensor, or this rank's shard of a DTensor."""
    known: Any = tensor
    if not hasattr(known, "to_local"):
        return tensor.detach()
    with torch.no_grad():  # without gradients `to_local` skips DTensor's dispatch
        return known.to_local()


def _move_gradient(holder: Tensor, live: Tensor) -> None:
    """Accumulate a live parameter's new gradient in its holder, in fp32, and free it."""
    if live.grad is None:
        return
    gradient = local_tensor(live.grad)
    if holder.grad is None:
        holder.grad = gradient.float()
    else:
        add_gradient_(holder.grad, gradient)
    live.grad = None


def add_gradient_(total: Tensor, gradient: Tensor) -> None:
    """Add a gradient to the fp32 `total`, in place; large bfloat16 ones on a GPU by a Triton kernel."""
    if gradient.is_cuda and gradient.dtype == torch.bfloat16 and gradient.is_contiguous() and total.is_contiguous():
        from slipstream.trainer.optim import triton_kernels

        if gradient.numel() >= triton_kernels.MIN_ACCUMULATED:
            triton_kernels.accumulate_(total, gradient)
            return
    total.add_(gradient)
