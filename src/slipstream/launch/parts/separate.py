"""`slipstream orchestrator RUN` and `slipstream engine RUN`: parts that the run does not start itself
(`run.elsewhere`).

Each waits for the run's order, starts the process that it asks for, and another one for the next attempt, until the run
is over. SIGTERM may have come to all processes of the run, which then needs this one for its checkpoint: it goes on
until the run needs it no more, for at most `run.grace_s`, or until a second SIGTERM. Needs neither torch nor vLLM
itself.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Self

from slipstream.errors import ConfigError, DeadlineError, Interrupted
from slipstream.inference.launchers import ORDERS, Orders, take_orders
from slipstream.inference.preimport import MODULE
from slipstream.launch.parts import PROGRAM
from slipstream.launch.startup.compile_caches import persistent_caches
from slipstream.processes import stacks
from slipstream.runlog import holds_run, read_exit, read_settings

MODULES = {"orchestrator": PROGRAM, "engine": MODULE}
_POLL_S = 0.2
_SAME_S = 1.0
"""A second SIGTERM within it is the first one, from another sender."""
_GRACE_S = 30.0
"""Where the run does not say its own."""


def serve_part(run: Path, kind: str, number: int, *, patience_s: float, say: Callable[[str], None]) -> int:
    """Be the part `kind`, the one of this `number`, of the run in the folder `run`. Returns the run's exit code. Raises
    DeadlineError where the run asks for nothing for `patience_s`."""
    with stacks.on_stderr():
        return _serve_part(run, kind, number, patience_s, say)


def _serve_part(run: Path, kind: str, number: int, patience_s: float, say: Callable[[str], None]) -> int:
    began, until = time.time(), time.monotonic() + patience_s
    while not holds_run(run):
        if time.monotonic() > until:
            raise DeadlineError(f"{run} is still no run folder after {patience_s:g} s (--patience): start the trainer")
        time.sleep(_POLL_S)
    folder = run / ORDERS
    folder.mkdir(mode=0o700, exist_ok=True)
    for each in (run, folder):
        state = each.stat()
        if state.st_uid != os.geteuid() or state.st_mode & (0o077 if each == folder else 0o022):
            raise ConfigError(f"{each} is not yours alone, and what it asks for would run as you: be its owner")

    def is_over() -> bool:
        try:  # not the end of an earlier attempt, which this one continues
            return (run / "exit.json").stat().st_mtime >= began
        except FileNotFoundError:
            return False

    part = f"{kind} {number}"
    try:
        with _Stop(run) as stop, persistent_caches(lambda text: None):
            orders = Orders(folder, f"{kind}-{number}")
            if not take_orders(orders, MODULES[kind], is_over, patience_s, say, lambda: stop.ends_at):
                raise DeadlineError(
                    f"the run in {run} has asked for no {kind} {number} for {patience_s:g} s (--patience): start its "
                    f'trainer with run.elsewhere = ["{kind}"], or resume it'
                )
    except KeyboardInterrupt:
        raise Interrupted(f"{part} was stopped: the run waits for another one") from None
    report = read_exit(run)
    if stop.ends_at < math.inf and not is_over():
        raise Interrupted(f"{part} was stopped by SIGTERM: the run waits for another one")
    return report.exit_code if report is not None else 0


class _Stop:
    """Answers signals in its context: `ends_at` is set by SIGTERM, and SIGUSR1 changes nothing."""

    def __init__(self, run: Path) -> None:
        self.ends_at = math.inf
        self._run = run
        self._since = math.inf

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGTERM and self.ends_at == math.inf:
            grace_s = read_settings(self._run).get("run.grace_s", _GRACE_S)
            self._since, self.ends_at = now, now + float(grace_s)
        elif number == signal.SIGTERM and now - self._since > _SAME_S:
            self.ends_at = now

    def __enter__(self) -> Self:
        self._before = {each: signal.signal(each, self._handle) for each in (signal.SIGTERM, signal.SIGUSR1)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
