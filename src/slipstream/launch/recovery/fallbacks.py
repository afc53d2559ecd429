"""Plans a run again, without what the plan had chosen by itself and this machine turns out not to support."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from slipstream.config import Derived, RunConfig, dump_resolved, with_values
from slipstream.launch.build import CompilerFailed
from slipstream.launch.prepare import Prepared
from slipstream.plan.derive import make_plan
from slipstream.runlog import RunLog
from slipstream.shared_kernels import CannotShareKernels
from slipstream.weights.bridges.single_copy import CannotShare

T = TypeVar("T")


def with_fallbacks(prepared: Prepared, carry_out: Callable[[Prepared], T], log: RunLog) -> T:
    """Carry out the plan; where layers cannot be compiled, or the engine's weights or kernels not be shared, and the
    run file does not ask for it, plan again without that and repeat. `carry_out` leaves nothing running when it
    raises."""
    asked = prepared.loaded.config
    replaced: dict[str, Derived] = {}
    while True:
        try:
            return carry_out(prepared)
        except CompilerFailed as error:
            if not has_fallback(error, asked):
                raise
            path, value, reason = "training.compile", False, f"the compiler failed ({error.problem})"
            warning = f"training.compile = false, as {reason}: layers are not compiled, and the run is slower"
        except CannotShare as error:
            if not has_fallback(error, asked):
                raise
            path, value, reason = "weights.bridge", "disk", f"single_copy cannot be ({error.problem})"
            warning = f"weights.bridge = disk, as {reason}: updates go through files, and the run is slower"
        except CannotShareKernels as error:
            if not has_fallback(error, asked):
                raise
            path, value, reason = "model.shared_kernels", False, error.problem
            warning = f"model.shared_kernels = false, as {reason}: engine and trainer round at different places"
        gc.collect()  # what was loaded for this plan
        replaced[path] = Derived(path, value, reason)
        prepared = _planned_again(prepared, replaced, warning)
        log.resolved(dump_resolved(prepared.loaded, prepared.plan.derived))
        log.warning(warning)


def has_fallback(error: BaseException | None, asked: RunConfig) -> bool:
    """Whether `with_fallbacks` repeats a run with these settings after this error."""
    match error:
        case CompilerFailed():
            return asked.training.compile == "auto"
        case CannotShare():
            return asked.weights.bridge == "auto" and asked.training.ranks == 1  # else it needs more GPUs
        case CannotShareKernels():
            return asked.model.shared_kernels == "auto" and not asked.run.exact
        case _:
            return False


def _planned_again(prepared: Prepared, replaced: dict[str, Derived], warning: str) -> Prepared:
    """Plan the run again with these settings fixed, and add `warning` to the plan."""
    asked = prepared.loaded.config.model_copy(update={"model": prepared.config.model})
    plan = make_plan(with_values(asked, {item.name: item.value for item in replaced.values()}), prepared.facts)
    # `prepare` finds the revision before it plans, so it is in no plan.
    found = [item for item in prepared.plan.derived if item.name == "model.revision"]
    plan = replace(plan, derived=(*found, *replaced.values(), *plan.derived), warnings=(*plan.warnings, warning))
    return replace(prepared, plan=plan)
