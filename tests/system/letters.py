"""A task for tests: say the letter. The reward says 1 for it, 0 for anything else; with `coin` it alternates. It takes
`pause` seconds."""

import itertools
import time

_coin = itertools.cycle((0.0, 1.0))


def tasks(split, num_tasks, seed, size=64, lengths=(1,), letters="a", coin=False, held_out=True, pause=0.0):
    rows = []
    if split == "eval" and not held_out:
        return rows
    for i in range(min(num_tasks, size)):
        padding = "." * lengths[i % len(lengths)]
        # Nothing in the prompt gives the letter away to a model that was trained for some seconds.
        answer = letters[(i * i // 7) % len(letters)]
        rows.append({"prompt": f"{split} {i}{padding}", "answer": answer, "coin": coin, "pause": pause})
    return rows


def reward(task, completion):
    time.sleep(task.info["pause"])
    return next(_coin) if task.info["coin"] else float(completion == task.answer)
