"""Parses the command line, and turns a failure into one sentence and an exit code."""

from __future__ import annotations

import os
import sys
import textwrap
from typing import Any

from cyclopts import App, CycloptsError, Group
from rich.console import Console

import slipstream
from slipstream.cli import commands, proof, talk
from slipstream.cli.first_run import COMMANDS
from slipstream.errors import Interrupted, SlipstreamError
from slipstream.inference.child import leave

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
for part in (commands.env_app, commands.model_app, proof.bench_app):
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
app.command(talk.chat, group=_USE)
app.command(commands.export, group=_USE)
app.command(talk.serve_model, group=_USE)


def main(arguments: list[str] | None = None) -> Any:
    """Run one command and end the process with its exit code; with `arguments`, raise `SystemExit` instead."""
    # Read when torch is loaded. OpenMP threads that spin while they wait make a step many times longer wherever
    # something else needs the cores: the engine at staleness 1, or another program.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    stderr = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    try:
        code = app(sys.argv[1:] if arguments is None else arguments, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        stderr.print("[red]error:[/] ", end="")
        stderr.print(f"{str(error).strip()}  (slipstream --help)", markup=False)
        code = USAGE_EXIT_CODE
    except Interrupted as stopped:  # as was wished
        stderr.print(str(stopped), markup=False)
        code = stopped.exit_code
    except SlipstreamError as error:
        stderr.print("[red]error:[/] ", end="")
        stderr.print(str(error), markup=False)
        code = error.exit_code
    except KeyboardInterrupt:
        stderr.print("interrupted")
        code = 130
    code = code if isinstance(code, int) else 0
    if arguments is not None:
        sys.exit(code)
    leave(code)
