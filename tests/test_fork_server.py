"""A forked child is what a started one is; see `fork_server`."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.inference.engine_process import EngineProcess
from slipstream.inference.preimport import engine_environment
from slipstream.launch.startup.compile_caches import persistent_caches
from slipstream.processes import launchers
from slipstream.records import GenerateRequest, SamplingParams

from . import fork_server
from .engine.conftest import PROMPTS, settings_for
from .engine.conftest import tiny_model as tiny_model
from .engine.workers import LOOK_VARIABLE, LookingWorker

pytestmark = pytest.mark.skipif(
    fork_server.VARIABLE in os.environ, reason=f"{fork_server.VARIABLE} is set: nothing is forked"
)
ADDED = {"tests", "setproctitle", "vllm", "requests", "slipstream.processes"}
"""Packages of what a fork server imports beyond what this engine needs: other engines need it, or the server itself.
requests has a name of its own for every module of urllib3 that is there when it is imported."""
OWN = "VLLM_DIST_IDENT", "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME", "SLIPSTREAM_MARKS", "SLIPSTREAM_ENDING", "TMPDIR"
"""Variables that each engine's process has of its own."""
COMMAND = [sys.executable, "-m", "slipstream.cli"]


async def look(model: Path, folder: Path) -> dict:
    """Start an engine, and have it say what it is and what it generates."""
    worker = f"{LookingWorker.__module__}.{LookingWorker.__name__}"
    settings = settings_for(model, options={"worker_extension_cls": worker})
    process = EngineProcess(settings, folder / "engine.log", start_timeout_s=300)
    try:
        await process.start()
        kind = type(process.process._process)
        requests = [GenerateRequest(str(n), prompt, SamplingParams(16), seed=n) for n, prompt in enumerate(PROMPTS)]
        answers = await asyncio.gather(*map(process.client.generate, requests))
        return {"health": await process.client.health(), "answers": answers, "kind": kind}
    finally:
        await process.stop()
        process.remove_files()


def package_of(module: str) -> str:
    """Its package; within Slipstream the one below that."""
    return ".".join(module.split(".")[: 2 if module.startswith("slipstream.") else 1])


@pytest.mark.engine
@pytest.mark.full
def test_a_forked_engine_is_the_same_as_one_that_was_started(tiny_model, tmp_path, monkeypatch):
    found = {}
    for kind in (subprocess.Popen, fork_server.ForkedPopen):
        monkeypatch.setattr(launchers, "popen", kind)
        monkeypatch.setenv(LOOK_VARIABLE, str(tmp_path / "looks.json"))
        found[kind] = asyncio.run(look(tiny_model, tmp_path)), json.loads((tmp_path / "looks.json").read_text())
    (started, real), (forked, ours) = found.values()
    assert (started.pop("kind"), forked.pop("kind")) == (subprocess.Popen, fork_server.ForkedPopen)
    assert forked == started
    modules = {name: set(each.pop("modules")) for name, each in (("real", real), ("ours", ours))}
    environments = [each.pop("environment") for each in (real, ours)]
    for name in OWN:
        assert len({environment.pop(name) for environment in environments}) == 2, "each has its own"
    # A library adds to it whenever it is imported.
    assert len({frozenset(environment.pop("LD_LIBRARY_PATH").split(":")) for environment in environments}) == 1
    assert set(environments[0].items()) ^ set(environments[1].items()) == set()
    assert ours == real
    assert modules["real"] - modules["ours"] == set()
    added = {package_of(name) for name in modules["ours"] - modules["real"]}
    assert added <= ADDED


def test_what_tests_start_is_forked(monkeypatch):
    """Otherwise nothing fails, and the tests take half as long again."""
    monkeypatch.setenv("OMP_NUM_THREADS", fork_server.NUM_THREADS)
    with persistent_caches(pytest.fail):
        environment = engine_environment(os.environ)
        assert fork_server.forks([sys.executable, "-m", "slipstream.inference.plugin.main"], environment) == "engine"
        assert fork_server.forks(COMMAND, {**os.environ, "TOKENIZERS_PARALLELISM": "false"}) == "trainer"
