"""A user's environment acts the same in the run's process and in one of its own (`environment.processes`): its
episodes, what it is told and asked to close, and what the run says of its failures."""

import asyncio
import contextlib

import msgspec
import pytest
from benchmarks.scripted_engine import ScriptedEngine
from tests.orchestrator.test_orchestrator import END, say
from tests.orchestrator.test_orchestrator import Letters as Plain

from slipstream.config.python_objects import give
from slipstream.config.schema import EnvironmentConfig
from slipstream.envs.from_python import pack_environment
from slipstream.envs.hosted import apart as apart_module
from slipstream.envs.hosted.apart import placement
from slipstream.envs.lifetime import in_use
from slipstream.envs.registry import load_environment, played
from slipstream.envs.scoring.pool import ScorerPool
from slipstream.envs.tools.schemas import with_tools
from slipstream.errors import EnvironmentFault
from slipstream.orchestrator import retries
from slipstream.orchestrator import rollouts as rollouts_module
from slipstream.orchestrator.retries import Retries
from slipstream.orchestrator.rollouts import RolloutRunner
from slipstream.records import Message, SamplingParams, Task

SOURCE = """
import asyncio
from pathlib import Path
import numpy
from slipstream.envs import ContextFull, Environment, Episode, Message, Score, ToolCall, Task

def twice(x: int) -> int:
    "Doubles."
    if x > 9:
        raise ValueError("too large")
    return 2 * x

class Talk(Environment):
    max_turns = 3
    tools = (twice,)

    def __init__(self, seed=0, diary="", how=""):
        super().__init__(seed)
        self.diary, self.how = Path(diary), how

    def note(self, *words):
        with self.diary.open("a") as file:
            print(*words, file=file)

    def tasks(self, split, num_tasks):
        return [Task("t", (Message("user", "q"),), "ok")]

    async def setup(self):
        self.note("setup", self.seed)
        if self.how == "no server":
            raise OSError("no server")
        if self.how == "slow setup":
            await asyncio.sleep(60)

    async def close(self):
        self.note("close")
        if self.how == "no close":
            raise OSError("gone")

    async def setup_episode(self, task):
        if task.info["how"] == "no state":
            raise OSError("no state")
        return {"of": task.id}

    async def close_episode(self, task, state):
        self.note("closed", task.id, state)
        if task.info["how"] == "not closed":
            raise OSError("episode")
        if task.info["how"] == "never closed":
            await asyncio.sleep(60)

    async def run(self, task, policy):
        how, messages = task.info["how"], list(task.prompt)
        self.note("run", how)
        if how == "error":
            raise ValueError("odd")
        if how == "wait":
            self.note("waits")
            await asyncio.sleep(60)
        if how == "nothing":
            return None
        if how == "own messages":
            said = [Message("user", task.prompt[-1].content)]
            task.info["kept"] = [*task.info.get("kept", []), "one"]
            replies = [await policy.chat(said), await policy.chat([Message("system", "s"), *task.prompt]),
                       await policy.chat(said, tools=())]
            said += [Message("assistant", replies[0].text), Message("user", "on")]
            await policy.chat(said)
            return Episode(" ".join(task.info["kept"]), num_turns=4)
        reply = await policy.chat(messages, max_tokens=3 if how == "short" else None)
        if how == "full":
            try:
                await policy.chat([Message("user", "x" * 500)])
            except ContextFull as full:
                return Episode(str(full), "truncated", stop="context_full")
        if how == "fuller":
            await policy.chat([Message("user", "x" * 500)])
        if how == "swallowed":
            try:
                await policy.chat([Message("user", "x" * 500)])
            except Exception as error:
                self.note(type(error).__name__)
        results = await asyncio.gather(*(policy.call_tool(ToolCall(n, {"x": x})) for n, x in
                                         (("twice", 1), ("twice", 20), ("thrice", 1))))
        messages += [reply.message, *(Message("tool", r.content, extra={"name": r.failure}) for r in results)]
        replies = await asyncio.gather(*(policy.chat([*messages, Message("user", c)]) for c in "ab"))
        return Episode(replies[0].text, num_turns=3, metrics={"x": numpy.float32(0.5), "n": policy.state["of"] == "t"},
                       turn_rewards=(0.5, 0.25, 1.0))

    def score(self, task, completion):
        return Score(float(len(completion)))
"""
HOWS = (
    *("plain", "short", "full", "fuller", "swallowed", "error", "nothing", "no state", "not closed", "wait"),
    *("lost turn", "own messages"),
)


