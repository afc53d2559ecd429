"""Self-play of two models: matching pennies. An answer is heads or tails by the parity of its characters. The matcher
wins if both answers are equal, and the hider if they differ.

python examples/algorithms/self_play.py runs/quickstart/sft --folder runs/self-play
"""

import argparse
from itertools import chain

import slipstream


def session(model: str, folder: str, steps: int, seed: int) -> slipstream.Session:
    """A player. The game gives the rewards."""
    return slipstream.session(
        model=model,
        tasks=[{"prompt": f"round {number}: heads or tails?"} for number in range(400)],
        reward=no_reward,
        algorithm={"kind": "rloo", "group_size": 8},
        steps=steps,
        training={"prompts_per_batch": 4, "learning_rate": 1e-3},
        sampling={"max_tokens": 8},
        evaluation=False,
        run={"threads": 1},
        folder=folder,
        seed=seed,
        progress=False,
    )


def no_reward(task, completion):
    return 0.0


def side(rollout: slipstream.Rollout) -> int:
    return sum(map(ord, rollout.completion)) % 2


def main(model: str, folder: str, steps: int) -> None:
    """Both train on the same games."""
    with session(model, f"{folder}/matcher", steps, 0) as matcher, session(model, f"{folder}/hider", steps, 1) as hider:
        while matcher.step < steps:
            tasks = matcher.tasks[matcher.step % 90 * 4 :][:4]
            matched, hidden = matcher.rollouts(tasks), hider.rollouts(tasks)
            for ours, theirs in zip(chain(*matched), chain(*hidden), strict=False):
                ours.reward = float(side(ours) == side(theirs))
                theirs.reward = 1.0 - ours.reward
            won = matcher.train(matched)["reward/mean"]
            hider.train(hidden)
            matcher.sync()
            hider.sync()
            print(f"step {matcher.step}: the matcher won {won:.0%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--folder", default="runs/self-play")
    parser.add_argument("--steps", type=int, default=20)
    main(**vars(parser.parse_args()))
