"""Solved tasks of an environment beside this file, for SFT.

python examples/pretrained/demonstrations.py chains runs/pretrained/chains.jsonl
python examples/pretrained/demonstrations.py word_problems runs/pretrained/word_problems.jsonl
"""

import json
import sys
from functools import partial
from pathlib import Path

import arithmetic
import word_problems

TASKS = {"chains": partial(arithmetic.tasks, task="chains"), "word_problems": word_problems.tasks}
NUM_TASKS = 10_000
SEED = 1234
"""Another seed than that of the runs after it."""

if __name__ == "__main__":
    path = Path(sys.argv[2])
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = TASKS[sys.argv[1]]("train", NUM_TASKS, SEED)
    path.write_text("".join(json.dumps({"prompt": row["prompt"], "completion": row["answer"]}) + "\n" for row in rows))
    print(f"{len(rows)} solved tasks in {path}")
