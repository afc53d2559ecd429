"""Pairs of a right answer and one with a mistake, for DPO and a reward model, further ones to hold out, and the same
answers with labels, for KTO.

python examples/preferences/pairs.py [--number 2000] [--folder runs/preferences]
"""

import argparse
import json
import random
from pathlib import Path

from slipstream.config import EnvironmentConfig
from slipstream.envs.registry import load_environment

parser = argparse.ArgumentParser()
parser.add_argument("--number", type=int, default=2000)
parser.add_argument("--folder", type=Path, default=Path("runs/preferences"))
options = parser.parse_args()
options.folder.mkdir(parents=True, exist_ok=True)

settings = {"min_word_len": 3, "max_word_len": 6}
environment = load_environment(EnvironmentConfig(name="reasoning_gym/spell_backward", settings=settings))
draw = random.Random(0)


def pairs_of(split: str, number: int) -> list[dict[str, str]]:
    """A right and a wrong answer to each task, where there are two."""
    found = []
    for task in environment.tasks(split, number):
        right = str(task.answer)
        place = draw.randrange(len(right) - 1)
        wrong = right[:place] + right[place + 1] + right[place] + right[place + 2 :]
        if wrong != right:
            found.append({"prompt": task.prompt[-1].content, "chosen": right, "rejected": wrong})
    return found


pairs, held_out = pairs_of("train", options.number), pairs_of("eval", options.number // 10)
labelled = [
    {"prompt": pair["prompt"], "completion": pair[name], "label": name == "chosen"}
    for pair in pairs
    for name in ("chosen", "rejected")
]
for name, rows in (("pairs", pairs), ("held_out", held_out), ("labelled", labelled)):
    (options.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
