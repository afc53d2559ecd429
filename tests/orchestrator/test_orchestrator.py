"""The orchestrator's parts against a scripted engine: revival, outcomes, batches, versions, waits."""

import asyncio
import contextlib
import queue
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmarks.event_loop import call
from benchmarks.scripted_engine import ScriptedEngine

from slipstream.algo.readiness import group_has_signal
from slipstream.envs import SingleTurn, Task
from slipstream.envs.base import Episode
from slipstream.errors import (
    DeadlineError,
    EngineError,
    EnvironmentFault,
    IntegrityError,
    TrainingError,
    WeightsError,
)
from slipstream.orchestrator import concurrency as tasks_module
from slipstream.orchestrator.batches.batcher import Batcher
from slipstream.orchestrator.batches.idle_time import IdleTime
from slipstream.orchestrator.batches.share import Share
from slipstream.orchestrator.batches.staleness import refuse_stale
from slipstream.orchestrator.concurrency import all_of
from slipstream.orchestrator.control import handle as handle_module
from slipstream.orchestrator.control.handle import LocalCaller, Orchestrator, Waits
from slipstream.orchestrator.evaluate import evaluate
from slipstream.orchestrator.event_loop_watch import blame
from slipstream.orchestrator.hooks import TrainerHooks
from slipstream.orchestrator.rollouts import RolloutRunner, seed_of
from slipstream.orchestrator.thread import EventLoopThread
from slipstream.orchestrator.versions import Versions
from slipstream.progress import Progress
from slipstream.records import (
    ApplyReport,
    Completion,
    Message,
    Rollout,
    SamplingParams,
    Sequence,
    Ticket,
    Version,
    VersionSpan,
)
from slipstream.runlog import sample_of
from slipstream.runlog.ledger import Ledger
from tests.inline_scorer import InlineScorer

from ..quick_time import event_loop_policy  # noqa: F401 (a fixture)
from .executors import executor_of

END = 0
SAMPLING = SamplingParams(max_tokens=4, stop_token_ids=(END,))
TASKS = [Task(f"t{i}", (Message("user", f"q{i}"),), "b") for i in range(3)]


class Letters:
    """One token for a letter."""

    def render(self, messages):
        return [ord(letter) for message in messages for letter in message.content]

    def decode(self, token_ids):
        return "".join(chr(token) for token in token_ids if token != END)

    def decode_turn(self, token_ids):
        return self.decode(token_ids), self.decode(token_ids)


class Odd(SingleTurn):
    """Right is "b"; "x" makes the reward raise."""

    def tasks(self, split, num_tasks):
        return TASKS

    def reward(self, task, completion):
        if completion == "x":
            raise ValueError("x is not graded")
        return float(completion == task.answer)


def say(text):
    return lambda prompt_ids, seed: [*map(ord, text), END]


def make_runner(engine, environment=None, scorer=None, **options):
    environment = environment or Odd()
    options = {"request_timeout_s": 0.2, "run_timeout_s": 10.0} | options
    return RolloutRunner(environment, scorer or InlineScorer(environment), Letters(), engine, **options)


LEDGERS = tempfile.TemporaryDirectory()


class Watching(Progress):
    """Keeps phases and ends as they come, and counts what has ended."""

    def __init__(self):
        self.told, self.num_ended = [], 0

    def phase(self, name, total=None):
        self.told.append((name, total))

    def advance(self, n=1):
        self.num_ended += n

    def end_phase(self):
        self.told.append("ended")


def make_batcher(engine, environment=None, runner=None, ledger=None, **options):
    if ledger is None:
        folder = Path(tempfile.mkdtemp(dir=LEDGERS.name))
        ledger = Ledger(folder, 0, 0, staleness=options.get("staleness", 0), shape={})
    fixed = {"group_size": 2, "sampling": SAMPLING, "seed": 0, "max_reward_failures": 0.1, "needs_logprobs": True}
    told = {"progress": Watching(), "warn": lambda text: None, "ledger": ledger, "share": Share(), "idle": IdleTime()}
    told |= {"staleness": 0, "has_signal": group_has_signal, "parts": (), "refills": None, "teacher": None}
    return Batcher(runner or make_runner(engine, environment), **(fixed | told | options))


