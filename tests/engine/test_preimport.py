"""An engine whose process had imported vLLM before anybody knew its settings."""

import asyncio
import subprocess
import sys
import time

import psutil
import pytest

from slipstream.inference.engine_process import EngineProcess
from slipstream.inference.plugin.start_marks import READY
from slipstream.inference.preimport import EngineAhead
from slipstream.records import GenerateRequest, SamplingParams

from .conftest import PROMPTS, settings_for


async def answers(process):
    try:
        await process.start()
        requests = [GenerateRequest(str(n), prompt, SamplingParams(16), seed=n) for n, prompt in enumerate(PROMPTS)]
        return await asyncio.gather(*map(process.client.generate, requests)), process.phases
    finally:
        await process.stop()


def engine(tmp_path, model, ahead):
    settings = settings_for(model)
    return EngineProcess(settings, tmp_path / "logs" / "engine.log", start_timeout_s=300, ahead=ahead)


@pytest.fixture
def ahead(tiny_model):
    with EngineAhead(settings_for(tiny_model).threads) as made:
        yield made


@pytest.mark.engine
@pytest.mark.full
def test_it_becomes_the_engine_and_answers_as_any(tiny_model, tmp_path, ahead, monkeypatch):
    imported = ahead._process
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")  # as libraries do that were imported since
    process = engine(tmp_path, tiny_model, ahead)
    found, phases = asyncio.run(answers(process))
    assert process.process is imported
    assert phases[0] == ("import vLLM", pytest.approx(ahead.began, abs=0.01))
    assert phases[-1][0] == READY
    assert "Loading safetensors" in process.log_path.read_text(), "from then on its log is the engine's"
    # Started again it is a process like any other, and answers alike.
    assert asyncio.run(answers(process))[0] == found
    assert process.process is not imported
    process.remove_files()


@pytest.mark.parametrize("reason", ["variables", "threads", "dead"])
def test_one_that_may_have_imported_something_else_is_not_taken(reason, tiny_model, tmp_path, ahead):
    imported = ahead._process
    environment = dict(ahead._environment)
    if reason == "dead":
        imported.kill()
        imported.wait(60)
    elif reason == "threads":
        environment["OMP_NUM_THREADS"] = "7"
    else:
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    log = tmp_path / "logs" / "engine.log"
    assert ahead.take(tmp_path / "settings", environment, log) is None
    said = {"variables": "VLLM_USE_V2_MODEL_RUNNER", "threads": "OMP_NUM_THREADS", "dead": "code -9"}[reason]
    assert "does not become the engine" in log.read_text()
    assert said in log.read_text()
    assert imported.poll() is not None, "it waits for nobody any more"
    assert ahead.take(tmp_path / "settings", environment, log) is None


@pytest.mark.full
def test_it_becomes_one_engine_and_is_then_that_engines(tmp_path, ahead):
    """A run's teacher, which is made by the same maker, gets another; and the engine is not ended with the context."""
    log = tmp_path / "logs" / "engine.log"
    taken = ahead.take(tmp_path / "no settings", ahead._environment, log)
    assert taken is not None
    assert ahead.take(tmp_path / "others", ahead._environment, tmp_path / "logs" / "teacher.log") is None
    ahead.__exit__()
    assert taken.wait(200) == 1, "it is not killed, and ends by what it was told"
    assert "no settings" in log.read_text()
    assert not (tmp_path / "logs" / "teacher.log").exists()


def test_it_ends_where_nobody_takes_it(tiny_model):
    with EngineAhead(1) as ahead:
        family = [psutil.Process(ahead._process.pid)]
        folder = ahead._folder
        assert folder.stat().st_mode & 0o077 == 0
    assert not psutil.wait_procs(family, timeout=60)[1]
    assert not folder.exists()


@pytest.mark.full
@pytest.mark.real_start
def test_it_ends_with_a_supervisor_that_is_killed_while_it_imports(tmp_path):
    script = "import time; from slipstream.inference.preimport import EngineAhead\na = EngineAhead(1)\n"
    script += "print(a._process.pid, flush=True)\ntime.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as supervisor:
        imports = psutil.Process(int(supervisor.stdout.readline()))
        time.sleep(1.0)
        supervisor.kill()
    assert not psutil.wait_procs([imports], timeout=60)[1]
