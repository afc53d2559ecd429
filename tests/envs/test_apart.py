"""A user's environment in a process of its own: what it does there, and what it cannot do to the run."""

import asyncio
import re
import threading
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from benchmarks.scripted_engine import ScriptedEngine
from tests.orchestrator.test_orchestrator import END, Letters, say

from slipstream.config.schema import EnvironmentConfig
from slipstream.envs.registry import load_environment, played
from slipstream.envs.scoring.pool import ScorerPool
from slipstream.errors import ConfigError, EnvironmentFault
from slipstream.orchestrator.rollouts import RolloutRunner
from slipstream.records import Message, SamplingParams, Task

SOURCE = """
import asyncio, os, time
from slipstream.envs import Environment, Episode, Message, Score, Task

def blocks_here():
    time.sleep(600)

class Talk(Environment):
    max_turns = 2

    def tasks(self, split, num_tasks):
        return [Task("t", (Message("user", "plain"),), "ok")]

    async def setup_episode(self, task):
        return {"pid": os.getpid()}

    async def run(self, task, policy):
        how = task.prompt[0].content
        if how == "block":
            blocks_here()
        if how == "block for ever":
            while True:
                try:
                    time.sleep(600)
                except BaseException:
                    pass
        if how == "block a while":
            for _ in range(9):  # as the other thread's looks: both stand still where the machine does
                time.sleep(0.25)
        if how == "raise":
            raise KeyError("odd")
        if how == "exit":
            os._exit(3)
        if how == "pause":
            await asyncio.sleep(0.5)
        if how == "nothing":
            await asyncio.sleep(600)
        reply = await policy.chat(task.prompt)
        await policy.chat([*task.prompt, reply.message, Message("user", "on")])
        return Episode("", num_turns=2, metrics={"pid": float(policy.state["pid"])})

    def score(self, task, completion):
        return Score(1.0)
"""


def config_in(folder):
    (folder / "talk.py").write_text(SOURCE)
    return EnvironmentConfig(name=str(folder / "talk.py"), processes=1, reward_workers=1, reward_timeout_s=60.0)


@pytest.fixture
def config(tmp_path):
    return config_in(tmp_path)


class Played:
    """The environment at work, and how long the event loop was held up."""

    def __init__(self, config, log_folder, run_timeout_s):
        config = config.model_copy(update={"run_timeout_s": run_timeout_s})
        self.config, self.run_timeout_s = config, run_timeout_s
        self.environment = played(load_environment(config), config)
        self.environment.log_folder = log_folder

    async def __aenter__(self):
        self.pool = await ScorerPool(self.config).__aenter__()
        await self.environment.setup()
        engine = ScriptedEngine(say("hm"))
        limits = {"request_timeout_s": 60.0, "run_timeout_s": self.run_timeout_s, "context_length": 300}
        self.runner = RolloutRunner(self.environment, self.pool, Letters(), engine, **limits)
        limits["run_timeout_s"] = 60.0
        self.patient = RolloutRunner(self.environment, self.pool, Letters(), engine, **limits)
        return self

    async def __aexit__(self, *_):
        await self.environment.close()
        await self.pool.__aexit__(None, None, None)

    async def rollout(self, how):
        """What is to end well may take its time."""
        task = Task(how, (Message("user", how),), "ok")
        sampling = SamplingParams(max_tokens=4, stop_token_ids=(END,))
        runner = self.patient if how == "plain" else self.runner
        return await runner.run(task, rollout_id=how, group_id=how, sampling=sampling, seed=1)


