"""Expert iteration in rounds: many answers to each task, the shortest right one of each, and SFT on these.

python examples/algorithms/best_of_n.py examples/quickstart/grpo.toml --folder runs/best-of-n
"""

import argparse

import slipstream


def best_answers(groups: list[list[slipstream.Rollout]]) -> list[slipstream.Rollout]:
    """The shortest right answer of each group with any."""
    right = [[rollout for rollout in group if rollout.reward >= 1.0] for group in groups]
    return [min(group, key=lambda rollout: rollout.num_sampled) for group in right if group]


def main(run_file: str, folder: str, rounds: int, tasks: int, answers: int, size: int) -> None:
    """Each round begins with the weights of the last one."""
    with slipstream.session(run_file, folder=folder) as s:
        s.resume()
        for number in range(s.state.get("rounds", 0), rounds):
            chosen = [s.tasks[place % len(s.tasks)] for place in range(number * tasks, (number + 1) * tasks)]
            best = best_answers(s.rollouts(chosen, answers))
            for start in range(0, len(best), size):
                s.train(best[start : start + size], "sft")
            s.sync()
            print(f"round {number + 1}: {len(best)} of {tasks} tasks solved, step {s.step}")
            s.state["rounds"] = number + 1
            if best:
                s.save()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("run_file")
    parser.add_argument("--folder")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--size", type=int, default=16, help="answers of an optimizer step")
    main(**vars(parser.parse_args()))
