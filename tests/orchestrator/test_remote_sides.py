"""The two sides of remote commands, each alone: what is sent and in which order, what is told, and what is left when it
ends."""

import asyncio
import contextlib
import threading
import time

import pytest

from slipstream.errors import DataError, DeadlineError, OrchestratorError
from slipstream.orchestrator import thread as thread_module
from slipstream.orchestrator.control import commands, remote
from slipstream.orchestrator.control.remote import Outbox, RemoteCaller, serve
from slipstream.transport import MemoryTransport, TransportAway, Unreachable

from ..waiting import until
from .executors import executor_of


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for module in (remote, thread_module):
        monkeypatch.setattr(module, "POLL_S", 0.02)
    monkeypatch.setattr(remote, "_NOTICE_S", 0.005)


class Quiet(MemoryTransport):
    """Nothing comes: `errors` are raised at once, in turn, so many seconds later by the clock of `remote`."""

    def __init__(self, monkeypatch, errors, seconds):
        super().__init__(4)
        self.errors, self.seconds, self.now, self.num_takes = errors, seconds, 0.0, 0
        monkeypatch.setattr(remote, "time", self)

    def monotonic(self):
        return self.now

    def take(self, timeout_s):
        self.num_takes += 1
        self.now += self.seconds
        raise self.errors[(self.num_takes - 1) % len(self.errors)]


@pytest.fixture
def caller_of():
    made = []

    def make(requests=None, messages=None, *, stops=False, ended=lambda: None, **options):
        made.append(
            RemoteCaller(
                MemoryTransport(8) if requests is None else requests,
                MemoryTransport(8) if messages is None else messages,
                on_notice=lambda notice: None,
                ended=ended,
                silent=lambda seconds: OrchestratorError(f"silent for {seconds:g} s"),
                should_stop=lambda: stops,
                **options,
            )
        )
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_stop_request_does_not_hide_the_state_of_the_engine(caller_of):
    requests, messages = MemoryTransport(8), MemoryTransport(8)
    caller, found = caller_of(requests, messages, stops=True), []
    asking = threading.Thread(target=lambda: found.append(caller.engine_state(settles=True)))
    asking.start()
    _, request = requests.take(60)
    assert request.command == commands.AskState(settles=True)
    time.sleep(0.1)
    answer = commands.EngineState(is_up=True, is_in_memory_only=True)
    messages.put(remote.Message([], 7, remote.Reply(request.number, answer)), 60)
    asking.join(60)
    assert not asking.is_alive()
    assert found == [answer]
    assert caller.activity() == 7
    messages.put(remote.Message([], None), 60)
    until(lambda: len(messages) == 0)
    caller.close()
    assert caller.activity() == 7, "a sign of life says nothing of it"


@pytest.mark.parametrize("which", ["silent", "away", "away, silent"])
@pytest.mark.parametrize(("seconds", "takes"), [(1.0, 60), (7.0, 9), (40.0, 4)])
def test_how_long_the_other_side_may_say_nothing(which, seconds, takes, caller_of, monkeypatch):
    """Of a poll no more counts than a server holds it up: else this process was stopped. A server that is away is no
    silence of the other side: each has its own count."""
    errors = {"silent": DeadlineError("nothing"), "away": DeadlineError("nothing")}
    errors["away"].__cause__ = Unreachable("away")
    messages = Quiet(monkeypatch, in_turn := [errors[name] for name in which.split(", ")], seconds)
    caller = caller_of(messages=messages)
    silent = (OrchestratorError, "silent for 60 s")
    says = silent if which == "silent" else (TransportAway, "nothing was heard for 60 s: nothing")
    with pytest.raises(says[0], match=says[1]):
        caller.submit(commands.AskHeld()).result(60)
    assert messages.num_takes == len(in_turn) * (takes - 1) + 1


def test_what_was_said_right_before_the_end_is_heard(caller_of):
    """Also where it comes between a poll in which nothing came and the look whether the other side lives."""
    messages, has_sent, is_told = MemoryTransport(8), threading.Event(), threading.Event()

    def ended():
        if not has_sent.is_set():
            return None
        if not is_told.is_set():
            is_told.set()
            messages.put(remote.Message([], 1, remote.Reply(0, commands.Joined(4))), 0)
        return OrchestratorError("ended with code 0")

    caller = caller_of(messages=messages, ended=ended)
    asked = caller.submit(commands.AskJoined())
    has_sent.set()
    assert asked.result(60) == commands.Joined(4)
    with pytest.raises(OrchestratorError, match="code 0"):
        caller.submit(commands.AskHeld()).result(60)


class Full(MemoryTransport):
    """Refuses the first records."""

    def __init__(self, *errors):
        super().__init__(8)
        self.errors = list(errors)

    async def put_async(self, record, timeout_s):
        if self.errors:
            raise self.errors.pop(0)
        await super().put_async(record, timeout_s)


async def served(executor, requests, messages, outbox=None):
    await asyncio.wait_for(serve(executor, requests, messages, outbox or Outbox()), 60)


def heard(messages):
    found = []
    with contextlib.suppress(DeadlineError):
        while True:
            found.append(messages.take(0.0)[1])
    return found


async def test_what_could_not_be_told_comes_first_the_next_time():
    requests, messages, outbox = MemoryTransport(8), Full(DeadlineError("full"), DeadlineError("full")), Outbox()
    outbox.add(remote.Event("first", {}))
    serving = asyncio.create_task(served(executor_of(num_ended=lambda: 5), requests, messages, outbox))
    while messages.errors:
        await asyncio.sleep(0.005)
    outbox.add(remote.Event("second", {}))
    requests.put(remote.Request(0, commands.Close(3)), 1)
    await serving
    found = heard(messages)
    assert [notice.kind for message in found for notice in message.notices] == ["first", "second"]
    assert {message.num_ended for message in found} == {5}


async def test_where_nothing_can_be_told_any_more_the_serving_ends_with_that():
    class Lost(Full):
        async def put_async(self, record, timeout_s):
            raise DataError("the disk is full")

    with pytest.raises(DataError, match="the disk is full"):
        await served(executor_of(), MemoryTransport(8), Lost())
