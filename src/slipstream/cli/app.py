"""Defines the command `slipstream`: parses its arguments and turns a failure into one sentence and an exit code."""

from __future__ import annotations

import io
import os
import sys
import textwrap
from typing import Any

from cyclopts import App, CycloptsError, Group

import slipstream
from slipstream.cli import (
    artifacts,
    chat,
    commands,
    deployments,
    doctor,
    engine,
    env_commands,
    evaluation,
    jobs,
    mcp_server,
    node,
    output,
    proof,
    service,
    smoke,
)
from slipstream.cli.init_files import COMMANDS
from slipstream.errors import ConfigError, Interrupted, SlipstreamError, StartsAgain, one_line
from slipstream.processes.exits import become, leave

USAGE_EXIT_CODE = 2

app = App(
    name="slipstream",
    version=slipstream.__version__,
    help="""Post-trains language models: vLLM generates, PyTorch trains, new weights slip into the running engine.

    Run these commands in this order for a first run of five minutes on a CPU; docs/tutorial.md explains them:

        slipstream init first
        cd first
{commands}
    """.format(commands=textwrap.indent(COMMANDS.rstrip(), 8 * " ")),
)
_BEFORE, _TRAIN, _QUEUE, _INSPECT, _USE, _SHELL = (
    Group(title, sort_key=place)
    for place, title in enumerate(
        ("Before a run", "Train", "Queue and Slurm", "Inspect runs", "Use the trained model", "Shell")
    )
)
for part in (env_commands.env_app, commands.model_app):
    part.group = (_BEFORE,)
    app.command(part)
app.command(commands.init, group=_BEFORE)
app.command(commands.plan, group=_BEFORE)
app.command(doctor.doctor, group=_BEFORE)
app.command(smoke.smoke, group=_BEFORE)
app.command(smoke.models, group=_BEFORE)
app.command(commands.sft, group=_TRAIN)
app.command(commands.train, group=_TRAIN)
app.command(commands.trainer, group=_TRAIN)
app.command(node.node, group=_TRAIN)
app.command(engine.engine, group=_TRAIN)
for command in (
    jobs.submit,
    jobs.status,
    jobs.logs,
    jobs.cancel,
    artifacts.checkpoints,
    service.gpus,
    service.serve,
    mcp_server.mcp,
):
    app.command(command, group=_QUEUE)
app.command(evaluation.evaluate, name="eval", group=_INSPECT)
app.command(evaluation.compare, group=_INSPECT)
app.command(commands.report, group=_INSPECT)
app.command(commands.runs, group=_INSPECT)
app.command(proof.trace, group=_INSPECT)
app.command(proof.ledger, group=_INSPECT)
app.command(proof.verify, group=_INSPECT)
app.command(proof.replay, group=_INSPECT)
app.command(chat.chat, group=_USE)
for command in (deployments.deploy, deployments.undeploy, deployments.deployments):
    app.command(command, group=_USE)
app.command(commands.export, group=_USE)
app.command(artifacts.push, group=_USE)
app.command(chat.serve_model, group=_USE)
app.register_install_completion_command(
    group=_SHELL, help="Complete commands and options with Tab in bash, zsh or fish; --shell names one."
)


def main(arguments: list[str] | None = None) -> Any:
    """Run one command and exit the process with its exit code; with `arguments`, raise `SystemExit` instead."""
    # OpenMP reads this when torch is loaded. By default its idle threads spin, which slows a step many times where
    # other work needs the cores: the engine at staleness 1, or another program.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if arguments is not None:
        sys.exit(_run_with_restarts(arguments))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for characters that the terminal cannot encode
    output.Process.is_own = True
    try:
        code = _run(sys.argv[1:])
    except StartsAgain as again:
        become(again.arguments, "slipstream.cli")
    leave(code)


def _run_with_restarts(arguments: list[str]) -> int:
    """Run one command in the caller's process, again with new arguments whenever it asks for a restart."""
    while True:
        try:
            return _run(arguments)
        except StartsAgain as again:
            arguments = again.arguments


def _run(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    output.Printed.json = False
    try:
        _check_process()
        code = app(arguments, exit_on_error=False, print_error=False)
        output.flush()
    except StartsAgain:
        raise
    except CycloptsError as error:
        return _fail(arguments, error, f"{str(error).strip()}  (slipstream --help)", USAGE_EXIT_CODE)
    except SlipstreamError as error:
        return _fail(arguments, error, str(error), error.exit_code)
    except KeyboardInterrupt as error:
        return _fail(arguments, error, "interrupted", Interrupted.exit_code)
    except (OSError, SystemExit) as error:
        cause = error.__context__ if isinstance(error, SystemExit) else error  # rich raises SystemExit on a broken pipe
        if isinstance(cause, BrokenPipeError) and (isinstance(error, SystemExit) or output.is_closed()):
            output.discard()
            return output.CLOSED_PIPE_EXIT_CODE
        if not isinstance(error, OSError) or (explanation := output.explain_os_error(error)) is None:
            raise
        return _fail(arguments, error, *explanation)
    except Exception as error:
        if "--json" in arguments:
            output.print_json_error(error, one_line(error), SlipstreamError.exit_code)
        raise  # a bug, which shows its traceback
    return code if isinstance(code, int) else 0


def _fail(arguments: list[str], error: BaseException, message: str, exit_code: int) -> int:
    output.print_error(error, message, exit_code, as_json="--json" in arguments)
    return exit_code


def _check_process() -> None:
    """Raise `ConfigError` in a process in which no command can work."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the current folder has been removed: change to one that exists") from None
    if sys.flags.optimize > 1:
        raise ConfigError("PYTHONOPTIMIZE=2 removes docstrings, which transformers reads: unset it, or use 1")