def attempt(runner, seed=1):
    return runner.run(TASKS[0], rollout_id="r", group_id="g", sampling=SAMPLING, seed=seed)


def ticket(step):
    return Ticket(Version(0, step, f"digest{step}"), "disk", f"folder{step}", ())


async def test_all_of_keeps_the_order_and_raises_the_first_failure_itself():
    async def after(seconds, value):
        await asyncio.sleep(seconds)
        return value

    assert await all_of(after(seconds, seconds) for seconds in (0.02, 0.0, 0.01)) == [0.02, 0.0, 0.01]

    async def fail():
        raise EngineError("gone")

    waiting = asyncio.Event()

    async def wait():
        try:
            await asyncio.sleep(60)
        finally:
            waiting.set()

    with pytest.raises(EngineError, match="gone"):
        await all_of([wait(), all_of([fail(), wait()])])
    assert waiting.is_set()


async def test_an_environment_that_does_nothing_is_given_up_but_the_engines_time_is_not_its_own():
    class Slow(Odd):
        async def run(self, task, policy):
            reply = await super().run(task, policy)
            await asyncio.sleep(60.0 if task.id == "t1" else 0.0)
            return reply

    class SlowEngine(ScriptedEngine):
        async def generate(self, request):
            await asyncio.sleep(0.8)
            return await super().generate(request)

    runner = make_runner(SlowEngine(say("b")), Slow(), run_timeout_s=0.5)
    common = {"rollout_id": "r", "group_id": "g", "sampling": SAMPLING, "seed": 0}
    assert (await runner.run(TASKS[0], **common)).outcome == "done"
    rollout = await runner.run(TASKS[1], **common)
    assert rollout.outcome == "environment_error"
    assert "did nothing for 0.5 s (environment.run_timeout_s)" in rollout.error


async def test_a_rollout_whose_engine_may_not_come_back_raises():
    engine = ScriptedEngine(say("b"))
    engine.kill()
    with pytest.raises(EngineError, match="max_restarts"):
        await attempt(make_runner(engine))
    engine.is_alive = engine.is_hanging = True
    with pytest.raises(DeadlineError):
        await attempt(make_runner(engine))
    assert engine.num_requests == 1, "an engine that does not answer is not asked again"


async def test_a_turn_that_lost_its_engine_is_asked_for_again_and_the_environment_is_not_run_twice():
    begun = []

    class Twice(Odd):
        async def run(self, task, policy):
            begun.append(task.id)
            await policy.chat(task.prompt)
            return await super().run(task, policy)

    engine = ScriptedEngine(say("b"), max_restarts=1)
    engine.on_request = lambda request: engine.kill() if engine.num_requests == 2 else None
    rollout = await attempt(make_runner(engine, Twice()))
    assert (rollout.outcome, begun, engine.num_restarts) == ("done", ["t0"], 1)
    assert [len(sequence) for sequence in rollout.sequences] == [4, 4]


class Dialogue(Odd):
    async def run(self, task, policy):
        reply = await policy.chat(task.prompt)
        await policy.chat([*task.prompt, Message("assistant", reply.text), Message("user", "again")])
        return Episode(reply.text, num_turns=2)


async def test_the_turns_of_an_episode_are_kept_for_its_sample():
    rollout = await attempt(make_runner(ScriptedEngine(say("b")), Dialogue()))
    assert [(turn.role, turn.content) for turn in rollout.turns] == [
        ("assistant", "b"), ("user", "again"), ("assistant", "b")
    ]  # fmt: skip
    assert (await attempt(make_runner(ScriptedEngine(say("b"))))).turns == []
    rollout.metrics = {"in_place": 0.5}
    sample = sample_of(rollout, 3, "0.3")
    assert (sample["metrics"], sample["num_turns"]) == ({"in_place": 0.5}, 2)
    assert sample["turns"][1] == {"role": "user", "content": "again"}


