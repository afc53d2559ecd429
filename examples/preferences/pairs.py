"""Pairs of a right answer and one with a mistake, for DPO, and the same answers with labels, for KTO.

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
draw, pairs, labelled = random.Random(0), [], []
for task in environment.tasks("train", options.number):
    prompt, right = task.prompt[-1].content, str(task.answer)
    place = draw.randrange(len(right) - 1)
    wrong = right[:place] + right[place + 1] + right[place] + right[place + 2 :]
    if wrong != right:
        pairs.append({"prompt": prompt, "chosen": right, "rejected": wrong})
        labelled += [{"prompt": prompt, "completion": text, "label": text == right} for text in (right, wrong)]
for name, rows in (("pairs", pairs), ("labelled", labelled)):
    (options.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
