"""Owns one child, and says what it notices of it; `python -m tests.processes.owner KIND FOLDER`. Where the real child
takes long to start, `small_child` stands for it below the real owner."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from slipstream.processes import guard, launchers
from slipstream.processes.channel import Channel
from slipstream.processes.launchers import LOCAL

DEADLINE_S = 3.0
"""How long each owner waits for its child's next sign; in runs it is a setting, or minutes."""


class Small:
    """Starts a small child of the same kind of output in the place of a large one."""

    def launch(self, module, arguments=(), environment=os.environ, resources=launchers.Resources(), node="", **options):  # noqa: B008
        return LOCAL.launch("tests.processes.small_child", ["quiet"], environment, resources, **options)


def tell(**fields):
    print(json.dumps(fields), flush=True)


def descendants(pid):
    return [pid, *(each for child in guard.children_of(pid) for each in descendants(child))]


async def engine(folder):
    from slipstream.inference.engine_process import EngineProcess
    from slipstream.inference.settings import EngineSettings

    settings = EngineSettings("", "float32", 8, 8)
    made = EngineProcess(settings, folder / "log", start_timeout_s=60, silence_s=DEADLINE_S, launcher=Small())
    made.launch()
    yield made.process.pid
    try:
        await made.wait_ready()
    finally:
        made.kill()
        made.remove_files()


async def orchestrator(folder):
    from slipstream.launch.parts.process import OrchestratorProcess

    made = object.__new__(OrchestratorProcess)
    made._process, made._log, made._name = Small().launch("", output=folder / "log"), folder / "log", "the orchestrator"
    made._run = SimpleNamespace(folder=folder)
    yield made._process.pid
    since = time.monotonic()
    try:
        while (error := made._ended()) is None and not (stopped(made._process.pid) and late(since)):
            await asyncio.sleep(0.05)
        raise error or made._silent(DEADLINE_S)
    finally:
        made._process.end(0.0)


def late(since):
    return time.monotonic() - since > DEADLINE_S


def stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


async def rank(folder):
    from slipstream.launch.ranks import processes as ranks

    child = Small().launch("", output=folder / "log")
    made = object.__new__(ranks.RankProcesses)
    made._size, made._timeout_s, made._nodes = 2, DEADLINE_S, None
    made._ranks = [ranks._Rank(1, child, Channel(child.socket), folder / "log")]
    yield child.pid
    try:
        while True:
            await asyncio.to_thread(made._answers, "train", DEADLINE_S)
    finally:
        child.end(0.0)


async def reward_worker(folder):
    from slipstream.envs.scoring.process import Setup, Worker
    from tests.envs.environments import config

    section = config(timeout_s=600.0)
    worker = await Worker.start(Setup(section.model_dump_json(), 600.0, 1 << 33, 64, True))
    loop = asyncio.get_running_loop()
    await worker.receive(loop.time() + 60, 60)
    yield worker.pid
    try:
        await worker.receive(loop.time() + DEADLINE_S, DEADLINE_S)
    finally:
        await worker.kill()


async def hosted_environment(folder):
    from slipstream.envs.hosted.process import Host
    from tests.envs.environments import config

    exclude = {"num_train_tasks", "reward_workers"}
    own = config().model_copy(update={"processes": 0}).model_dump_json(exclude=exclude)
    host = await Host.start(sys.executable, {"module": "own", "section": own, "passed": "", "interrupt_s": None})
    yield host._process.pid
    host._frames["e"] = asyncio.Queue()
    try:
        async with asyncio.timeout(DEADLINE_S):
            await host.next_of("e")
    finally:
        await host.kill()


async def python_call(folder):
    from slipstream.python.protocol import Call
    from slipstream.python.run_handle import Job

    launchers.LOCAL = Small()
    job = Job(Call("train", {}), shown=False)
    yield job.process.pid
    outcome = await asyncio.to_thread(job.follow)
    raise RuntimeError(f"{outcome.error}: {outcome.message}")


async def main(kind, folder):
    launchers.popen = subprocess.Popen
    owning = globals()[kind](Path(folder))
    pid = await anext(owning)
    while len(pids := descendants(pid)) < (2 if kind in ("reward_worker", "hosted_environment") else 1):
        await asyncio.sleep(0.05)
    tell(pids=pids)
    try:
        await anext(owning)
    except Exception as error:  # noqa: BLE001 (it is what the test asks for)
        tell(noticed=f"{type(error).__name__}: {error}".split("\n")[0])
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
