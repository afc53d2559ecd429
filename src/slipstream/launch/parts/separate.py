"""`slipstream orchestrator RUN` and `slipstream engine RUN`: parts that the run does not start itself
(`run.elsewhere`).

Each waits for the run's order, starts the process that it asks for, and another one for the next attempt, until the run
is over. Needs neither torch nor vLLM itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from slipstream.errors import ConfigError, DeadlineError, Interrupted
from slipstream.inference.launchers import ORDERS, Orders, take_orders
from slipstream.inference.preimport import MODULE
from slipstream.launch.parts import PROGRAM
from slipstream.launch.startup.compile_caches import persistent_caches
from slipstream.runlog import holds_run, read_exit

MODULES = {"orchestrator": PROGRAM, "engine": MODULE}
_POLL_S = 0.2


def serve_part(run: Path, kind: str, number: int, *, patience_s: float, say: Callable[[str], None]) -> int:
    """Be the part `kind`, the one of this `number`, of the run in the folder `run`. Returns the run's exit code. Raises
    DeadlineError where the run asks for nothing for `patience_s`."""
    began, until = time.time(), time.monotonic() + patience_s
    while not holds_run(run):
        if time.monotonic() > until:
            raise DeadlineError(f"{run} is still no run folder after {patience_s:g} s (--patience): start the trainer")
        time.sleep(_POLL_S)
    folder = run / ORDERS
    folder.mkdir(mode=0o700, exist_ok=True)
    for each in (run, folder):
        state = each.stat()
        if state.st_uid != os.geteuid() or (each == folder and state.st_mode & 0o077):
            raise ConfigError(f"{each} is not yours alone, and what it asks for would run as you: be its owner")

    def is_over() -> bool:
        try:  # not the end of an earlier attempt, which this one continues
            return (run / "exit.json").stat().st_mtime >= began
        except FileNotFoundError:
            return False

    try:
        with persistent_caches(lambda text: None):
            orders = Orders(folder, f"{kind}-{number}")
            if not take_orders(orders, MODULES[kind], is_over, patience_s, say):
                raise DeadlineError(
                    f"the run in {run} has asked for no {kind} {number} for {patience_s:g} s (--patience): start its "
                    f'trainer with run.elsewhere = ["{kind}"], or resume it'
                )
    except KeyboardInterrupt:
        raise Interrupted(f"{kind} {number} was stopped: the run waits for another one") from None
    report = read_exit(run)
    return report.exit_code if report is not None else 0
