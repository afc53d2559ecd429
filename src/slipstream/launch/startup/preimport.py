"""What a run needs in any case begins before its plan is made: the import of vLLM, in the process that becomes its
engine."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from slipstream.config import RunConfig
from slipstream.config.traits import engine_workers, uses_engine
from slipstream.inference.plugin.preimport import HAS_GPU
from slipstream.inference.preimport import EngineAhead
from slipstream.launch.plan.machine import usable_cpus


@contextlib.contextmanager
def engine_ahead(config: RunConfig) -> Generator[EngineAhead | None]:
    """Inside, vLLM is imported for the engine of this run, whose settings are not planned yet; None where it needs
    none. What the plan decides is taken for what it most likely will be: where that is wrong, the engine is started
    as ever."""
    if not uses_engine(config):
        yield None
        return
    threads = None
    if not HAS_GPU:
        all_threads = config.run.threads if isinstance(config.run.threads, int) else usable_cpus()
        threads = max(1, all_threads // engine_workers(config))
    with EngineAhead(threads) as ahead:
        yield ahead