class Letters(Plain):
    """Of a message its tools and its role, too."""

    def render(self, messages):
        tools = "".join(tool["name"] for message in messages for tool in message.tools)
        return [ord(letter) for message in messages for letter in f"{tools}{message.role[0]}{message.content}|"]


def config_of(tmp_path, apart, how=""):
    (tmp_path / "talk.py").write_text(SOURCE)
    settings = {"diary": str(tmp_path / f"diary_{apart}"), "how": how}
    patient = {"run_timeout_s": 1.5, "reward_timeout_s": 60.0, "tool_timeout_s": 60.0}
    return EnvironmentConfig(
        name=str(tmp_path / "talk.py"), processes=int(apart), reward_workers=1, settings=settings, **patient
    )


@contextlib.asynccontextmanager
async def at_work(config, warn, environment=None):
    """A runner, and what the engine was asked."""
    environment = environment or played(load_environment(config), config)
    asked = []
    engine = ScriptedEngine(say("<think>m</think>hm"))

    def on_request(request):
        asked.append((request.id.partition("-")[0], request.seed, request.prompt_ids, request.sampling.max_tokens))

    engine.on_request = on_request
    limits = {"request_timeout_s": 60.0, "run_timeout_s": config.run_timeout_s, "context_length": 300}
    async with in_use(environment, config.run_timeout_s, warn), ScorerPool(config) as pool:
        how = {"retries": Retries(2, 60.0), "warn": warn}
        yield RolloutRunner(environment, pool, Letters(), engine, **limits, **how), engine, asked


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(retries, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(apart_module, "_ANSWER_S", 60.0)


both_ways = pytest.mark.parametrize("apart", [False, True], ids=["here", "apart"])


async def play(runner, how):
    task = Task("t", (Message("user", "q", tools=({"name": "twice"},)),), "ok", {"how": how})
    return await attempt(runner, task, how)


async def attempt(runner, task, how):
    sampling = SamplingParams(max_tokens=40, stop_token_ids=(END,))
    runner._run_timeout_s = 1.5 if how == "wait" else 60.0
    return await runner.run(task, rollout_id=how, group_id=how, sampling=sampling, seed=7)


def kept_of(rollout):
    """All of a rollout that must not depend on where it was played; of an error its last line but what is said of the
    process."""
    kept = msgspec.to_builtins(rollout)
    del kept["seconds"]
    lines = [line for line in kept["error"].splitlines() if line.strip() and not line.startswith("(it is played")]
    kept["error"] = lines[-1].strip() if lines else ""
    return kept


async def whole_run(config, diary):
    """Everything that is to be the same."""
    warnings, kept = [], {}
    async with at_work(config, warnings.append) as (runner, engine, asked):
        for how in HOWS:
            lost = iter([None, "refused", "refused"] if how == "lost turn" else [])
            engine.abort = lambda request, lost=lost: next(lost, None)
            kept[how] = kept_of(await play(runner, how))
    return kept, asked, warnings, diary.read_text().splitlines()


async def test_episodes_are_the_same_in_both_ways(tmp_path):
    here = await whole_run(config_of(tmp_path, False), tmp_path / "diary_False")
    there = await whole_run(config_of(tmp_path, True), tmp_path / "diary_True")
    for how in HOWS:
        assert here[0][how] == there[0][how], how
    assert here[1:] == there[1:]
    kept, asked, warnings, diary = here
    assert (kept["plain"]["outcome"], kept["plain"]["num_thinking"]) == ("done", len("<think>m</think>"))
    assert kept["plain"]["reward"] == len("<think>m</think>hm") + 1.75
    assert kept["plain"]["metrics"] == {"x": 0.5, "n": 1.0, "tool_calls": 3.0, "tool_failures": 2.0}
    assert [kept[how]["stop"] for how in ("full", "fuller", "wait", "error")] == [
        *("context_full", "context_full", "timeout", "error")
    ]
    assert kept["nothing"]["error"] == "TypeError: run() returned a NoneType: return an Episode"
    assert kept["no state"]["error"] == "OSError: no state"
    assert warnings == ["close_episode() of environment Talk failed: OSError: episode"]
    assert diary.count("closed t {'of': 't'}") == len(HOWS) - 1
    assert diary.count("closed t None") == 1
    assert (diary[0], diary[-1]) == ("setup 0", "close")
    # A turn that is lost is asked for again, with its own seed; the episode is not played again.
    tries = sorted((name, seed) for name, seed, *_ in asked if name.startswith("lost turn"))
    assert [name for name, _ in tries] == ["lost turn.0", *["lost turn.1"] * 2, *["lost turn.2"] * 2]
    assert len(set(tries)) == 3
    assert diary.count("run lost turn") == 1


@pytest.mark.quick("apart")
@both_ways
async def test_messages_that_run_writes_itself_have_the_tools_and_each_episode_its_own_task(tmp_path, apart):
    task = Task("t", (Message("system", "s"), Message("user", "q")), "ok", {"how": "own messages"})
    task = msgspec.structs.replace(task, prompt=with_tools(task.prompt, [{"name": "twice"}]))
    async with at_work(config_of(tmp_path, apart), pytest.fail) as (runner, _, asked):
        both = [await attempt(runner, task, "own messages") for _ in range(2)]
    assert [rollout.completion for rollout in both] == ["one", "one"]
    assert task.info == {"how": "own messages"}
    prompts = ["".join(map(chr, prompt_ids)) for _, _, prompt_ids, _ in asked[:4]]
    answer = "<think>m</think>hm"
    expected = ["twiceuq|", "twicess|twicess|twiceuq|", "uq|", f"twiceuq|twicea{answer}|twiceuon|"]
    assert prompts == expected
    assert [message.content for message in both[0].turns] == ["q", answer, "on", answer]


@pytest.mark.quick("apart")
@both_ways
async def test_setup_and_close_are_called_and_bounded_and_what_they_raise_is_said(tmp_path, apart):
    warnings = []
    with pytest.raises(EnvironmentFault, match=r"setup\(\) of Talk raised OSError: no server \(line 31 of .*talk.py"):
        async with at_work(config_of(tmp_path, apart, "no server"), warnings.append):
            raise AssertionError
    with pytest.raises(EnvironmentFault, match=r"did not return within 1.5 s \(environment.run_timeout_s\)"):
        async with at_work(config_of(tmp_path, apart, "slow setup"), warnings.append):
            raise AssertionError
    assert warnings == []
    diary = tmp_path / f"diary_{apart}"
    assert diary.read_text().splitlines() == ["setup 0", "close"] * 2
    async with at_work(config_of(tmp_path, apart, "no close"), warnings.append) as (runner, *_):
        assert (await play(runner, "plain")).outcome == "done"
    assert "close() of Talk raised OSError: gone (line 38 of" in warnings[0]


@pytest.mark.quick("here")
@both_ways
async def test_an_episode_that_is_cancelled_is_closed_and_closing_is_bounded(tmp_path, monkeypatch, apart):
    monkeypatch.setattr(rollouts_module, "_CLOSE_S", 60.0)
    warnings, config = [], config_of(tmp_path, apart)
    diary = tmp_path / f"diary_{apart}"
    async with at_work(config, warnings.append) as (runner, *_):
        playing = asyncio.create_task(play(runner, "wait"))
        while "waits" not in diary.read_text():
            await asyncio.sleep(0.02)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(playing, 60.0)
        assert diary.read_text().count("closed t {'of': 't'}") == 1
        monkeypatch.setattr(rollouts_module, "_CLOSE_S", 0.5)
        never_closed = await play(runner, "never closed")
        monkeypatch.setattr(rollouts_module, "_CLOSE_S", 60.0)
        assert never_closed.outcome == "done", never_closed.error
        assert (await play(runner, "plain")).outcome == "done"
    assert warnings == ["close_episode() of environment Talk failed: did not return within 0.5 s"]
    assert diary.read_text().splitlines()[-1] == "close"


async def test_the_end_of_a_run_closes_what_is_under_way(tmp_path):
    """As in a run that is interrupted: all tasks of the event loop are cancelled, then the environment is closed."""
    from slipstream.orchestrator.thread import EventLoopThread

    config, diary = config_of(tmp_path, True), tmp_path / "diary_True"
    thread, leave = EventLoopThread(lambda: False), asyncio.Event()

    async def work():
        async with at_work(config, lambda text: None) as (runner, *_):
            await play(runner, "wait")
            await leave.wait()

    working = thread.submit(work())
    while not diary.exists() or "waits" not in diary.read_text():
        await asyncio.sleep(0.02)

    async def nothing():
        pass

    assert await asyncio.to_thread(thread.stop, nothing())
    assert working.cancelled()
    assert diary.read_text().splitlines()[-2:] == ["closed t {'of': 't'}", "close"]


async def test_an_object_of_a_python_program_acts_the_same(tmp_path):
    from slipstream.envs import Environment, Episode, Score

    words = ["a", "b"]

    class Local(Environment):
        max_turns = 1

        def tasks(self, split, num_tasks):
            return [Task("t", (Message("user", "q"),), "ok")]

        async def run(self, task, policy):
            words.append((await policy.chat(task.prompt)).text)
            return Episode(" ".join(words[:2]))

        def score(self, task, completion):
            return Score(float(completion == "a b"))

    passed = pack_environment(Local(3))
    give(passed)
    rollouts = []
    for apart in (False, True):
        config = EnvironmentConfig(name=passed.name, processes=int(apart), reward_workers=1)
        async with at_work(config, pytest.fail) as (runner, *_):
            rollouts.append(await play(runner, "plain"))
    assert [rollout.reward for rollout in rollouts] == [1.0, 1.0]
    assert words == ["a", "b"], "each process has its own"
    assert placement(load_environment(config)) == (1, "run() of Local may block, which would hold up the run")


@pytest.mark.parametrize("name", ["reasoning_gym/spell_backward", "rows", "functions.py", "tools.py", "verifiers/x"])
def test_what_runs_no_code_of_the_users_own_stays_in_the_run(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"question": "1?", "answer": "1"}\n')
    functions = "def tasks(split, num_tasks, seed): return []\ndef reward(task, completion): return 0.0\n"
    (tmp_path / "functions.py").write_text(functions)
    settings = {"path": "rows.jsonl"} if name == "rows" else {}
    (tmp_path / "tools.py").write_text(
        "from slipstream.envs import SingleTurn\nclass T(SingleTurn):\n    tools = (print,)\n    max_turns = 2\n"
        "    def tasks(self, split, num_tasks): return []\n    def reward(self, task, completion): return 0.0\n"
    )
    assert placement(load_environment(EnvironmentConfig(name=name, settings=settings)))[0] == 0


@pytest.mark.parametrize("hook", ["setup", "close", "setup_episode", "close_episode"])
def test_a_hook_of_the_users_own_is_played_apart(tmp_path, hook):
    (tmp_path / "hook.py").write_text(
        "from slipstream.envs import SingleTurn\nclass T(SingleTurn):\n"
        "    def tasks(self, split, num_tasks): return []\n    def reward(self, task, completion): return 0.0\n"
        f"    async def {hook}(self, *given): pass\n"
    )
    processes, reason = placement(load_environment(EnvironmentConfig(name=str(tmp_path / "hook.py"))))
    assert (processes, reason) == (1, f"{hook}() of T may block, which would hold up the run")
