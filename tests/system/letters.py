"""A task for tests: say the letter. The reward says 1 for it, 0 for anything else; with `coin` it alternates, with
`parity` it follows from what was said. It takes `pause` seconds, and half a second where the run is held: see `Held` in
`conftest.py`."""

import itertools
import time
from pathlib import Path

_coin = itertools.cycle((0.0, 1.0))


def tasks(
    split,
    num_tasks,
    seed,
    size=64,
    lengths=(1,),
    letters="a",
    coin=False,
    held_out=True,
    pause=0.0,
    parity=False,
    held=None,
):
    rows = []
    if split == "eval" and not held_out:
        return rows
    for i in range(min(num_tasks, size)):
        padding = "." * lengths[i % len(lengths)]
        # Nothing in the prompt gives the letter away to a model that was trained for some seconds.
        answer = letters[(i * i // 7) % len(letters)]
        how = {"coin": coin, "pause": pause, "parity": parity, "held": held}
        rows.append({"prompt": f"{split} {i}{padding}", "answer": answer, **how})
    return rows


def reward(task, completion):
    time.sleep(task.info["pause"])
    if held := task.info["held"]:
        until = time.monotonic() + 0.5
        while time.monotonic() < until and _num_rows(held["metrics"]) >= held["rows"] and not Path(held["go"]).exists():
            time.sleep(0.02)
    if task.info["parity"]:
        return float(sum(map(ord, completion)) % 2)
    return next(_coin) if task.info["coin"] else float(completion == task.answer)


def _num_rows(metrics):
    return Path(metrics).read_bytes().count(b"\n") if Path(metrics).exists() else 0