class Leaking(Odd):
    """What `run` lets out of itself."""

    error = ""

    async def run(self, task, policy):
        reply = await super().run(task, policy)
        if self.error == "exit":
            raise SystemExit(3)
        if self.error == "stop":
            raise type("Stop", (BaseException,), {})
        forgotten = asyncio.create_task(asyncio.sleep(60))
        forgotten.cancel()
        await forgotten
        return reply


@pytest.mark.parametrize(
    ("error", "says"), [("cancelled", "a task that it has cancelled"), ("exit", "SystemExit: 3"), ("stop", "Stop")]
)
async def test_what_an_environment_lets_out_is_its_rollouts_outcome(error, says):
    environment = Leaking()
    environment.error = error
    rollout = await attempt(make_runner(ScriptedEngine(say("b")), environment))
    assert rollout.outcome == "environment_error"
    assert says in rollout.error
    assert "in run" in rollout.error


class Hiding(Odd):
    async def run(self, task, policy):
        with contextlib.suppress(Exception):
            await policy.chat(task.prompt)
        return Episode("nothing")


@pytest.mark.parametrize("error", [EngineError("gone"), IntegrityError("contradicts itself")])
async def test_an_environment_cannot_hide_that_the_engine_is_gone(error, monkeypatch):
    monkeypatch.setattr(tasks_module, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(tasks_module, "_PAUSE_S", 0.01)
    engine = ScriptedEngine(say("b"))

    def fail(request):
        raise error

    engine.on_request = fail
    with pytest.raises(type(error)):
        await attempt(make_runner(engine, Hiding()))


async def test_nothing_is_said_in_an_episode_that_is_over():
    tasks = []

    class Late(Odd):
        async def run(self, task, policy):
            async def later():
                await asyncio.sleep(0.05)
                await policy.chat(task.prompt)

            tasks.extend([asyncio.create_task(later()), asyncio.create_task(policy.chat(task.prompt))])
            return await super().run(task, policy)

    class SlowFromTheSecond(ScriptedEngine):
        async def generate(self, request):
            await asyncio.sleep(0.1 if self.num_requests else 0)
            return await super().generate(request)

    rollout = await attempt(make_runner(SlowFromTheSecond(say("b")), Late()))
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert rollout.outcome == "done"
    assert len(rollout.sequences) == 1
    assert [type(each) for each in found] == [RuntimeError, RuntimeError]


async def test_rollouts_that_the_engine_lost_are_the_engines_failure_and_a_warning():
    class TooSlow(ScriptedEngine):
        async def generate(self, request):
            if request.prompt_ids[-1] == ord("2"):
                return Completion(request.id, [], None, "abort", error="passed its deadline of 300 s")
            return await super().generate(request)

    warnings = []
    batcher = make_batcher(TooSlow(say("b")), max_reward_failures=0.5, warn=warnings.append)
    assert (await batcher.make(4, Version(0, 4), TASKS)).dropped == {"engine_error": 2}
    (warning,) = warnings
    assert "2 of 6 rollouts of step 4 were lost in the engine" in warning
    assert "passed its deadline of 300 s" in warning
    with pytest.raises(
        EngineError, match=r"2 of 6 rollouts of step 4 failed in the engine.*deadline of 300 s"
    ) as raised:
        await make_batcher(TooSlow(say("b")), max_reward_failures=0.0).make(4, Version(0, 4), TASKS)
    assert raised.value.exit_code == 5
    how = {"sampling": SAMPLING, "threshold": 1.0, "seed": 0, "warn": warnings.append}
    await evaluate(make_runner(TooSlow(say("b"))), TASKS, **how, max_failures=0.5)
    assert "1 of 3 rollouts of the evaluation were lost" in warnings[1]


@pytest.mark.parametrize(("right", "number"), [("none", 1), ("0", 0)])
async def test_a_run_whose_first_rollouts_all_fail_says_so_before_its_batch_has_ended(right, number):
    engine = ScriptedEngine(lambda prompt, seed: [ord("b" if chr(prompt[-1]) == right else "x"), END])
    warnings = []
    batcher = make_batcher(engine, max_reward_failures=1.0, group_size=4, warn=warnings.append)
    await batcher.make(0, Version(0, 0), TASKS)
    assert len(warnings) == number
    assert all(text.startswith("the first 8 rollouts have all failed (reward_error): ") for text in warnings)


async def test_a_batch_holds_its_groups_and_counts_what_is_missing():
    engine = ScriptedEngine(lambda prompt, seed: [ord("x" if prompt[-1] == ord("2") else "b"), END])
    batch = await make_batcher(engine, max_reward_failures=0.5).make(4, Version(0, 4), TASKS)
    assert [rollout.group_id for rollout in batch.rollouts] == ["4.0", "4.0", "4.1", "4.1"]
    assert len({rollout.id for rollout in batch.rollouts}) == 4
    assert batch.dropped == {"reward_error": 2}
    assert batch.metrics["dropped_tokens/reward_error"] == 4
    with pytest.raises(EnvironmentFault, match=r"(?s)2 of 6 rollouts of step 4.*x is not graded"):
        await make_batcher(engine, max_reward_failures=0.0).make(4, Version(0, 4), TASKS)


async def test_a_batch_holds_no_older_tokens_than_the_staleness_allows():
    engine = ScriptedEngine(say("b"))
    engine.version = Version(0, 3)
    with pytest.raises(TrainingError, match=r"version 0\.3 in the batch of step 4: training\.staleness = 0"):
        await make_batcher(engine).make(4, Version(0, 4), TASKS)
    batch = await make_batcher(engine, staleness=1).make(4, Version(0, 3), TASKS)
    assert batch.metrics["staleness/mean"] == batch.metrics["staleness/max"] == 1.0
    engine.version = Version(1, 4)
    with pytest.raises(TrainingError, match=r"allows only 0\.3, 0\.4"):
        await make_batcher(engine, staleness=1).make(4, Version(0, 4), TASKS)


def test_tokens_of_an_earlier_attempt_are_allowed_as_far_as_the_weights_descend_from_it():
    def of(version):
        return [Rollout("a", "t", "g", [Sequence([1], [True], versions=[VersionSpan(0, version)])], 0.0, "done")]

    refuse_stale(of("0.3"), 4, 2, 1, {0: 3, 1: 4})
    refuse_stale(of("1.4"), 4, 2, 1, {0: 3, 1: 4})
    for version in ("0.4", "0.2", "1.5", "2.5"):
        with pytest.raises(TrainingError, match=f"holds tokens of version {version}"):
            refuse_stale(of(version), 4, 2, 1, {0: 3, 1: 4})


async def test_missing_logprobs_are_refused_where_they_are_needed():
    engine = ScriptedEngine(say("b"))
    engine.returns_logprobs = False
    with pytest.raises(TrainingError, match="importance_sampling"):
        await make_batcher(engine).make(0, Version(0, 0), TASKS)
    batch = await make_batcher(engine, needs_logprobs=False).make(0, Version(0, 0), TASKS)
    assert batch.rollouts[0].sequences[0].logprobs is None


async def test_an_evaluation_ends_where_too_much_fails_or_the_engine_is_gone():
    engine = ScriptedEngine(lambda prompt, seed: [ord("bax"[prompt[-1] - ord("0")]), END])
    how = {"sampling": SAMPLING, "threshold": 1.0, "seed": 0}
    with pytest.raises(EnvironmentFault, match=r"(?s)1 of 3 rollouts of the evaluation failed.*x is not graded"):
        await evaluate(make_runner(engine), TASKS, **how, max_failures=0.0)
    engine.kill()
    with pytest.raises(EngineError):
        await evaluate(make_runner(engine), TASKS, **how, max_failures=0.5)


async def test_only_a_verified_version_becomes_current():
    engine = ScriptedEngine(say("b"))
    versions = Versions(engine, apply_timeout_s=1.0)
    await versions.apply(ticket(1))
    assert versions.current == ticket(1).version
    engine.mismatched = ("model.norm.weight",)
    with pytest.raises(WeightsError, match=r"model\.norm\.weight"):
        await versions.apply(ticket(2))
    assert versions.current == ticket(1).version
    other = SimpleNamespace(apply=lambda *_: asyncio.sleep(0, ApplyReport(ticket(1).version)))
    with pytest.raises(WeightsError, match=r"reports version 0\.1"):
        await Versions(other, apply_timeout_s=1.0).apply(ticket(2))


def test_an_environment_that_holds_up_the_loop_ends_no_run_and_is_named(tmp_path):
    source = tmp_path / "theirs.py"
    source.write_text(
        "# it holds up the loop\n"
        "async def run(self, task, policy):\n"
        "    await policy.chat(task.prompt)\n"
        "    let_go.get()\n"
        "    return await super(type(self), self).run(task, policy)\n"
    )
    module = {"let_go": queue.SimpleQueue()}
    exec(compile(source.read_text(), str(source), "exec"), module)
    environment = type("Theirs", (Odd,), {"run": module["run"]})()
    told, is_blocked = [], threading.Event()

    def on_blocked(stack, seconds):
        if stack[-1].filename == str(source):  # not where a loaded machine is late
            told.append(blame(stack, seconds, environment))
            is_blocked.set()

    thread = EventLoopThread(lambda: False, on_blocked)
    versions = Versions(None, apply_timeout_s=1.0)
    orchestrator = Orchestrator(
        LocalCaller(thread, executor_of(versions=versions)), publish=None, waits=None, hooks=TrainerHooks()
    )
    runner = make_runner(ScriptedEngine(say("b")), environment, run_timeout_s=1.0)
    how = {"rollout_id": "r", "group_id": "g", "sampling": SAMPLING, "seed": 0}
    rollout = thread.submit(runner.run(TASKS[0], **how))
    assert is_blocked.wait(60)
    orchestrator.release(1)  # which does not wait for a loop that is held up
    time.sleep(1.4)  # for longer than the environment may take, and than a loop that is not blocked is late
    assert not rollout.done()
    module["let_go"].put(None)
    assert rollout.result(60).outcome == "done"
    call(thread, versions._changed.__aenter__(), 60, "what was released")
    assert versions._released == 1
    ((where, warning),) = told
    assert f"run, line 4 of {source}" in where
    assert warning is not None
    assert "Theirs" in warning
    thread.stop(asyncio.sleep(0))


def test_a_loop_that_waits_is_nobodys_fault():
    thread = EventLoopThread(lambda: False, lambda stack, seconds: told.append(stack))
    told = []
    call(thread, asyncio.sleep(2.0), 10, "nothing")
    assert told == []
    thread.stop(asyncio.sleep(0))


@pytest.mark.parametrize("receives", ["fails a moment later", "goes on"])
def test_where_both_sides_of_an_update_fail_the_receiver_says_why(receives, monkeypatch):
    monkeypatch.setattr(handle_module, "_CAUSE_S", 1.0 if receives == "goes on" else 60.0)
    thread = EventLoopThread(lambda: False)

    class Receiver:
        async def apply(self, ticket):
            await asyncio.sleep(0.3 if receives != "goes on" else 600)
            raise EngineError("the engine was killed, as it said nothing")

    def publish(step, announce):
        announce(None)
        raise WeightsError("version 0.1 could not be sent within 10 s")

    orchestrator = Orchestrator(
        LocalCaller(thread, executor_of(versions=Receiver())),
        publish=publish,
        waits=Waits(5.0, 5.0, 5.0),
        hooks=TrainerHooks(),
    )
    expected = (WeightsError, "could not be sent") if receives == "goes on" else (EngineError, "said nothing")
    with pytest.raises(expected[0], match=expected[1]):
        orchestrator.update(1)
    thread.stop(asyncio.sleep(0))


def test_seeds_depend_on_all_parts_and_their_order():
    seeds = {seed_of(*parts) for parts in ((1,), (1, 2), (2, 1), (12,), ("1", 2, 0))}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert seed_of(1, 2) == seed_of("1", "2")
