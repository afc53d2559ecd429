"""Runs a command of an agent for one task, below a guard, and returns its last line of output.

Guarantees: no process of it is left, however the call ends; it gets none of the run's keys; it is killed when the call
is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from slipstream.envs.hosted import inside
from slipstream.envs.hosted.keeper import EnvironmentRaised
from slipstream.envs.hosted.process import MAX_PROCESSES, OutputLog
from slipstream.envs.scoring.process import worker_environment
from slipstream.processes.guarded import Guarded, ending
from slipstream.processes.launchers import Resources
from slipstream.processes.temporary import temporary

TASK = "SLIPSTREAM_TASK"
"""Environment variable: the file of the task."""
_PROGRAM = Path(str(inside.__file__)).with_name("command.py")
_MAX_BYTES = 64 * 2**20
_MOST_OUTPUT = 2**30
"""Bytes of standard output. A command with more is killed."""
_RESULT_BYTES = 2**20
"""At most so much of the output's end is read."""
_POLL_S = 1.0
_TAIL_LINES = 12


async def run_command(
    command: Sequence[str],
    task: str,
    variables: Mapping[str, str],
    *,
    names: Iterable[str] = (),
    user_namespace: bool = True,
    log: Path | None = None,
) -> str:
    """The last line of the command's standard output. `task`: JSON; `names`: variables of this process for it, beside
    `variables`; `log`: takes its standard error. Raises `EnvironmentRaised` with the end of that when it fails."""
    with temporary("agent") as folder:
        file = folder / "task.json"
        file.write_text(task)
        (folder / "command.json").write_text(json.dumps(list(command)))
        environment = {**worker_environment(names, os.environ), **variables, TASK: str(file)}
        resources = Resources(max_processes=MAX_PROCESSES, user_namespace=user_namespace)
        process = await Guarded.start(
            _PROGRAM, environment, resources, max_bytes=_MAX_BYTES, on_output=OutputLog(log).write
        )
        try:
            # The output is that of all it has started, and it may have closed it long before.
            while not (process.has_ended_output.is_set() and await process.has_ended(_POLL_S)):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_S):
                        await process.has_ended_output.wait()
                _check_size(folder / "result", command)
        finally:
            await process.kill()
        code = process.poll()
        if code != 0:
            lines = process.tail.decode(errors="replace").strip().splitlines()[-_TAIL_LINES:]
            said = "".join(f"\n    {line}" for line in lines)
            how = ending(code, f"more than {MAX_PROCESSES} processes")
            raise EnvironmentRaised(f"the agent's command {' '.join(command)!r:.200} ended with {how}{said}")
        return _last_line(folder / "result")


def _check_size(result: Path, command: Sequence[str]) -> None:
    """Raise `EnvironmentRaised` for more output than the disk should hold."""
    if result.exists() and result.stat().st_size > _MOST_OUTPUT:
        raise EnvironmentRaised(
            f"the agent's command {' '.join(command)!r:.200} has printed more than {_MOST_OUTPUT >> 20} MiB: print the "
            "result alone, and the rest to standard error"
        )


def _last_line(path: Path) -> str:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _RESULT_BYTES))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
