"""Writes a command's results to standard output, and handles an output that cannot be written."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import sys
from collections.abc import Generator, Mapping, Sequence
from typing import Annotated, Any, TextIO

from cyclopts import Parameter

from slipstream.errors import Interrupted
from slipstream.progress import Progress, printable
from slipstream.runlog.redaction import hide_userinfo

CLOSED_PIPE_EXIT_CODE = 141
"""128 + SIGPIPE: a shell's exit code for a program whose reader closed the pipe."""
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG}
_NOT_ALLOWED = {errno.EACCES, errno.EPERM}
_FILE_WIDTH = 140
"""Columns of a table that goes to a file or a pipe."""

Json = Annotated[bool, Parameter(name="--json", negative="", help="Print JSON and nothing else.")]


class Printed:
    """Whether this process has printed a command's JSON result, after which no JSON error may follow."""

    json = False


def tell(text: str = "", *, end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """Print text without control sequences, which may come from a model, a server or another user's files."""
    print(printable(text), end=end, file=file, flush=flush)


class Process:
    """Whether this process is the command's own, and not that of a Python program that calls `main`."""

    is_own = False


def print_json(value: Any, *, is_result: bool = True) -> None:
    """Print one line of JSON at once; `is_result=False` for a line that others, or an error, may follow."""
    print(json.dumps(value, default=str), flush=True)
    Printed.json |= is_result


def print_json_text(text: str) -> None:
    """Print a result that is JSON already."""
    print(text, flush=True)
    Printed.json = True


def made_view(*, plain: bool, as_json: bool) -> Progress:
    """The view of a command's progress; none beside JSON."""
    from slipstream.view import make_view

    return make_view("none" if as_json else "plain" if plain else "auto")


def json_error(error: BaseException, message: str, exit_code: int) -> dict[str, Any]:
    """An error as `--json` shows it."""
    return {"error": type(error).__name__, "message": message, "exit_code": exit_code}


def print_table(rows: Sequence[Mapping[str, object]]) -> None:
    """Print a table with the keys of the first row as columns."""
    from rich.console import Console

    from slipstream.view import render_table

    console = Console(emoji=False)
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH, emoji=False)
    console.print(render_table(rows, list(rows[0])))


def print_error(error: BaseException, message: str, exit_code: int, *, as_json: bool) -> None:
    """Print the error on standard error and, with `as_json` and no result printed yet, as JSON on standard output."""
    from rich.console import Console
    from rich.text import Text

    message = printable(hide_userinfo(message))
    by_user = isinstance(error, (KeyboardInterrupt, Interrupted))
    text = Text(message) if by_user else Text.assemble(("error:", "red"), " ", message)
    Console(stderr=True, highlight=False, soft_wrap=True, emoji=False).print(text)
    if as_json:
        print_json_error(error, message, exit_code)


def print_json_error(error: BaseException, message: str, exit_code: int) -> None:
    """Print the error as JSON on standard output, if no result was printed yet."""
    if not Printed.json:
        with contextlib.suppress(OSError):
            print_json(json_error(error, message, exit_code))
            flush()


def flush() -> None:
    """Flush standard output. Raises OSError if it cannot be written."""
    if sys.stdout is not None and not sys.stdout.closed:  # pyright: ignore[reportUnnecessaryComparison]
        sys.stdout.flush()


def is_closed() -> bool:
    """Return whether standard output is a pipe without a reader."""
    with contextlib.suppress(OSError, ValueError):
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(found & (select.POLLERR | select.POLLHUP) for _, found in poll.poll(0))
    return False


def discard() -> None:
    """Redirect standard output to /dev/null, and with it what is still buffered."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


@contextlib.contextmanager
def ignore_closed_pipe() -> Generator[None]:
    """Let a command that has done its work succeed although the reader of its output has closed the pipe."""
    try:
        yield
        flush()
    except BrokenPipeError:
        discard()


def explain_os_error(error: OSError) -> tuple[str, int] | None:
    """Return a sentence and an exit code for a full disk or a missing permission; None for any other error."""
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