one_loop = pytest.mark.asyncio(loop_scope="module")
"""The process that plays episodes belongs to an event loop."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def with_2_s(tmp_path_factory):
    """An episode may take two seconds; whatever it does, another process plays on."""
    folder = tmp_path_factory.mktemp("two")
    async with Played(config_in(folder), folder, 2.0) as played:
        yield played


async def lag_of(work):
    """What `work` returns, and the longest time for which the loop did nothing else while another thread ran."""
    worst, num_ticks, task, ended = 0, 0, asyncio.ensure_future(work), threading.Event()

    def tick():
        nonlocal num_ticks
        while not ended.wait(0.02):
            num_ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    while not task.done():
        before = num_ticks
        await asyncio.sleep(0.02)
        worst = max(worst, num_ticks - before)
    ended.set()
    thread.join()
    return task.result(), 0.02 * worst


@pytest.mark.parametrize(
    ("how", "stop", "text"),
    [("block", "timeout", "blocks_here"), ("raise", "error", "KeyError: 'odd'"), ("exit", "error", "exit code 3")],
)
@one_loop
async def test_what_it_does_costs_its_own_episode(with_2_s, how, stop, text, monkeypatch):
    monkeypatch.setattr("slipstream.processes.guarded._OUTPUT_WAIT_S", 60.0)
    assert (await with_2_s.rollout("plain")).outcome == "done"
    failed, lag = await lag_of(with_2_s.rollout(how))
    assert (failed.outcome, failed.stop) == ("environment_error", stop), failed.error
    assert text in failed.error
    assert lag < 1.0, "the run's event loop is not held up"
    assert (await with_2_s.rollout("plain")).outcome == "done", "another process plays on"
    if how == "block":
        assert "blocks_here" in (with_2_s.environment.log_folder / "environment.log").read_text()


@pytest.mark.full
async def test_an_episode_that_blocks_is_named_and_interrupted_and_costs_no_other(config, tmp_path):
    warnings = []
    async with Played(config, tmp_path, 6.0) as played:
        played.environment.on_warning = warnings.append
        others = [asyncio.create_task(played.rollout("pause")) for _ in range(5)]
        blocks = await played.rollout("block")
        assert (blocks.outcome, blocks.stop) == ("environment_error", "timeout")
        assert "a synchronous call blocked all episodes of the process for 3 s" in blocks.error
        assert "blocks_here" in blocks.error
        others = await asyncio.gather(*others)
        assert {rollout.outcome for rollout in others} == {"done"}, [rollout.error for rollout in others]
        assert len({rollout.metrics["pid"] for rollout in others}) == 1
        after = await played.rollout("block a while")
        assert (after.outcome, after.metrics["pid"]) == ("done", others[0].metrics["pid"]), "it was not killed"
    where = (
        r"environment Talk blocks its other episodes: a synchronous call \((blocks_here|run), line \d+ of .*talk.py\) "
    )
    assert [bool(re.match(where + "has held up its process for", text)) for text in warnings] == [True, True], warnings


@pytest.mark.full
async def test_many_that_block_one_after_the_other_cost_no_other(config, tmp_path):
    """As a group does whose task makes `run` block: together they take longer than any deadline."""
    async with Played(config, tmp_path, 8.0) as played:
        rollouts = [played.rollout("pause"), *(played.rollout("block") for _ in range(4)), played.rollout("pause")]
        first, *blocked, last = await asyncio.gather(*rollouts)
        assert (first.outcome, last.outcome) == ("done", "done"), first.error + last.error
        assert {rollout.outcome for rollout in blocked} == {"environment_error"}
        assert all("a synchronous call blocked all episodes" in rollout.error for rollout in blocked)


@pytest.mark.full
@one_loop
async def test_what_cannot_be_interrupted_is_killed(with_2_s):
    blocks = await with_2_s.rollout("block for ever")
    assert (blocks.outcome, blocks.stop) == ("environment_error", "timeout")
    assert "its process hung" in blocks.error
    assert "talk.py" in blocks.error
    assert (await with_2_s.rollout("plain")).outcome == "done", "another process plays on"


@one_loop
async def test_an_episode_that_waits_for_ever_costs_no_other(with_2_s):
    waits, *others = await asyncio.gather(with_2_s.rollout("nothing"), *(with_2_s.rollout("plain") for _ in range(5)))
    assert (waits.outcome, waits.stop) == ("environment_error", "timeout")
    assert {rollout.outcome for rollout in others} == {"done"}


async def test_an_episode_that_is_given_up_before_it_has_begun_costs_no_other(config, tmp_path):
    """The process stands still meanwhile, and finds both requests at once."""
    async with Played(config, tmp_path, 60.0) as played:
        assert (await played.rollout("plain")).outcome == "done"
        host = played.environment.keepers[0].host
        (process,) = psutil.Process(host._process.pid).children()
        process.suspend()
        given_up = asyncio.create_task(played.rollout("plain"))
        async with asyncio.timeout(60):
            while len(host._frames) == 1:
                await asyncio.sleep(0.01)
        given_up.cancel()
        await asyncio.sleep(0.1)
        process.resume()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        after = await played.rollout("plain")
        assert (after.outcome, after.metrics["pid"]) == ("done", process.pid), "it was not killed"
    assert not psutil.pid_exists(process.pid)


async def test_each_of_several_processes_has_its_own_episodes(config, tmp_path):
    """An episode begins in the process with the fewest; the end of a process ends its own episodes only."""
    config = config.model_copy(update={"processes": 3})
    async with Played(config, tmp_path, 60.0) as played:
        keepers = played.environment.keepers
        before = [each.host for each in keepers]
        assert len({host._process.pid for host in before}) == 3, "all start at once"
        waiting = [asyncio.create_task(played.rollout("nothing")) for _ in range(7)]
        async with asyncio.timeout(60):
            while sum(len(host._frames) - 1 for host in before) < 7:
                await asyncio.sleep(0.01)
        assert [each.num_playing for each in keepers] == [3, 2, 2]
        waiting[1].cancel()
        await asyncio.wait([waiting[1]])
        assert [each.num_playing for each in keepers] == [3, 1, 2]
        exits = await played.rollout("exit")
        assert (exits.outcome, keepers[1].host) == ("environment_error", None)
        (lost,), others = await asyncio.wait([waiting[n] for n in (0, 2, 3, 4, 5, 6)], return_when="FIRST_COMPLETED")
        assert (lost, lost.result().outcome) == (waiting[4], "environment_error")
        after = await asyncio.gather(*(played.rollout("pause") for _ in range(6)))
        assert {rollout.outcome for rollout in after} == {"done"}, [rollout.error for rollout in after]
        assert [each.host is host for each, host in zip(keepers, before, strict=True)] == [True, False, True]
        assert len({rollout.metrics["pid"] for rollout in after}) == 3, "another process has taken its place"
        assert not any(task.done() for task in others)
        pids = [psutil.Process(each.host._process.pid).pid for each in keepers]
        for task in others:
            task.cancel()
        await asyncio.wait(others)
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.full
async def test_one_of_several_processes_that_hangs_costs_no_episode_of_another(config, tmp_path):
    config = config.model_copy(update={"processes": 2})
    async with Played(config, tmp_path, 2.0) as played:
        keepers = played.environment.keepers
        plays_on = keepers[1].host
        hangs, others = await asyncio.gather(played.rollout("block for ever"), played.rollout("plain"))
        assert (hangs.outcome, hangs.stop, others.outcome) == ("environment_error", "timeout", "done")
        assert "its process hung" in hangs.error
        assert "talk.py" in hangs.error
        assert keepers[1].host is plays_on
        assert {(await played.rollout("plain")).outcome for _ in range(2)} == {"done"}


async def test_what_cannot_be_apart_is_said(config, tmp_path):
    source = Path(config.name)
    source.write_text(
        source.read_text() + "\nimport sys\nif 'slipstream_environment_process' in sys.modules: raise OSError\n"
    )
    environment = played(load_environment(config), config)
    with pytest.raises(EnvironmentFault, match="the process of Talk did not start"):
        await environment.setup()
    with pytest.raises(ConfigError, match=r"environment\.processes has no effect"):
        load_environment(EnvironmentConfig(name="verifiers/x", processes=1))
