"""GRPO, and cross-entropy on the gold answer of each task that no completion of its group solved.

python gold.py MODEL FOLDER [STEPS]
"""

import random
import sys

import slipstream
from slipstream import Algorithm, LossTerm, Rollout, Sequence, Stream
from slipstream.envs import Message, split_of
from slipstream.plugins import ChatTokenizer


class Gold(Algorithm):
    """Adds `weight` times the mean cross-entropy of the gold answers of unsolved tasks."""

    def __init__(self, model: str, weight: float = 0.5) -> None:
        self.tokenizer = ChatTokenizer(model)
        self.weight = weight

    def credit(self, group: list[Rollout]) -> None:
        """The first sequence of an unsolved group carries the answer's tokens. Advantages stay the recipe's."""
        if unsolved(group):
            sequence = group[0].sequences[0]
            tokens = self.answer_tokens(group[0].prompt, group[0].answer)
            sequence.streams["gold"] = Stream.of(tokens * sequence.num_trainable, "int64", len(tokens))

    def answer_tokens(self, prompt: str, answer: str) -> list[int]:
        """What SFT would train on: the answer and the end of the turn."""
        taught = self.tokenizer.training_tokens([Message("user", prompt), Message("assistant", answer)], "last")
        return taught.token_ids[taught.mask.index(True) :]

    def terms(self, sequences: list[Sequence]) -> list[LossTerm]:
        """The answers behind the prompts of their tasks."""
        gold = [behind_prompt(each, each.streams["gold"]) for each in sequences if "gold" in each.streams]
        return [LossTerm("gold", gold, self.weight)]

    def metrics(self, rollouts: list[Rollout]) -> dict[str, float]:
        """Solved and unsolved groups of a batch, and the answers that are trained on."""
        groups: dict[str, list[Rollout]] = {}
        for rollout in rollouts:
            groups.setdefault(rollout.group_id, []).append(rollout)
        carried = sum("gold" in each.streams for rollout in rollouts for each in rollout.sequences)
        bad = sum(map(unsolved, groups.values()))
        return {"unsolved_groups": bad, "solved_groups": len(groups) - bad, "gold_answers": carried}


def unsolved(group: list[Rollout]) -> bool:
    return all(rollout.reward < 1.0 for rollout in group)


def behind_prompt(sequence: Sequence, gold: Stream) -> Sequence:
    prompt = sequence.token_ids[: sequence.mask.index(True)]
    answer = [int(token) for token in gold.tolist()[: gold.width]]
    return Sequence(prompt + answer, [False] * len(prompt) + [True] * len(answer))


def tasks(split, num_tasks, seed):
    draw = random.Random(seed)
    words = dict.fromkeys("".join(draw.choices("abcdefgh", k=draw.choice([3, 4]))) for _ in range(20 * num_tasks))
    mine = [word for word in words if split_of(word) == split]
    return [{"prompt": f"Reverse: {word}", "answer": word[::-1]} for word in mine[:num_tasks]]


def reward(task, completion):
    return float(completion == task.answer)


def main(model: str, folder: str, steps: str = "4") -> None:
    run = slipstream.train(
        model,
        tasks,
        reward,
        steps=int(steps),
        algorithm={"kind": "grpo", "group_size": 8, "hooks": f"{__file__}:Gold", "arguments": {"model": str(model)}},
        training={"prompts_per_batch": 16, "learning_rate": 1e-3},
        environment={"num_train_tasks": 500},
        sampling={"max_tokens": 8},
        evaluation=False,
        folder=folder,
    )
    print(run)
    names = ["reward/mean", "custom/solved_groups", "custom/unsolved_groups", "custom/gold_answers", "term/gold"]
    for row in run.rows:
        print(row["step"], {name: row.get(name) for name in names})


if __name__ == "__main__":
    main(*sys.argv[1:])
