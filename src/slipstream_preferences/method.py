"""The work of [preferences] in a run: judged rows, weights of completions before each optimizer step, and the loss."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.plugins import (
    ChatTokenizer,
    Columns,
    Conversation,
    Examples,
    Learner,
    Method,
    MicroBatch,
    OneForward,
    PolicyModel,
    Row,
    Scorer,
    StepBatch,
    TrainOn,
    token_statistics,
)
from slipstream.records import Message
from slipstream.records import Sequence as TokenSequence
from slipstream_preferences.rows import labelled, pair
from slipstream_preferences.settings import PreferencesConfig
from slipstream_preferences.weights import held_out_metrics, weigh

_NO_CLASS = (
    "has no class for sequence classification in transformers, as which a reward model is saved: use another model"
)


class Preferences(Method):
    """See `Method`."""

    section: PreferencesConfig

    def check_tokenizer(self, tokenizer: ChatTokenizer) -> None:
        """Raises `ConfigError` for a model without a class for rewards."""
        if not self.section.scores:
            return
        from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as KNOWN

        kind = json.loads((Path(tokenizer.path) / "config.json").read_text(encoding="utf-8"))["model_type"]
        if kind not in KNOWN:
            raise ConfigError(f"model.path = {tokenizer.path}: a model of type {kind} {_NO_CLASS}")

    def conversation(self, row: Row, columns: Columns) -> tuple[Conversation, set[str]]:
        """A pair, or a completion with its label."""
        return pair(row, columns) if self.section.reads_pairs else labelled(row, columns)

    def tokens(self, conversation: Sequence[Message], tokenizer: ChatTokenizer, train_on: TrainOn) -> TokenSequence:
        """Under `reward` the whole conversation; the token after it, repeated, has the score as its prediction."""
        if not self.section.scores:
            return tokenizer.training_tokens(conversation, train_on)
        turns = [msgspec.structs.replace(turn, carries_loss=True) for turn in conversation]
        found = tokenizer.training_tokens(turns, "everything")
        mask = [False] * len(found) + [True]
        return TokenSequence([*found.token_ids, found.token_ids[-1]], mask, media=found.media)

    def objective(self, tokenizer: ChatTokenizer) -> WeightedLikelihood | WeightedScores:
        """The likelihood of completions, or their scores, by their weights."""
        return WeightedScores() if self.section.scores else WeightedLikelihood()

    def before_update(self, step: StepBatch, learner: Learner, reference: Scorer | None) -> dict[str, float]:
        """Weigh the completions."""
        return weigh(step, self.section, learner, reference)

    def held_out(self, examples: Examples, learner: Learner, reference: Scorer | None) -> dict[str, float]:
        """The loss, and shares of right order."""
        return held_out_metrics(examples, self.section, learner, reference)


class WeightedLikelihood(OneForward):
    """The negative sum of log-probabilities, each times the stream `advantages`. The gradient is the step's own, by the
    derivatives of `weights.weigh`."""

    ignores_silent = False

    def counts(self, batch: StepBatch) -> dict[str, float]:
        """Trainable tokens."""
        return {"tokens": float(batch.num_tokens)}

    def terms(
        self, model: PolicyModel, micro: MicroBatch, divisors: dict[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """In float32."""
        logprobs_N, entropy_N, greedy_N = token_statistics(model.logits(micro), micro.target_ids_N)
        loss = -(micro.streams["advantages"] * logprobs_N).sum()
        right = (greedy_N == micro.target_ids_N).sum()
        return loss, {"entropy": entropy_N.detach().sum(), "token_accuracy": right}

    def summarize(self, sums: dict[str, Tensor], divisors: dict[str, float]) -> dict[str, float]:
        """`entropy`, and `token_accuracy` of greedy prediction; `weigh` has the loss."""
        tokens = divisors["tokens"]
        return {"num_tokens": tokens} | {key: value.item() / tokens for key, value in sums.items()}


class WeightedScores(OneForward):
    """The negative sum of a reward model's scores, each times the stream `advantages`."""

    ignores_silent = False

    def counts(self, batch: StepBatch) -> dict[str, float]:
        """Scores."""
        return {"scores": float(batch.num_tokens)}

    def terms(
        self, model: PolicyModel, micro: MicroBatch, divisors: dict[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """In float32."""
        scores_N1 = model.logits(micro)
        assert isinstance(scores_N1, Tensor)
        return -(micro.streams["advantages"] * scores_N1[:, 0]).sum(), {}

    def summarize(self, sums: dict[str, Tensor], divisors: dict[str, float]) -> dict[str, float]:
        """`weigh` has the loss."""
        return {"num_sequences": divisors["scores"]}
