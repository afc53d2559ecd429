"""Becomes the command of an agent: `python -P command.py`, started by `hosted/command.py` below a guard.

Its standard input is a connected socket, which brings one frame: the command, the file of its standard input, and the
file of its standard output. Its standard error stays.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    """Reads the frame and becomes the command."""
    length = int.from_bytes(_exactly(4), "big")
    command, given, result = json.loads(_exactly(length))
    os.dup2(os.open(given, os.O_RDONLY), 0)
    os.dup2(os.open(result, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be started: {error}")


def _exactly(count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = os.read(0, count - len(data))
        if not part:
            sys.exit("the run has ended")
        data += part
    return data


if __name__ == "__main__":
    main()
