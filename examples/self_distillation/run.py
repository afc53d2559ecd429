"""Self-distillation with a hint: the policy with a hint in its prompt teaches the policy without it.

    python examples/self_distillation/run.py [--seed N] [--hint right|shuffled] [--folder runs/self-distillation]

The task is to replace each of three letters by its neighbour in the alphabet. A small model learns it by SFT in three
forms: with the hint "next", with the hint "last", and without a hint, where either neighbour is right. Then it answers
without a hint, and the same model with the hint "next" scores each of its tokens. No reward is used, and no second
model. The control gets a random hint for each answer.
"""

import argparse
import json
import random
from collections.abc import Iterator
from itertools import chain, product
from pathlib import Path

import slipstream

LETTERS = "abcdefghij"
HINTS = {"next": 1, "last": -1}


def shifted(word: str, by: int) -> str:
    """The letters' neighbours; j is followed by a."""
    return "".join(LETTERS[(LETTERS.index(letter) + by) % len(LETTERS)] for letter in word)


def words(seed: int) -> list[str]:
    """All thousand words of three letters, in an order of their own."""
    found = ["".join(letters) for letters in product(LETTERS, repeat=3)]
    random.Random(seed).shuffle(found)
    return found


def demonstrations(own: list[str], seed: int) -> Iterator[dict[str, str]]:
    """Each word in both forms with a hint, and without one with either answer."""
    draw = random.Random(seed)
    for word in own:
        for hint, by in HINTS.items():
            yield {"prompt": f"{hint}: {word}", "completion": shifted(word, by)}
        yield {"prompt": word, "completion": shifted(word, draw.choice([1, -1]))}


def is_next(task: slipstream.Task, completion: str) -> float:
    """1 for the next letters. Only evaluations use it."""
    return float(completion == task.answer)


def with_hint(s: slipstream.Session, rollout: slipstream.Rollout, hint: str) -> slipstream.Sequence:
    """The same answer after a prompt with the hint."""
    (sequence,) = rollout.sequences
    prompt = s.prompt_tokens(f"{hint}: {rollout.prompt}")
    answer = sequence.token_ids[sequence.mask.index(True) :]
    return slipstream.Sequence(prompt + answer, [False] * len(prompt) + [True] * len(answer))


def teach(s: slipstream.Session, hint: str, draw: random.Random) -> dict[str, float]:
    """One step: each token's advantage is the teacher's log-probability less the policy's own."""
    rollouts = [*chain(*s.rollouts())]
    hints = [hint if hint in HINTS else draw.choice([*HINTS]) for _ in rollouts]
    taught = s.forward([with_hint(s, rollout, each) for rollout, each in zip(rollouts, hints, strict=True)]).logprobs
    for rollout, teacher, own in zip(rollouts, taught, s.forward(rollouts).logprobs, strict=True):
        rollout.sequences[0].streams["advantages"] = slipstream.Stream.of((teacher - own).tolist())
    metrics = s.train(rollouts, "policy_gradient")
    s.sync()
    return metrics


def imitate(own: list[str], options: argparse.Namespace) -> slipstream.Run:
    """SFT of a new model on the demonstrations."""
    return slipstream.sft(
        slipstream.new_model(options.folder / "model", context_length=64, seed=options.seed),
        [*demonstrations(own, options.seed)],
        steps=options.sft_steps,
        training={"prompts_per_batch": 64, "learning_rate": 4e-3, "warmup_steps": options.sft_steps // 20},
        folder=options.folder / "sft",
        seed=options.seed,
    )


def main() -> None:
    """SFT, unless the folder has it, then self-distillation, with the accuracy before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hint", choices=["right", "shuffled"], default="right")
    parser.add_argument("--folder", type=Path, default=Path("runs/self-distillation"))
    parser.add_argument("--sft-steps", type=int, default=400)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    own, held_out = words(options.seed)[200:], words(options.seed)[:200]
    folder = options.folder
    sft = slipstream.load_run(folder / "sft") if (folder / "sft").exists() else imitate(own, options)
    with slipstream.session(
        model=sft.weights,
        tasks=[{"prompt": word, "answer": shifted(word, 1)} for word in own],
        eval_tasks=[{"prompt": word, "answer": shifted(word, 1)} for word in held_out],
        reward=is_next,
        algorithm={"kind": "grpo", "group_size": 2},
        steps=options.steps,
        training={"prompts_per_batch": 64, "learning_rate": 1e-3, "schedule": "linear"},
        sampling={"max_tokens": 8},
        evaluation={"num_tasks": 200},
        folder=folder / options.hint,
        seed=options.seed,
    ) as s:
        draw = random.Random(options.seed)
        before = s.evaluate()
        for step in range(options.steps):
            metrics = teach(s, "next" if options.hint == "right" else "", draw)
            print(f"step {step + 1}: reward {metrics['reward/mean']:.2f}", flush=True)
        after = s.evaluate()
        s.save()
    names = ("eval/accuracy", "eval/accuracy_low", "eval/accuracy_high")
    print(json.dumps({"hint": options.hint, "before": [before[n] for n in names], "after": [after[n] for n in names]}))


if __name__ == "__main__":
    main()
