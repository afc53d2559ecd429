"""What the plan chose itself and what turns out not to work on this machine is given up, in so many words."""

from __future__ import annotations

import gc
from collections.abc import Callable

from slipstream.config import dump_resolved
from slipstream.launch.build import CompilerFailed
from slipstream.launch.prepare import Prepared
from slipstream.launch.progress import Progress, warn
from slipstream.launch.result import RunResult
from slipstream.runlog import RunLog
from slipstream.weights.bridges.single_copy import CannotShare


def with_fallbacks(
    prepared: Prepared, carry_out: Callable[[Prepared], RunResult], log: RunLog, progress: Progress
) -> RunResult:
    """The plan or, where layers cannot be compiled or weights not be shared and nobody asked for it, one without that.
    `carry_out` leaves nothing running when it raises."""
    asked = prepared.loaded.config
    while True:
        try:
            return carry_out(prepared)
        except CompilerFailed as error:
            if asked.training.compile != "auto":
                raise
            give_up, problem = prepared.without_compiling, error.problem
        except CannotShare as error:
            if asked.weights.bridge != "auto" or asked.training.ranks > 1:  # ranks by another bridge need more cards
                raise
            give_up, problem = prepared.without_sharing, error.problem
        gc.collect()  # what was loaded for this plan
        prepared = give_up(problem)
        log.resolved(dump_resolved(prepared.loaded, prepared.plan.derived))
        warn(log, progress, prepared.plan.warnings[-1])
