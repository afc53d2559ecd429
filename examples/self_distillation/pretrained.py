"""Self-distillation of SmolLM2-135M on sums: the policy after four solved sums teaches the policy without them.

    pip install gguf
    python examples/pretrained/model.py smollm2 models/smollm2
    python examples/self_distillation/pretrained.py [--seed N] [--hint right|shuffled]

It needs a GPU. The tasks are those of `examples/pretrained/sums.toml`. `98 + 93 =` alone is continued by a text, and
no answer is right. After four solved sums an answer is a number, and some are right. The start model answers after the
hint, and learns these answers without it. So far from the hinted policy, its own answers would teach it little. No
reward is used. The control has the words of the four sums in a random order.
"""

import argparse
import json
import random
from itertools import chain
from pathlib import Path

import slipstream

ARITHMETIC = Path(__file__).resolve().parents[1] / "pretrained" / "arithmetic.py"


def solved(tasks: list[slipstream.Task], hint: str, draw: random.Random) -> list[slipstream.Message]:
    """Four solved tasks, or their words in a random order."""
    chosen = [(task.prompt[0].content, str(task.answer)) for task in draw.sample(tasks, 4)]
    if hint == "right":
        return [
            slipstream.Message(role, text)
            for pair in chosen
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
    words = " ".join(" ".join(pair) for pair in chosen).split()
    draw.shuffle(words)
    return [slipstream.Message("user", " ".join(words) + "\n")]


def answers(
    s: slipstream.Session, tasks: list[slipstream.Task], hint: list[slipstream.Message], num_each: int
) -> list[slipstream.Sequence]:
    """Answers that the engine gives after the hint, behind prompts without it."""
    questions = {task.id: task.prompt[0] for task in tasks}
    hinted = [{"id": task.id, "prompt": [*hint, *task.prompt], "answer": task.answer} for task in tasks]
    found: list[slipstream.Sequence] = []
    for rollout in chain(*s.rollouts(hinted, num_each)):
        (sequence,) = rollout.sequences
        prompt = s.prompt_tokens([questions[rollout.task_id]])
        answer = sequence.token_ids[sequence.mask.index(True) :]
        found.append(slipstream.Sequence(prompt + answer, [False] * len(prompt) + [True] * len(answer)))
    return found


def main() -> None:
    """Self-distillation, with the held-out accuracy before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hint", choices=["right", "shuffled"], default="right")
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--folder", type=Path, default=Path("runs/self-distillation-sums"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tasks", type=int, default=512, help="held-out tasks")
    options = parser.parse_args()
    with slipstream.session(
        model=options.model,
        environment={"name": str(ARITHMETIC)},
        steps=options.steps,
        training={"learning_rate": 1e-4, "schedule": "linear"},
        sampling={"max_tokens": 8},
        evaluation={"num_tasks": options.tasks},
        inference={"max_model_len": 128, "kv_cache_gib": 2.0, "enforce_eager": True},
        folder=options.folder / f"{options.hint}-{options.seed}",
        seed=options.seed,
    ) as s:
        draw = random.Random(options.seed)
        hint, before = solved(s.tasks, options.hint, draw), s.evaluate()
        taught = answers(s, draw.sample(s.tasks, min(4096, len(s.tasks))), hint, 4)
        for step in range(options.steps):
            metrics = s.train(draw.sample(taught, min(256, len(taught))), "sft")
            if step % 10 == 9:
                print(f"step {step + 1}: loss {metrics['train/loss']:.2f}", flush=True)
        s.sync()
        after = s.evaluate()
        s.save()
    names = ("eval/accuracy", "eval/accuracy_low", "eval/accuracy_high")
    print(json.dumps({"hint": options.hint, "before": [before[n] for n in names], "after": [after[n] for n in names]}))


if __name__ == "__main__":
    main()
