"""What [preferences] does in a run: judged rows, weights of completions before each optimizer step, and the loss."""

from __future__ import annotations

from torch import Tensor

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
    token_statistics,
)
from slipstream_preferences.rows import labelled, pair
from slipstream_preferences.settings import PreferencesConfig
from slipstream_preferences.weights import held_out_metrics, weigh


class Preferences(Method):
    """See `Method`."""

    section: PreferencesConfig

    def conversation(self, row: Row, columns: Columns) -> tuple[Conversation, set[str]]:
        """A pair, or a completion with its label."""
        return pair(row, columns) if self.section.reads_pairs else labelled(row, columns)

    def objective(self, tokenizer: ChatTokenizer) -> WeightedLikelihood:
        """The likelihood of completions by their weights."""
        return WeightedLikelihood()

    def before_update(self, step: StepBatch, learner: Learner, reference: Scorer | None) -> dict[str, float]:
        """Weigh the completions."""
        assert reference is not None
        return weigh(step, self.section, learner, reference)

    def held_out(self, examples: Examples, learner: Learner, reference: Scorer | None) -> dict[str, float]:
        """The loss, and shares of right order."""
        assert reference is not None
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
