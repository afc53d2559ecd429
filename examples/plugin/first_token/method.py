"""Sequences with a stream of weights, and the loss that reads it."""

from slipstream.plugins import Examples, Method, OneForward, token_statistics
from slipstream.records import Message


class WeightedFirst(Method):
    """See `slipstream.plugins.Method`."""

    def conversations(self, tasks, max_turns):
        """Each task with its answer."""
        return [[*task.prompt, Message("assistant", task.answer)] for task in tasks]

    def examples(self, tasks, tokenizer, limit):
        """The same as tokens."""
        examples = Examples()
        for conversation in self.conversations(tasks, 1):
            sequence = tokenizer.training_tokens(conversation, "last")
            first = sequence.mask.index(True)
            sequence.put("weights", [self.section.weight if place == first else 1.0 for place in range(len(sequence))])
            examples.append(sequence)
        return examples

    def objective(self, tokenizer):
        """The weighted mean of cross-entropies."""
        return WeightedCrossEntropy()


class WeightedCrossEntropy(OneForward):
    """See `slipstream.plugins.Objective`."""

    ignores_silent = False

    def counts(self, batch):
        """Divisors of the whole optimizer step."""
        weights = sum(sum(sequence.values("weights")) for sequence in batch.sequences)
        return {"tokens": float(batch.num_tokens), "weights": weights}

    def terms(self, model, micro, divisors):
        """A row's part of the loss."""
        logprobs_N, _, _ = token_statistics(model.logits(micro), micro.target_ids_N)
        loss = -(logprobs_N * micro.streams["weights"]).sum() / divisors["weights"]
        return loss, {"loss": loss.detach()}

    def summarize(self, sums, divisors):
        """The step's metrics."""
        return {"loss": sums["loss"].item(), "num_tokens": divisors["tokens"]}
