"""An engine of several workers whose processes are all killed from outside leaves nothing in shared memory, and nobody
else loses anything."""

from __future__ import annotations

import contextlib
import re
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest
from benchmarks.weight_sync.process_memory import pids_of

from ..mapped import maps_of
from .conftest import LiveEngine, create

pytestmark = [pytest.mark.engine, pytest.mark.timeout(580), pytest.mark.full]
SHARED = Path("/dev/shm")


def shared_by(processes: list[psutil.Process]) -> set[str]:
    """Names in shared memory that these processes have mapped."""
    return set(re.findall(r"/dev/shm/(\S+)$", maps_of(process.pid for process in processes), re.MULTILINE))


def killed(live: LiveEngine) -> set[str]:
    """What was shared by an engine's processes, which are all killed at once."""
    engine = psutil.Process(pids_of(live.engine)[0])
    family = [engine, *engine.children(recursive=True)]
    shared = shared_by(family)
    for end in ("suspend", "kill"):  # stopped first: none of them cleans up after another's death
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                getattr(process, end)()
    engine.wait(60)
    return shared


def named_after(live: LiveEngine) -> list[str]:
    """What is named after the engine's folder."""
    folder = Path(live.engine.socket).parent.name
    return [path.name for path in SHARED.iterdir() if path.name.startswith((f"psm_{folder}", f"sem.{folder}"))]


def test_what_killed_workers_had_in_shared_memory_is_removed(tiny_model: Path, tmp_path: Path):
    foreign = SharedMemory(create=True, size=64)
    with create(tiny_model, tmp_path, tensor_parallel_size=2) as live:
        live.engine.launch()
        live.call(live.engine.wait_ready(), 320)
        first = killed(live)
        # vLLM's workers have shared memory of their own only on a processor with AVX-512.
        has_avx512 = "avx512f" in Path("/proc/cpuinfo").read_text()
        for kind in ("psm_", *["vllm_dist_"] * has_avx512):
            assert sum(name.startswith(kind) for name in first) > 1, first
        assert all((SHARED / name).exists() for name in first), "nobody has removed it yet"
        live.call(live.engine.revive(), 320)
        assert not [name for name in first if (SHARED / name).exists()]
        second = killed(live)
        assert named_after(live)
    assert second.isdisjoint(first)
    assert not [name for name in second if (SHARED / name).exists()]
    assert named_after(live) == []
    assert (SHARED / foreign.name).exists()
    foreign.close()
    foreign.unlink()
