"""A forked child is what a started one is; see `fork_server`."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from slipstream.config.environment import EnvironmentConfig
from slipstream.envs.base import RewardError
from slipstream.envs.scoring.pool import ScorerPool
from slipstream.inference.engine_process import EngineProcess
from slipstream.inference.preimport import engine_environment
from slipstream.launch.startup.compile_caches import persistent_caches
from slipstream.processes import launchers
from slipstream.records import GenerateRequest, SamplingParams, Task

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


LOOKS = """
import json, os, resource, signal, sys

def tasks(split, num_tasks, seed, path=""):
    return [{"prompt": "a", "answer": path}]

def reward(task, completion):
    found = {
        "environment": dict(os.environ), "argv": sys.argv, "command": sys.orig_argv, "path": sys.path,
        "folder": os.getcwd(), "descriptors": sorted(os.listdir("/proc/self/fd")), "modules": sorted(sys.modules),
        "session": os.getsid(0) == os.getpid(), "limit": resource.getrlimit(resource.RLIMIT_DATA),
        "handlers": {number: str(signal.getsignal(number)).split(" at ")[0] for number in signal.valid_signals()},
        "users": open("/proc/self/uid_map").read(), "main": sys.modules["__main__"].__spec__.name,
        "streams": [(each.fileno(), each.encoding, each.errors) for each in (sys.stdout, sys.stderr)],
    }
    with open(task.answer, "w") as file:
        json.dump(found, file)
    if completion == "raise":
        print("said before")
        raise ValueError(completion)
    if completion == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0
"""


async def look_at_worker(folder):
    """What a reward's worker is, and what became of three rewards."""
    (folder / "looks.py").write_text(LOOKS)
    path = folder / "looks.json"
    config = EnvironmentConfig(name=str(folder / "looks.py"), settings={"path": str(path)})
    task, said = Task("t", (), answer=str(path)), []
    async with ScorerPool(config) as pool:
        process = pool._rewards._slots[0].worker._process
        for completion in ("a", "raise", "kill"):
            try:
                said.append((await pool.score(task, completion)).reward)
            except RewardError as error:
                said.append((type(error), str(error), error.details))
    is_forked = isinstance(process._child._process, fork_server.ForkedPopen)
    return is_forked, said, process.poll(), json.loads(path.read_text())


def test_a_forked_worker_is_the_same_as_one_that_was_started(tmp_path, monkeypatch):
    (was_forked, *ours), our_look = (found := asyncio.run(look_at_worker(tmp_path)))[:3], found[3]
    monkeypatch.setattr(launchers, "popen", subprocess.Popen)
    (was_started, *theirs), their_look = (found := asyncio.run(look_at_worker(tmp_path)))[:3], found[3]
    assert (was_forked, was_started) == (True, False)
    assert ours == theirs
    assert ours[0][0] == 1.0
    assert set(their_look.pop("modules")) - set(our_look.pop("modules")) == set()
    assert our_look == their_look


def fork(*arguments, **options):
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    process = fork_server.ForkedPopen([*COMMAND, *arguments], env=environment, **options)
    assert process._link is not None, "it was started"
    return process


def test_a_forked_command_has_its_streams_and_exit_code():
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with fork("--version", **pipes) as process:
        out, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "")
        assert out.strip()
        assert psutil.pid_exists(process.pid) is False
    with fork("nonsense", **pipes) as process:
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (2, "")
        assert "nonsense" in err


def test_a_forked_command_is_killed_and_waited_for_as_any_other(tmp_path):
    # It waits for a fifo, so that it is there when it is killed.
    os.mkfifo(tmp_path / "run.toml")
    process = fork("plan", "run.toml", cwd=tmp_path, start_new_session=True)
    assert os.getsid(process.pid) == process.pid
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)
    assert process.pid in fork_server.forked_by({os.getpid()})
    process.send_signal(signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL
    assert process.poll() == -signal.SIGKILL


def test_what_libraries_read_early_has_to_be_the_same():
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    assert fork_server.forks(COMMAND, environment) == "trainer"
    assert fork_server.forks(COMMAND, environment | {"ANY": "1", "PYTHONHOME": ""}) == "trainer"
    assert fork_server.forks(COMMAND, environment | {"OMP_NUM_THREADS": "2"}) is None
    assert fork_server.forks(COMMAND, environment | {"PYTHONPATH": "/elsewhere"}) is None
    assert fork_server.forks(COMMAND, environment | {"VLLM_USE_V1": "0"}) is None
    assert fork_server.forks([sys.executable, "-c", "pass"], environment) is None
    assert fork_server.forks(["sh", "-m", "slipstream.cli"], environment) is None


def test_what_tests_start_is_forked(monkeypatch):
    """Otherwise nothing fails, and the tests take half as long again."""
    monkeypatch.setenv("OMP_NUM_THREADS", fork_server.NUM_THREADS)
    with persistent_caches(pytest.fail):
        environment = engine_environment(os.environ)
        assert fork_server.forks([sys.executable, "-m", "slipstream.inference.plugin.main"], environment) == "engine"
        assert fork_server.forks(COMMAND, {**os.environ, "TOKENIZERS_PARALLELISM": "false"}) == "trainer"


@pytest.mark.real_start
def test_a_marked_test_starts_its_children_as_users_do():
    assert launchers.popen is subprocess.Popen


@pytest.mark.full
def test_children_end_with_their_server(tmp_path):
    os.mkfifo(tmp_path / "run.toml")
    (tmp_path / "forks").mkdir()
    servers = fork_server.ForkServers(tmp_path / "forks")
    before = fork_server._sockets, fork_server._owned
    with servers.install():
        process = fork("plan", "run.toml", cwd=tmp_path)
        (tmp_path / "seen").touch()
    launchers.popen = fork_server.ForkedPopen
    fork_server._sockets, fork_server._owned = before
    assert process.wait(30) == -signal.SIGKILL
