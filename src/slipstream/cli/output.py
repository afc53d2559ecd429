"""What a command writes to standard output, and what becomes of it when nobody takes it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import sys
from collections.abc import Generator, Mapping, Sequence
from typing import Annotated, Any

from cyclopts import Parameter

CLOSED_PIPE_EXIT_CODE = 141
"""What a shell says of a program that ended because nobody read on."""
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG}
_NOT_ALLOWED = {errno.EACCES, errno.EPERM}
_FILE_WIDTH = 140
"""Columns of a table that goes to a file or a pipe."""

Json = Annotated[bool, Parameter(name="--json", negative="", help="Print JSON and nothing else.")]


class Printed:
    """Whether this process printed JSON: whoever reads it expects one value."""

    json = False


def print_json(value: Any) -> None:
    """One line of JSON on standard output."""
    print(json.dumps(value, default=str))
    Printed.json = True


def print_table(rows: Sequence[Mapping[str, object]]) -> None:
    """Print a table with the keys of the first row as columns."""
    from rich.console import Console

    from slipstream.view import render_table

    console = Console(emoji=False)
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH, emoji=False)
    console.print(render_table(rows, list(rows[0])))


def flush() -> None:
    """Write what waits. Raises OSError when it cannot be written."""
    if sys.stdout is not None and not sys.stdout.closed:  # pyright: ignore[reportUnnecessaryComparison]
        sys.stdout.flush()


def is_closed() -> bool:
    """Whether standard output is a pipe that nobody reads."""
    with contextlib.suppress(OSError, ValueError):
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(found & (select.POLLERR | select.POLLHUP) for _, found in poll.poll(0))
    return False


def discard() -> None:
    """Have nothing more written to standard output, what waits included."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


@contextlib.contextmanager
def outlives_its_reader() -> Generator[None]:
    """What a command says of work that is done: a pipe that was closed meanwhile is no failure."""
    try:
        yield
        flush()
    except BrokenPipeError:
        discard()


def told(error: OSError) -> tuple[str, int] | None:
    """A sentence and an exit code for what the system refused a person; None for what only a bug can cause."""
    reason = error.strerror or str(error)
    if error.filename is None and error.errno in _DISK:
        try:
            flush()
        except OSError:
            discard()
        return f"the output, or a file, cannot be written ({reason}): make room on its disk", 1
    if error.errno in _DISK:
        return f"{error.filename} cannot be written ({reason}): make room on its disk, or choose another folder", 1
    if error.errno in _NOT_ALLOWED:
        return f"{error.filename or 'a file'} may not be read or written by this user ({reason}): ask its owner", 1
    return None
