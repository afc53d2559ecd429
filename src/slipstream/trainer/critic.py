"""The critic of PPO: the start model with a value head, to predict the return before each token.

Guarantees: it uses the same micro-batches as the policy, with packed rows and shared prompts: the split of a step
changes rounding only. It never shares weights with the policy. Training continues bit for bit after `save` and
`load`. `credit_assignment.py` turns its values into advantages.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream import records
from slipstream.algo.gae import value_loss
from slipstream.config.planned import PlannedCritic
from slipstream.errors import ConfigError, TrainingError, ZeroGradientError
from slipstream.trainer.learner import Learner
from slipstream.trainer.loss import OneForward
from slipstream.trainer.model.policy import Form, PolicyModel
from slipstream.trainer.packing import MicroBatch, StepBatch

VALUE_HEAD, SCORE_HEAD = "value_head", "score"
"""Names of the head of a critic and of a reward model in their networks."""


class ValueModel(PolicyModel):
    """A policy's trunk, with its adapter, and a linear head with one output: `logits` gives `[N, 1]`.

    The head is in float32. A critic's starts at zero. Before the first update all values are then 0, and advantages are
    the discounted rewards.
    """

    head_name = VALUE_HEAD

    def __init__(self, policy: PolicyModel) -> None:
        """Takes over `policy`: its network loses its LM head."""
        network: Any = policy.network
        super().__init__(network, policy.folder, packing=policy.packing)
        self.adapter, self.layers, self.images = policy.adapter, policy.layers, policy.images
        old_head = network.get_output_embeddings()
        if network.base_model is network or old_head is None:
            raise ConfigError(
                f"{type(network).__name__} cannot be told from its output head, and a critic or reward model needs its "
                "trunk alone: use another model"
            )
        self._trunk: nn.Module = network.base_model
        dtype = torch.promote_types(policy.dtype, torch.float32)
        has_bias = self.head_name == VALUE_HEAD
        self._head = nn.Linear(old_head.weight.shape[1], 1, has_bias, device=policy.device, dtype=dtype)
        self._start()
        network.set_output_embeddings(nn.Identity())
        network.add_module(self.head_name, self._head)

    def _start(self) -> None:
        nn.init.zeros_(self._head.weight)
        nn.init.zeros_(self._head.bias)

    def use_fp32_head(self) -> None:
        """The head is in float32 already."""

    @property
    def roots(self) -> list[nn.Module]:
        """See the base."""
        return [self._trunk, self._head]

    def _logits(self, row: MicroBatch) -> Tensor:
        if row.images:
            hidden_ND = self.within(lambda: self.forward(self.embed(row), row)[row.predict_index_N])
            return self._head(hidden_ND.to(self._head.weight.dtype))
        token_ids_T, position_ids_T, predict_index_N = row.inputs
        output = self._trunk(
            input_ids=token_ids_T[None], position_ids=position_ids_T[None], use_cache=False, **self._of_row(row)
        )
        values_N1 = self._head(output.last_hidden_state[0, predict_index_N].to(self._head.weight.dtype))
        return values_N1 if row.shard is None else row.shard.join(values_N1, len(row.target_ids_N))


class RewardModel(ValueModel):
    """A model of `AutoModelForSequenceClassification` with one label: the same names, and the same start of the head.
    An adapter is merged in where it is saved."""

    head_name = SCORE_HEAD

    def __init__(self, policy: PolicyModel, pad_token_id: int | None) -> None:
        """`pad_token_id`: of the saved configuration; transformers passes over it and scores the token before."""
        super().__init__(policy)
        self._pad_token_id = pad_token_id

    def _start(self) -> None:
        settings = self.config.get_text_config()
        nn.init.normal_(self._head.weight, std=getattr(settings, "initializer_range", 0.02))

    @property
    def form(self) -> Form:
        """See the base."""
        name = type(self.network).__name__.replace("ForCausalLM", "ForSequenceClassification")
        labels = {"id2label": {"0": "reward"}, "label2id": {"reward": 0}}
        return Form(None, {"architectures": [name], "pad_token_id": self._pad_token_id, **labels})


class ValueObjective(OneForward):
    """The mean of `algo.gae.value_loss` over all trainable tokens of the step."""

    ignores_silent = False

    def __init__(self, clip: float) -> None:
        self._clip = clip

    def counts(self, batch: StepBatch) -> dict[str, float]:
        """Trainable tokens."""
        return {"tokens": float(batch.num_tokens)}

    def terms(
        self, model: PolicyModel, micro: MicroBatch, divisors: dict[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See the class; raises TrainingError when a sequence has no targets."""
        old_values_N, returns_N = micro.streams.get("old_values"), micro.streams.get("returns")
        if old_values_N is None or returns_N is None:
            raise TrainingError("a sequence teaches the critic nothing: give each the streams old_values and returns")
        logits_N1 = model.logits(micro)
        assert isinstance(logits_N1, Tensor)
        values_N = logits_N1[:, 0]
        loss_N, clipped_N = value_loss(values_N, old_values_N, returns_N, self._clip)
        loss = loss_N.sum() / divisors["tokens"]
        return loss, {"loss": loss.detach(), "clip_fraction": clipped_N.sum()}

    def summarize(self, sums: dict[str, Tensor], divisors: dict[str, float]) -> dict[str, float]:
        """`loss`, and `clip_fraction` of the tokens."""
        return {"loss": sums["loss"].item(), "clip_fraction": sums["clip_fraction"].item() / divisors["tokens"]}


class Critic:
    """Computes values, and trains them towards the returns; `learner` trains a `ValueModel`."""

    def __init__(self, learner: Learner, config: PlannedCritic) -> None:
        self.learner = learner
        self.config = config
        self._objective = ValueObjective(config.value_clip)

    def values(self, batch: records.Batch) -> list[list[Tensor]]:
        """Per rollout and sequence, the values before each trainable token, `[N]`; float32 on the CPU."""
        values_of = iter(self.learner.values([s for rollout in batch.rollouts for s in rollout.sequences]))
        return [[next(values_of) for _ in rollout.sequences] for rollout in batch.rollouts]

    def train(self, steps: Sequence[StepBatch]) -> dict[str, float]:
        """Make the batch's optimizer steps; returns their mean metrics. Steps with a zero gradient are skipped and
        counted."""
        rows: list[dict[str, float]] = []
        for step in steps:
            metrics = self.learner.forward_backward(step, self._objective)
            try:
                stats = self.learner.optim_prepare(self.config.learning_rate)
            except ZeroGradientError:
                self.learner.optimizer.discard_gradients()
                continue
            self.learner.optim_commit()
            kept = {f"value/{name}": metrics[name] for name in ("loss", "clip_fraction")}
            rows.append(kept | {"value/grad_norm": stats.grad_norm, "value/learning_rate": stats.learning_rate})
        means = {name: statistics.fmean(row[name] for row in rows) for name in rows[0]} if rows else {}
        return means | {"value/skipped_updates": float(len(steps) - len(rows))}

    def save(self, folder: Path) -> None:
        """Write the resume state into `folder`."""
        self.learner.save(folder)

    def load(self, folder: Path) -> None:
        """Load what `save` wrote."""
        self.learner.load(folder)
