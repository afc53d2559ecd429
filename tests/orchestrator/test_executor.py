"""What each command has done, and with which arguments."""

import asyncio
import threading

import msgspec
import pytest

from slipstream.errors import DeadlineError, EngineError
from slipstream.inference import engine
from slipstream.orchestrator.control import commands
from slipstream.orchestrator.evaluate import Evaluation
from slipstream.records import ApplyReport, ParameterSpec, Rollout, Sequence, Ticket, Version

from .executors import executor_of

TICKET = Ticket(Version(0, 3), "disk", "f", ())
PARAMETERS = (ParameterSpec("w", (2,), "float32", "ff"),)
COMMANDS = commands.AnyCommand.__args__


class Noting:
    """Notes every call of a coroutine with its arguments; returns what it was given for it."""

    def __init__(self, **returns):
        self.called, self.returns = [], returns

    def __getattr__(self, name):
        async def call(*arguments):
            self.called.append((name, *arguments))
            result = self.returns.get(name)
            if isinstance(result, Exception):
                raise result
            return result

        return call


class Engine(Noting):
    is_up, is_in_memory_only = True, False

    def take_metrics(self):
        self.called.append(("take_metrics",))
        return {"replica_0/requests": 2.0}


def made(**returns):
    """An executor whose parts note what is asked of them, and the notes of the engine, the versions and the others."""
    engine, versions, parts = Engine(**returns), Noting(**returns), Noting(**returns)
    named = ("probe", "evaluate", "roll_out", "engine_ready", "start", "make_batches")

    def note(name):
        return lambda *arguments: parts.called.append((name, *arguments))

    others = {name: note(name) for name in ("open_ledger", "close", "change_weights")}
    executor = executor_of(engine, versions, **{name: getattr(parts, name) for name in named}, **others)
    return executor, engine.called, versions.called, parts.called


DONE = commands.Done()
MAKE, CLOSE = commands.MakeBatches(1, 5), commands.Close(3, "it ends")


@pytest.mark.parametrize(
    ("command", "of_engine", "of_versions", "of_parts"),
    [
        (commands.AwaitEngine(), [], [], [("engine_ready",)]),
        (commands.Start(), [], [], [("start",)]),
        (commands.OpenLedger(4), [], [], [("open_ledger", 4)]),
        (MAKE, [], [], [("make_batches", MAKE)]),
        (commands.Fence(), [], [("fence",)], []),
        (commands.GoOn(Version(0, 4), 7.0), [("go_on", Version(0, 4), 7.0)], [], []),
        (commands.Release(4, 2), [], [("release", 4)], []),
        (commands.Release(4, 2, (30, [0.5])), [], [("release", 4)], [("change_weights", 30, [0.5])]),
        (commands.Sleep(7.0), [("sleep", 7.0)], [], []),
        (commands.Wake(7.0), [("wake", 7.0)], [], []),
        (commands.Leave(7.0), [("leave", 7.0)], [], []),
        (CLOSE, [], [], [("close", CLOSE)]),
    ],
)
async def test_what_is_done(command, of_engine, of_versions, of_parts):
    executor, *called = made()
    assert await executor.do(command) == DONE
    assert called == [of_engine, of_versions, of_parts]


