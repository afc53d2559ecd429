"""Becomes the command of an agent: `python -P command.py`, started by `hosted/command.py` below a guard.

The folder of its task has the command; the task is its standard input, and its standard output goes into `result`. Its
standard error stays.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    """Becomes the command."""
    task = Path(os.environ["SLIPSTREAM_TASK"])
    command = json.loads(task.with_name("command.json").read_bytes())
    os.dup2(os.open(task, os.O_RDONLY), 0)
    os.dup2(os.open(task.with_name("result"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be started: {error}")


if __name__ == "__main__":
    main()
