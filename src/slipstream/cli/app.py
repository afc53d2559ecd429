"""Parses the command line, and turns a failure into one sentence and an exit code."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import textwrap
from typing import Any

from cyclopts import App, CycloptsError, Group
from rich.console import Console
from rich.text import Text

import slipstream
from slipstream.cli import chat, commands, output, proof
from slipstream.cli.init_files import COMMANDS
from slipstream.errors import ConfigError, Interrupted, SlipstreamError, StartsAgain
from slipstream.inference.child_process import become, leave
from slipstream.runlog.redaction import hide_userinfo

USAGE_EXIT_CODE = 2

app = App(
    name="slipstream",
    version=slipstream.__version__,
    help="""Post-trains language models: vLLM generates, PyTorch trains, new weights slip into the running engine.

    A first run, in this order; five minutes on a CPU, and docs/tutorial.md explains it:

        slipstream init first
        cd first
{commands}
    """.format(commands=textwrap.indent(COMMANDS.rstrip(), 8 * " ")),
)
_BEFORE, _TRAIN, _LOOK, _USE = (
    Group(title, sort_key=place)
    for place, title in enumerate(("Before a run", "Train", "Look at runs", "Use what came of it"))
)
for part in (commands.env_app, commands.model_app):
    part.group = (_BEFORE,)
    app.command(part)
app.command(commands.init, group=_BEFORE)
app.command(commands.plan, group=_BEFORE)
app.command(commands.sft, group=_TRAIN)
app.command(commands.train, group=_TRAIN)
app.command(commands.evaluate, name="eval", group=_LOOK)
app.command(commands.report, group=_LOOK)
app.command(commands.runs, group=_LOOK)
app.command(proof.trace, group=_LOOK)
app.command(proof.verify, group=_LOOK)
app.command(chat.chat, group=_USE)
app.command(commands.export, group=_USE)
app.command(chat.serve_model, group=_USE)


def main(arguments: list[str] | None = None) -> Any:
    """Run one command and end the process with its exit code; with `arguments`, raise `SystemExit` instead."""
    # Read when torch is loaded. OpenMP threads that spin while they wait make a step many times longer wherever
    # something else needs the cores: the engine at staleness 1, or another program.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if arguments is not None:
        sys.exit(_run_to_the_end(arguments))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a model may say what the terminal cannot show
    try:
        code = _run(sys.argv[1:])
    except StartsAgain as again:
        become(again.arguments, "slipstream.cli")
    leave(code)


def _run_to_the_end(arguments: list[str]) -> int:
    """The same within a process that is somebody else's."""
    while True:
        try:
            return _run(arguments)
        except StartsAgain as again:
            arguments = again.arguments


def _run(arguments: list[str]) -> int:
    """Run one command; its exit code."""
    output.Printed.json = False
    try:
        _check_process()
        code = app(arguments, exit_on_error=False, print_error=False)
        output.flush()
    except CycloptsError as error:
        return _fail(arguments, error, f"{str(error).strip()}  (slipstream --help)", USAGE_EXIT_CODE)
    except SlipstreamError as error:
        return _fail(arguments, error, str(error), error.exit_code)
    except KeyboardInterrupt as error:
        return _fail(arguments, error, "interrupted", Interrupted.exit_code)
    except (OSError, SystemExit) as error:
        cause = error.__context__ if isinstance(error, SystemExit) else error  # rich exits on a broken pipe
        if isinstance(cause, BrokenPipeError) and (isinstance(error, SystemExit) or output.is_closed()):
            output.discard()
            return output.CLOSED_PIPE_EXIT_CODE
        if not isinstance(error, OSError) or (said := output.told(error)) is None:
            raise
        return _fail(arguments, error, *said)
    return code if isinstance(code, int) else 0


def _fail(arguments: list[str], error: BaseException, message: str, exit_code: int) -> int:
    """Say on standard error why it ended, and with --json also on standard output, unless it has its result there."""
    message = hide_userinfo(message)
    wished = isinstance(error, (KeyboardInterrupt, Interrupted))
    said = Text(message) if wished else Text.assemble(("error:", "red"), " ", message)
    Console(stderr=True, highlight=False, soft_wrap=True, emoji=False).print(said)
    if "--json" in arguments and not output.Printed.json:
        with contextlib.suppress(OSError):
            output.print_json({"error": type(error).__name__, "message": message, "exit_code": exit_code})
            output.flush()
    return exit_code


def _check_process() -> None:
    """Raises `ConfigError` for a process in which no command could work."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the current folder has been removed: change to one that exists") from None
    if sys.flags.optimize > 1:
        raise ConfigError("PYTHONOPTIMIZE=2 removes docstrings, which transformers reads: unset it, or use 1")
