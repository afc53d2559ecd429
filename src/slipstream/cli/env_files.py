"""The files that `slipstream env new` writes: a working folder of an environment of one's own.

Its run files are those of `slipstream init`. The environment reads its tasks from a file, as one of one's own mostly
does.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping

from slipstream.cli.init_files import COMMANDS, RL, SFT

_NUM_ROWS, _NUM_DIGITS = 2000, 4
ENVIRONMENT = '''"""The task: sort digits. Questions and answers are rows of tasks.jsonl; replace both by your own."""

import json
from pathlib import Path

from slipstream.envs import split_of

ROWS = Path(__file__).with_name("tasks.jsonl")


def tasks(split, num_tasks, seed):
    """Return questions and their right answers. Parameters after `seed` are settings: `[environment] settings`."""
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines() if line.strip()]
    # `split` is "train" or "eval"; the text of a question alone decides which of them it belongs to.
    return [row for row in rows if split_of(row["prompt"]) == split][:num_tasks]


def reward(task, completion):
    """Grade an answer. RL maximises `reward`; the other values are only logged."""
    in_place = sum(a == b for a, b in zip(task.answer, completion, strict=False))
    return {"reward": float(completion == task.answer), "in_place": in_place / len(task.answer)}
'''
TEST = '''"""Checks of the environment that need no model: pytest test_environment.py"""

from types import SimpleNamespace

from environment import reward, tasks


def graded(row, completion):
    return reward(SimpleNamespace(answer=row["answer"], info=row), completion)["reward"]


def test_right_answers_are_told_from_wrong_ones():
    for row in tasks("train", 50, 0):
        assert graded(row, row["answer"]) == 1.0
        for wrong in ("", row["prompt"], row["answer"] + "0", row["answer"][::-1] + "!"):
            assert graded(row, wrong) < 1.0


def test_no_question_is_trained_on_and_held_out():
    prompts = {split: {row["prompt"] for row in tasks(split, 100_000, 0)} for split in ("train", "eval")}
    assert prompts["train"]
    assert prompts["eval"]
    assert not prompts["train"] & prompts["eval"]


def test_the_same_tasks_come_again_and_a_longer_list_begins_with_a_shorter_one():
    assert tasks("train", 20, 0) == tasks("train", 20, 0) == tasks("train", 40, 0)[:20]
'''
AGENTS = """# This folder

An environment for Slipstream: tasks, and a reward that grades a model's answers. SFT imitates the answers of the tasks,
reinforcement learning maximises the reward.

| file | what it is |
|---|---|
| `environment.py` | `tasks` and `reward`: the only code that a run loads |
| `tasks.jsonl` | one task a line: `prompt`, `answer`, and any other keys that the reward reads from `task.info` |
| `test_environment.py` | checks that need no model |
| `sft.toml`, `rl.toml` | run files: SFT first, RL from its result |
| `models/`, `runs/` | made by the commands; not part of the environment |

## Contract

- `tasks(split, num_tasks, seed)` returns at most `num_tasks` dictionaries with `prompt` (text, or messages), `answer`
  (exactly what a perfect model would write, if there is one) and other JSON values.
- `split` is `"train"` or `"eval"`. No prompt may be in both: `split_of(text)` decides by the text alone.
- The same arguments give the same tasks, and a longer list begins with the shorter one: draw from
  `random.Random(seed)`.
- `reward(task, completion)` returns a number, or a dictionary of numbers with `reward`: 1 for right, 0 for wrong. It
  runs in worker processes with a deadline (`environment.reward_timeout_s`), keeps no state between calls, and sees the
  text after the model's thinking. Where it cannot grade, it raises an exception, which is counted; that is not a 0.
- `environment.py` may import modules of this folder and of installed packages.

## Check every change, in this order

```bash
{commands}```

`slipstream env test` must pass before anything is trained: it grades right answers, and junk that must not be rewarded.
`slipstream plan` shows what a run would do without starting it. Most commands take `--json`; exit code 0 is success,
and an error is one sentence on standard error. A short trial of a run file:
`--training.steps 3 --training.warmup_steps 0 --evaluation.num_tasks 16`.

## Do not

- give partial credit that a model can collect without being right: put such numbers beside `reward`, as metrics;
- read held-out answers into prompts, or make `eval` tasks depend on the training tasks;
- use the module `random` unseeded, the time, or the order of a set: a resumed run must find the same tasks;
- write into a run folder, or change `environment.py` or `tasks.jsonl` while a run goes on: `--resume` refuses that;
- put keys into these files: a reward reads them from variables that `environment.variables` names;
- delete `test_environment.py`, or weaken a check so that it passes.
"""
_NEXT = "python -m pytest -q test_environment.py\n"


def _rows() -> str:
    draw, found = random.Random(0), dict[str, str]()
    while len(found) < _NUM_ROWS:
        digits = "".join(draw.choices("0123456789", k=_NUM_DIGITS))
        found[f"Sort: {digits}"] = "".join(sorted(digits))
    return "".join(json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in found.items())


def _run_file(text: str) -> str:
    """A run file of `slipstream init` without what is true of its task alone."""
    lines = [line for line in text.splitlines() if not line.startswith("# settings")]
    return "\n".join(line.partition(" # about")[0] for line in lines) + "\n"


def environment_files() -> Mapping[str, str]:
    """The files by name."""
    return {
        "environment.py": ENVIRONMENT,
        "tasks.jsonl": _rows(),
        "test_environment.py": TEST,
        "sft.toml": _run_file(SFT),
        "rl.toml": _run_file(RL),
        "AGENTS.md": AGENTS.replace("{commands}", next_commands()),
    }


def next_commands() -> str:
    """The commands to run in that folder, in this order."""
    return _NEXT + COMMANDS
