"""Starts every process of Slipstream. A launcher knows a child's host and passes its signals on; `LOCAL` starts
children of this process, on this host.

Guarantees of a `Child`: its standard input is one end of a connected socket, `Child.socket` the other. The socket
carries messages (`channel.py`) and ends the child with its parent (`lifeline.py`), however that ends. A child has a
session of its own, so that a terminal's signals reach the run only. Below a guard (`guard.py`) its descendants end with
it and are bounded in number.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from slipstream.errors import ConfigError
from slipstream.processes import guard, stacks
from slipstream.processes.child import Child, LocalChild
from slipstream.processes.files import open_own

PIPE = subprocess.PIPE
popen: type[subprocess.Popen[bytes]] = subprocess.Popen
"""Starts a local child. Tests put a class in its place that forks a process which has imported the libraries."""


@dataclass(frozen=True)
class Resources:
    """What a child gets on its node; by default what its parent has."""

    threads: int | None = None
    """OpenMP threads."""
    gpus: Sequence[str] = ()
    """Names as in CUDA_VISIBLE_DEVICES; on another node, numbers among those of its agent."""
    python: str = sys.executable
    """Its interpreter."""
    max_processes: int = 0
    """It runs below a guard, with at most so many descendants; 0: without."""
    user_namespace: bool = True
    """It gets its own user namespace, if it runs below a guard and the kernel allows it."""
    own_session: bool = True

    def environment(self, own: Mapping[str, str]) -> dict[str, str]:
        """The variables of a child that has `own` beside."""
        found = dict(own)
        if self.threads is not None:
            found["OMP_NUM_THREADS"] = str(self.threads)
        if self.gpus:
            found["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
        return found

    def command(self, module: str | Path, arguments: Sequence[str]) -> list[str]:
        """The command line. `-P`: a file in the current folder hides no module of the standard library."""
        program = ["-m", module] if isinstance(module, str) else ["-u", str(module)]
        command = [self.python, "-P", *program, *arguments]
        if not self.max_processes:
            return command
        kind = guard.NAMESPACE if self.user_namespace else guard.NO_NAMESPACE
        return [sys.executable, "-I", "-S", guard.__file__, str(self.max_processes), kind, *command]


def gpu_name(number: int, visible: str | None) -> str:
    """The name of GPU `number` in `visible` (CUDA_VISIBLE_DEVICES)."""
    return visible.split(",")[number].strip() if visible else str(number)


class Launcher(Protocol):
    """Starts processes."""

    def launch(
        self,
        module: str | Path,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] = os.environ,
        resources: Resources = Resources(),
        node: str = "",
        *,
        output: Path | int | None = None,
    ) -> Child:
        """Start a module, or a program by its path, without waiting for it.

        `node`: a host, by default this one. `output`: a file to append to, beside which the child may answer for its
        stacks (`stacks.py`); `PIPE`, or None for this process's own. Raises OSError where it cannot be started.
        """
        ...


class Local:
    """Children of this process, on this host."""

    def launch(
        self,
        module: str | Path,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] = os.environ,
        resources: Resources = Resources(),
        node: str = "",
        *,
        output: Path | int | None = None,
    ) -> LocalChild:
        """See `Launcher`."""
        if node:
            raise ConfigError(f"node {node!r} is not this host, and processes start on this host alone: leave it out")
        variables = resources.environment(environment)
        if isinstance(output, Path):
            output.parent.mkdir(parents=True, exist_ok=True)
            variables[stacks.VARIABLE] = str(stacks.prefix_of(output))
        own, theirs = socket.socketpair()
        with contextlib.ExitStack() as stack:
            stack.enter_context(theirs)
            on_error = stack.enter_context(contextlib.ExitStack())
            on_error.enter_context(own)
            if isinstance(output, Path):
                output = open_own(output, os.O_WRONLY | os.O_APPEND)
                stack.callback(os.close, output)
            process = popen(
                resources.command(module, arguments),
                stdin=theirs.fileno(),
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                env=variables,
                bufsize=0,
                start_new_session=resources.own_session,
            )
            on_error.pop_all()
        return LocalChild(process, own, has_session=resources.own_session)


LOCAL = Local()
