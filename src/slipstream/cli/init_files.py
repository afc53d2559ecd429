"""The files that `slipstream init` writes: an environment and two run files, as a starting point for one's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slipstream.errors import ConfigError

ENVIRONMENT = '''"""The task: sort digits. docs/environments.md describes other kinds of environments."""

import random

from slipstream.envs import split_of


def tasks(split, num_tasks, seed, num_digits=5):
    """Return questions and their right answers. Parameters after `seed` are settings: `[environment] settings`."""
    draw = random.Random(seed)
    found = {}
    for _ in range(20 * num_tasks):
        digits = "".join(draw.choices("0123456789", k=num_digits))
        # `split` is "train" or "eval"; the text of a question alone decides which of them it belongs to.
        if split_of(digits) == split:
            found[digits] = {"prompt": f"Sort: {digits}", "answer": "".join(sorted(digits))}
    return list(found.values())[:num_tasks]


def reward(task, completion):
    """Grade an answer. RL maximises `reward`; the other values are only logged."""
    in_place = sum(a == b for a, b in zip(task.answer, completion, strict=False))
    return {"reward": float(completion == task.answer), "in_place": in_place / len(task.answer)}
'''
SFT = """# Supervised fine-tuning: the model imitates right answers.
#   slipstream sft sft.toml --run.folder runs/sft
#   slipstream export runs/sft models/after-sft
[model]
path = "models/new" # slipstream model new models/new

[environment]
name = "environment.py" # in this folder; others: reasoning_gym/<task>, "rows"
# settings = { num_digits = 5 }

[algorithm]
kind = "sft"

[training]
steps = 45 # about a minute for this task; held-out accuracy rises from 0 to about 35 %
prompts_per_batch = 64
learning_rate = 4e-3 # for 0.8 M parameters; large models need about 1e-5
schedule = "linear"
warmup_steps = 10

[evaluation]
num_tasks = 200 # evaluated before the first and after the last step
"""
RL = """# Reinforcement learning from the SFT model: it samples answers and learns from their rewards alone.
#   slipstream train rl.toml --run.folder runs/rl
[model]
path = "models/after-sft" # slipstream export runs/sft models/after-sft

[environment]
name = "environment.py"
# settings = { num_digits = 5 } # as in sft.toml

[algorithm]
kind = "grpo"
group_size = 8 # completions per question; RL learns where their rewards differ

[training]
steps = 60 # about two minutes for this task; held-out accuracy rises to about 80 %
prompts_per_batch = 64
updates_per_batch = 2
learning_rate = 1e-3
schedule = "linear"
warmup_steps = 10

[evaluation]
num_tasks = 200
"""
FILES: Mapping[str, str] = {"environment.py": ENVIRONMENT, "sft.toml": SFT, "rl.toml": RL}
COMMANDS = """slipstream model new models/new
slipstream env test sft.toml
slipstream plan sft.toml
slipstream sft sft.toml --run.folder runs/sft
slipstream export runs/sft models/after-sft
slipstream env test rl.toml --model
slipstream train rl.toml --run.folder runs/rl
slipstream report runs/rl
slipstream chat runs/rl --single-turn
"""
"""The commands to run in that folder, in this order."""


def write_files(folder: Path, files: Mapping[str, str]) -> Path:
    """Write the files into `folder`. Raises `ConfigError` if it is not empty or cannot be written."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} is not an empty folder: give a new one")
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written ({error.strerror}): give another folder") from error
    return folder
