"""What happens before the first step: vLLM is imported early, compiled code is cached, stages are timed.

Importing this package imports neither torch nor vLLM.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from slipstream.config import RunConfig
from slipstream.config.traits import engine_workers, starts_engines
from slipstream.inference.plugin.preimport import HAS_GPU
from slipstream.inference.preimport import EngineAhead
from slipstream.plan.machine import usable_cpus


@contextlib.contextmanager
def preimport_vllm(config: RunConfig) -> Generator[EngineAhead | None]:
    """Import vLLM in a child process while model and data are read; the child then becomes the run's engine.

    Yields None for a run without an engine. The plan is not made yet, so the number of threads is a guess:
    where it proves wrong, the child is dropped and the engine starts in a new process.
    """
    if not starts_engines(config) or config.cluster.nodes > 1:  # then none may be on this host
        yield None
        return
    threads = None
    if not HAS_GPU:
        all_threads = config.run.threads if isinstance(config.run.threads, int) else usable_cpus()
        threads = max(1, all_threads // engine_workers(config))
    with EngineAhead(threads) as ahead:
        yield ahead
