"""The command `slipstream doctor`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from slipstream.cli.commands import Overrides
from slipstream.cli.output import Json, print_json, tell

if TYPE_CHECKING:
    from slipstream.doctor.findings import Finding


def doctor(
    run_file: Annotated[Path | None, Parameter(help="Also check what this run needs.")] = None,
    /,
    *overrides: Overrides,
    nodes: Annotated[bool, Parameter(help="Also look at the other nodes of the run, by their agents.")] = False,
    json: Json = False,
) -> int:
    """Look at this machine before a run: packages, GPUs, memory, limits, folders, network.

    Each check prints a verdict, the reason and a remedy. With a run file, the run is also planned as by `slipstream
    plan`: model, chat template, data, disk, vLLM's options. Its rewards grade gold answers and junk of a few tasks.
    `--nodes` waits for the agents of the other nodes (`slipstream node`) and has each look at its node. Packages,
    clocks and paths are compared, and all pairs of nodes all-reduce. No run is started. The exit code is the worst
    verdict: 0 ok, 1 warning, 2 fault.
    """
    from slipstream.commands.run_checks import check_run
    from slipstream.doctor import CHECKS, examine
    from slipstream.doctor.findings import exit_code
    from slipstream.doctor.nodes import check_nodes
    from slipstream.errors import ConfigError

    def of_run() -> Iterable[Finding]:
        return check_run(run_file, overrides) if run_file is not None else ()

    def of_nodes() -> Iterable[Finding]:
        warn = partial(tell, file=sys.stderr)
        return check_nodes(run_file, overrides, warn) if run_file is not None and nodes else ()

    if nodes and run_file is None:
        raise ConfigError("--nodes needs the run file, which names the nodes: slipstream doctor RUN.toml --nodes")

    found = list(_shown(examine((*CHECKS, of_run, of_nodes)), is_shown=not json))
    code = exit_code(found)
    if json:
        print_json({"exit_code": code, "findings": [asdict(each) for each in found]})
    return code


def _shown(findings: Iterable[Finding], *, is_shown: bool) -> Iterator[Finding]:
    """Print each finding as it comes."""
    from rich.console import Console
    from rich.text import Text

    console = Console(emoji=False, highlight=False, soft_wrap=True)
    style = {"ok": "green", "warning": "yellow", "fault": "red"}
    for each in findings:
        if is_shown:
            console.print(Text.assemble((f"{each.verdict:8}", style[each.verdict]), f"{each.check:17}{each.reason}"))
            if each.remedy:
                tell(f"{'':25}→ {each.remedy}")
        yield each