async def test_what_is_answered():
    evaluation, rollouts = Evaluation(4, 3, 0, 0.75, 2.0, 0.0), [Rollout("a", "t", "g", [], 1.0, "done")]
    probe, report = [Sequence([1], [True], [0.0])], ApplyReport(Version(0, 3))
    executor, of_engine, of_versions, of_parts = made(
        apply=report, probe=probe, evaluate=evaluation, roll_out=rollouts, held=Version(0, 2), joined=4, share=()
    )
    assert await executor.do(commands.Apply(TICKET)) == commands.Applied(report, probe, {"replica_0/requests": 2.0})
    assert (of_versions, of_parts, of_engine) == ([("apply", TICKET)], [("probe",)], [("take_metrics",)])
    ask = commands.Evaluate(3, beside=True)
    assert await executor.do(ask) == commands.Evaluated(evaluation)
    assert of_parts[-1] == ("evaluate", ask)
    roll_out = commands.RollOut(3, [1, 2], 7)
    assert await executor.do(roll_out) == commands.RolledOut(rollouts)
    assert of_parts[-1] == ("roll_out", roll_out)
    assert await executor.do(commands.AskHeld()) == commands.Held(Version(0, 2))
    assert await executor.do(commands.AskJoined()) == commands.Joined(4)
    assert await executor.do(commands.AskTeacher()) == commands.TeacherDigest("")
    assert await executor.do(commands.Share(PARAMETERS, 7.0)) == commands.Shared(())
    assert of_engine[-1] == ("share", PARAMETERS, 7.0)
    assert await executor_of(teacher_digest="abc").do(commands.AskTeacher()) == commands.TeacherDigest("abc")
    with pytest.raises(TypeError, match="Noting is no command"):
        await executor.do(Noting())


async def test_the_newest_saved_step_is_known_from_releases():
    executor, *_ = made()
    assert (executor.saved_step, executor.num_ended()) == (0, 0)
    await executor.do(commands.Release(4, 2))
    assert executor.saved_step == 2


@pytest.mark.parametrize("is_up", [True, False])
async def test_an_engine_that_lives_may_say_that_it_cannot_share(is_up):
    executor, *_ = made(share=EngineError("no such method"))
    executor._engine.is_up = is_up
    if is_up:
        answer = commands.NotShared("the engine cannot share its weights (no such method)")
        assert await executor.do(commands.Share(PARAMETERS, 7.0)) == answer
    else:
        with pytest.raises(EngineError, match="no such method"):
            await executor.do(commands.Share(PARAMETERS, 7.0))
    late, *_ = made(share=DeadlineError("not in time"))
    with pytest.raises(DeadlineError, match="not in time"):
        await late.do(commands.Share(PARAMETERS, 7.0))


@pytest.mark.parametrize("is_up", [True, False])
@pytest.mark.parametrize("only", [True, False])
async def test_the_state_of_the_engine_is_looked_at_in_another_thread(is_up, only):
    executor, *_ = made()
    threads = []

    class State:
        is_in_memory_only = only

        @property
        def is_up(self):
            threads.append(threading.current_thread())
            return is_up

    executor._engine = State()
    assert await executor.do(commands.AskState(settles=False)) == commands.EngineState(is_up, only)
    assert threading.current_thread() not in threads


async def test_a_dying_engine_gets_a_moment_to_end_where_that_is_asked_for(monkeypatch):
    executor, *_ = made()
    monkeypatch.setattr(engine, "_DYING_S", 60.0)
    executor._engine = dying = Engine()
    asked = asyncio.create_task(executor.do(commands.AskState(settles=True)))
    await asyncio.sleep(0.05)
    dying.is_up = False
    assert not (await asked).is_up


@pytest.mark.parametrize("kind", COMMANDS, ids=lambda kind: kind.__name__)
def test_every_command_arrives_as_it_was_sent_and_changes_no_more(kind):
    values = {"first": 1, "num_steps": 5, "ticket": TICKET, "version": Version(0, 3), "timeout_s": 7.0, "step": 3}
    values |= {"items": [1], "seed": 2, "parameters": PARAMETERS}
    command = kind(*(values[name] for name in kind.__struct_fields__ if name in values))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(command), type=commands.AnyCommand) == command
    if kind.__struct_fields__:
        with pytest.raises(AttributeError):
            setattr(command, kind.__struct_fields__[0], None)


def test_what_a_command_leaves_unsaid():
    assert commands.Evaluate(3) == commands.Evaluate(3, beside=False)
    assert commands.AskState() == commands.AskState(settles=False)
    assert commands.Release(3) == commands.Release(3, 0, None)
    assert commands.RollOut(3, [1], 7) == commands.RollOut(3, [1], 7, 0.0)
