"""AdamW on fp32 masters of the live parameters, in two halves: the maths, then the write to the live weights.

Guarantees: gradients of any dtype are added up in fp32 after each micro-batch; updates far below the live
dtype's resolution are not lost; a gradient that is zero or not finite raises instead of being applied;
`load_state` continues bit for bit. When to step, and at what rate, is the caller's business.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from slipstream.errors import TrainingError, ZeroGradientError

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class OptimStats:
    """What one optimizer step did."""

    learning_rate: float
    grad_norm: float
    """Global norm before clipping."""
    clipped: bool


def learning_rate_at(
    step: int,
    *,
    peak: float,
    schedule: Literal["constant", "linear", "cosine"] = "constant",
    warmup_steps: int = 0,
    num_steps: int,
) -> float:
    """Learning rate of optimizer step `step`, counted from 0.

    Rises linearly to `peak` over `warmup_steps`, the first step included; then stays, or decays so that it
    would be zero at step `num_steps`, the first that is no longer made.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    if schedule == "linear":
        return peak * (1.0 - progress)
    if schedule == "cosine":
        return peak * 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak


class MasterAdamW:
    """Decoupled weight decay Adam (arXiv 1711.05101) over fp32 copies of all trainable parameters.

    Vectors (norms, biases) are not decayed. A tied parameter has one master, under its first name. Each
    parameter's gradient moves to its master as soon as backward has made it.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
    ) -> None:
        self.max_grad_norm = max_grad_norm
        self.step = 0
        """Optimizer steps made so far."""
        self._prepared = False
        self._live: dict[str, nn.Parameter] = {}
        seen: set[int] = set()
        for name, parameter in named_parameters:
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                self._live[name] = parameter
        if not self._live:
            raise TrainingError("the model has no trainable parameter: check what was frozen")
        self._masters = {name: live.detach().float().clone() for name, live in self._live.items()}
        decayed = [master for master in self._masters.values() if master.ndim > 1]
        kept = [master for master in self._masters.values() if master.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
        devices = {master.device.type for master in self._masters.values()}
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            betas=betas,
            eps=eps,
            fused=devices <= {"cpu", "cuda"},
        )
        for name, live in self._live.items():
            live.register_post_accumulate_grad_hook(partial(_move_gradient, self._masters[name]))

    def prepare(self, learning_rate: float) -> OptimStats:
        """Clip the accumulated gradient to `max_grad_norm` and update the masters; live weights stay as they
        are.

        Raises TrainingError when the gradient is not finite, and ZeroGradientError when it is zero; nothing has then
        been changed.
        """
        gradients = [master.grad for master in self._masters.values() if master.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients).item() if gradients else 0.0
        if norm == 0.0:
            raise ZeroGradientError(
                f"optimizer step {self.step} has a gradient that is zero or not finite: it is zero in all "
                f"{len(self._masters)} parameters, {next(iter(self._masters))} among them, because the batch "
                "teaches nothing (equal rewards?); skip the step"
            )
        if not math.isfinite(norm):
            raise TrainingError(self._explain(norm))
        clipped = norm > self.max_grad_norm
        if clipped:
            torch._foreach_mul_(gradients, self.max_grad_norm / (norm + 1e-6))
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self._prepared = True
        self.step += 1
        return OptimStats(learning_rate, norm, clipped)

    @torch.no_grad()
    def commit(self) -> None:
        """Write the masters to the live weights, rounded to their dtype. Only after `prepare`."""
        if not self._prepared:
            raise TrainingError("optim_commit without optim_prepare: there is no update to write")
        torch._foreach_copy_(list(self._live.values()), list(self._masters.values()))
        self._prepared = False

    def masters(self) -> dict[str, Tensor]:
        """The fp32 masters by parameter name; `.grad` of each is what was accumulated so far."""
        return dict(self._masters)

    def discard_gradients(self) -> None:
        """Forget what was accumulated since the last step."""
        self._adamw.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Everything that `load_state` needs, as tensors: `master.NAME`, `exp_avg.NAME`,
        `exp_avg_sq.NAME`, `step`."""
        if self._prepared:
            raise TrainingError("the optimizer's state was asked for between optim_prepare and optim_commit")
        tensors: dict[str, Tensor] = {"step": torch.tensor(self.step)}
        for name, master in self._masters.items():
            tensors[f"master.{name}"] = master
            moments = self._adamw.state.get(master, {})
            for key in _MOMENTS:
                if key in moments:
                    tensors[f"{key}.{name}"] = moments[key]
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Take over `state()` of another optimizer for the same parameters; live weights are written too."""
        saved = {key.removeprefix("master.") for key in tensors if key.startswith("master.")}
        if saved != set(self._masters):
            names = sorted(saved ^ set(self._masters))
            raise TrainingError(f"the saved optimizer state is for another model: {names[0]} is in only one of them")
        self.step = int(tensors["step"])
        for name, master in self._masters.items():
            master.copy_(tensors[f"master.{name}"])
            if f"exp_avg.{name}" not in tensors:
                self._adamw.state.pop(master, None)
                continue
            state: dict[str, Any] = self._adamw.state[master]
            # A fused AdamW keeps its step count as a float32 tensor beside the parameter.
            state["step"] = torch.tensor(float(self.step), dtype=torch.float32, device=master.device)
            for key in _MOMENTS:
                state[key] = tensors[f"{key}.{name}"].to(master.device, torch.float32, copy=True)
        self.discard_gradients()
        self._prepared = True
        self.commit()

    def _explain(self, norm: float) -> str:
        """Which gradient is bad, in one sentence."""
        counts = {
            name: int((~torch.isfinite(master.grad)).sum())
            for name, master in self._masters.items()
            if master.grad is not None
        }
        worst = max(counts, key=lambda name: counts[name])
        if not counts[worst]:
            return f"optimizer step {self.step} has a gradient whose norm is {norm}: lower the learning rate"
        return (
            f"optimizer step {self.step} has a gradient that is zero or not finite: {counts[worst]} of "
            f"{self._masters[worst].numel()} values of {worst} are NaN or infinite"
        )


def _move_gradient(master: Tensor, live: Tensor) -> None:
    """Add a live parameter's fresh gradient to its master's, in fp32, and free it."""
    gradient = live.grad
    if gradient is None:
        return
    if master.grad is None:
        master.grad = gradient.float()
    else:
        master.grad.add_(gradient)
    live.grad = None
