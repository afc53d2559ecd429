"""Restarts a run from its last checkpoint: when its engine died with the only copy of the weights, and under a
supervisor after every failure that `exit.json` would call retriable.

Guarantees: at most `run.max_restarts` times for one command, each time after a longer wait, and never twice at the same
step unless somebody else has killed a process: the error of the last attempt then ends the run. Errors of the run file,
the data, the environment or the training are not retried. Earlier attempts are read from the run folder alone, and
every attempt is a new process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from slipstream.errors import (
    ConfigError,
    DataError,
    DeadlineError,
    EngineError,
    EnvironmentFault,
    IntegrityError,
    Interrupted,
    OrchestratorError,
    SlipstreamError,
    StartsAgain,
    TrainingError,
)
from slipstream.launch.recovery.retry_policy import earlier_attempts, next_restart
from slipstream.orchestrator.control.handle import Caller
from slipstream.progress import Progress
from slipstream.runlog import RunLog, read_events
from slipstream.transport import TransportAway, TransportLost

_POLL_S = 0.1
_FINAL = (ConfigError, DataError, EnvironmentFault, IntegrityError, TrainingError, Interrupted)
"""Errors whose cause is not the engine, even where it has died too."""


class AttemptFailed(Exception):
    """`error` ended the attempt, and another one may follow."""

    def __init__(self, error: Exception, trained_s: float) -> None:
        super().__init__(str(error))
        self.error = error
        self.trained_s = trained_s
        """Seconds of training of this command so far, as `training.max_seconds` counts them."""


def cause_of(error: BaseException | None) -> BaseException | None:
    """The error behind a failed attempt."""
    return error.error if isinstance(error, AttemptFailed) else error


def is_retriable(error: Exception) -> bool:
    """Whether the same command with --resume may succeed as it is, and nobody has asked for the stop."""
    return isinstance(error, SlipstreamError) and error.is_retriable and not isinstance(error, Interrupted)


def has_lost_weights(error: Exception, caller: Caller | None) -> bool:
    """Whether the engine behind `caller` died, which caused `error`, and no file holds its weights; or the process in
    which rollouts are generated did, and its engine with it; or what carries its records lost them, or is away."""
    if isinstance(error, OrchestratorError | TransportAway | TransportLost):
        return True
    if caller is None or isinstance(error, _FINAL):
        return False
    state = caller.engine_state(settles=False)
    if state.is_in_memory_only and isinstance(error, EngineError) and not isinstance(error, DeadlineError):
        state = caller.engine_state(settles=True)
    return state.is_in_memory_only and not state.is_up


def start_again(
    lost: AttemptFailed, log: RunLog, progress: Progress, max_restarts: int, should_stop: Callable[[], bool]
) -> NoReturn:
    """Report the restart, wait and raise `StartsAgain`; raises the error itself where there is no further attempt."""
    from slipstream.trainer.checkpoints.checkpoint import CheckpointStore

    error = lost.error
    outside = isinstance(error, OrchestratorError) and error.was_killed
    outside |= isinstance(error, TransportAway | TransportLost)
    found = next_restart(
        None if outside else log.step, earlier_attempts(read_events(log.folder), log.lineage), max_restarts
    )
    if isinstance(found, str):
        if max_restarts:
            log.warning(f"the run is not started again: {found}")
        raise lost.error
    latest = CheckpointStore(log.folder / "checkpoints").latest()
    after = f"from checkpoint {latest.name}" if latest else "from the beginning, as there is no checkpoint yet"
    log.event(
        "restart",
        number=found.number,
        step=log.step,
        checkpoint=latest.name if latest else None,
        wait_s=found.wait_s,
        trained_s=lost.trained_s,
        outside=outside,
        reason=str(lost.error),
    )
    progress.message(
        f"{lost.error}; the run starts again {after} (restart {found.number} of run.max_restarts = {max_restarts}) in "
        f"{found.wait_s:g} s",
        "warning",
    )
    until = time.monotonic() + found.wait_s
    while time.monotonic() < until:
        if should_stop():
            raise Interrupted("stopped before the run was started again: continue with --resume")
        time.sleep(_POLL_S)
    log.has_exit = True
    raise StartsAgain(log.folder)


@contextmanager
def end_on_early_error(folder: Path) -> Generator[None]:
    """An error before a restarted attempt opens its folder ends the run. An absent server is then an engine's
    failure."""
    try:
        yield
    except SlipstreamError as error:
        last = read_events(folder)[-1:]
        if not last or last[0]["kind"] != "restart":
            raise
        from slipstream.inference.server_client import Unreached

        with RunLog.create(folder, resume=True, is_over=True) as log:
            log.step = last[0]["step"]
            if isinstance(lost := error.__cause__, Unreached):
                raise EngineError(
                    f"{lost} at step {log.step}: start it again with slipstream engine, and the run with --resume"
                ) from error
            raise
