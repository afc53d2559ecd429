"""GRPO, and a cross-entropy on the gold answer of each task that no rollout of its group solved."""

from slipstream import Algorithm, LossTerm, Message, Rollout, Sequence, Stream


class GoldAnswers(Algorithm):
    """Adds `weight` times the mean cross-entropy of these answers. Advantages stay the recipe's."""

    def __init__(self, weight: float = 0.5) -> None:
        self.weight = weight

    def credit(self, group: list[Rollout]) -> None:
        """The first sequence of an unsolved group carries the answer's tokens, repeated for each of its own."""
        if all(rollout.reward < 1.0 for rollout in group):
            turns = [Message("user", group[0].prompt), Message("assistant", group[0].answer)]
            taught = self.tokenizer.training_tokens(turns, "last")
            answer = taught.token_ids[taught.mask.index(True) :]
            first = group[0].sequences[0]
            first.streams["gold"] = Stream.of(answer * first.num_trainable, "int64", len(answer))

    def terms(self, sequences: list[Sequence]) -> list[LossTerm]:
        """The answers behind the prompts of their tasks."""
        gold = [answered(each, each.streams["gold"]) for each in sequences if "gold" in each.streams]
        return [LossTerm("gold", gold, self.weight)]


def answered(sequence: Sequence, gold: Stream) -> Sequence:
    """The prompt of a sequence with another answer."""
    prompt = sequence.token_ids[: sequence.mask.index(True)]
    answer = [int(token) for token in gold.tolist()[: gold.width]]
    return Sequence(prompt + answer, [False] * len(prompt) + [True] * len(answer))
