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
from slipstream.orchestrator.control.remote import Beats, NoticeLog, NoticeProgress, Outbox, RemoteCaller, serve
from slipstream.transport import MemoryTransport, TransportAway, TransportClosed, TransportLost, Unreachable

from .executors import executor_of


def until(happened):
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for module in (remote, thread_module):
        monkeypatch.setattr(module, "POLL_S", 0.02)
    monkeypatch.setattr(remote, "_NOTICE_S", 0.005)


@pytest.fixture
def begun():
    """The threads of these names that the test has begun, and that go on."""
    before = set(threading.enumerate())
    return lambda *names: [each for each in threading.enumerate() if each.name in names and each not in before]


class Quiet(MemoryTransport):
    """Nothing comes: `error` is raised at once, so many seconds later by the clock of `remote`."""

    def __init__(self, monkeypatch, error=None, seconds=1.0):
        super().__init__(4)
        self.error, self.seconds, self.now, self.num_takes = error or DeadlineError("nothing"), seconds, 0.0, 0
        monkeypatch.setattr(remote, "time", self)

    def monotonic(self):
        return self.now

    def take(self, timeout_s):
        self.num_takes += 1
        self.now += self.seconds
        raise self.error


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


def test_a_caller_that_is_closed_has_no_threads_and_until_then_keeps_no_process_alive(caller_of, begun):
    caller = caller_of()
    threads = begun("orchestrator", "commands")
    assert caller.activity() == 0
    assert len(threads) == 2
    assert all(thread.daemon for thread in threads)
    caller.close()
    until(lambda: not any(thread.is_alive() for thread in threads))


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


def test_what_was_heard_is_acknowledged(caller_of):
    messages = MemoryTransport(8)
    caller = caller_of(messages=messages)
    for number in range(3):
        messages.put(remote.Message([], number), 60)
    until(lambda: caller.activity() == 2 and len(messages) == 0)
    caller.close()
    assert messages.requeue() == 0


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize(("seconds", "takes"), [(1.0, 60), (7.0, 9), (40.0, 4)])
def test_how_long_the_other_side_may_say_nothing(away, seconds, takes, caller_of, monkeypatch):
    """Of a poll no more counts than a server holds it up: else this process was stopped."""
    error = DeadlineError("nothing")
    error.__cause__ = Unreachable("away") if away else None
    messages = Quiet(monkeypatch, error, seconds)
    caller = caller_of(messages=messages)
    says = (TransportAway, "nothing was heard for 60 s: nothing") if away else (OrchestratorError, "silent for 60 s")
    with pytest.raises(says[0], match=says[1]):
        caller.submit(commands.AskHeld()).result(60)
    assert messages.num_takes == takes


def test_whatever_is_heard_ends_a_silence(caller_of, monkeypatch):
    class Rare(Quiet):
        def take(self, timeout_s):
            if self.num_takes == 59:
                self.num_takes += 1
                return "", remote.Message([], 1)
            return super().take(timeout_s)

    messages = Rare(monkeypatch)
    with pytest.raises(OrchestratorError, match="silent"):
        caller_of(messages=messages).submit(commands.AskHeld()).result(60)
    assert messages.num_takes == 59 + 1 + 60


def test_the_end_of_the_other_side_is_told_before_its_silence(caller_of, monkeypatch):
    caller = caller_of(messages=Quiet(monkeypatch), ended=lambda: OrchestratorError("ended with code 3"))
    with pytest.raises(OrchestratorError, match="code 3"):
        caller.submit(commands.AskHeld()).result(60)


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


def test_signs_of_life_come_until_the_end_or_until_nobody_hears_them(begun, monkeypatch):
    monkeypatch.setattr(remote, "_BEAT_S", 0.005)
    messages = MemoryTransport(4)
    with Beats(messages) as beats:
        assert isinstance(beats, Beats)
        (thread,) = begun("beats")
        assert thread.daemon
        for _ in range(6):  # also after the queue was full
            receipt, message = messages.take(60)
            assert message == remote.Message([], None)
            messages.ack(receipt)
        until(lambda: len(messages) == 4)
        time.sleep(0.05)
        assert thread.is_alive()
    until(lambda: not thread.is_alive())
    for error in (TransportLost("lost"), TransportClosed("closed")):

        class Broken(MemoryTransport):
            def put(self, record, timeout_s, error=error):
                raise error

        with Beats(Broken(1)):
            until(lambda: begun("beats") == [])


def test_advances_in_a_row_become_one_and_others_stay_in_order(tmp_path):
    outbox = Outbox()
    progress, log = NoticeProgress(outbox), NoticeLog(outbox, tmp_path, 2)
    assert (log.folder, log.lineage) == (tmp_path, 2)
    progress.phase("a")
    for n in (1, 2):
        progress.advance(n)
    log.event("between")
    progress.advance()
    progress.advance(4)
    progress.message("look")
    progress.message("look out", "warning")
    progress.end_phase()
    progress.start("title", 10)
    progress.step(1, {})
    progress.evaluated(1, {})
    progress.ready()
    progress.stop()
    notices = [
        remote.Progressed("phase", ["a", None]),
        remote.Progressed("advance", [3]),
        remote.Event("between", {}),
        remote.Progressed("advance", [5]),
        remote.Progressed("message", ["look", "info"]),
        remote.Progressed("message", ["look out", "warning"]),
        remote.Progressed("end_phase", []),
    ]
    taken = outbox.take()
    assert taken == notices
    log.event("later")
    outbox.put_back(taken)
    assert outbox.take() == [*notices, remote.Event("later", {})]


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


async def test_serving_ends_with_a_close_and_has_taken_all_that_came():
    requests, messages = MemoryTransport(8), MemoryTransport(8)
    for number, command in enumerate((commands.AskTeacher(), commands.Close(3))):
        requests.put(remote.Request(number, command), 1)
    await served(executor_of(teacher_digest="abc"), requests, messages)
    assert requests.requeue() == 0, "all were acknowledged"
    replies = [message.reply for message in heard(messages) if message.reply is not None]
    assert remote.Reply(1, commands.Done()) in replies
    assert [each.get_name() for each in asyncio.all_tasks() - {asyncio.current_task()}] == []


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


async def test_what_has_ended_is_told_once_and_without_anything_else():
    requests, messages, ended = MemoryTransport(8), MemoryTransport(8), 1
    serving = asyncio.create_task(served(executor_of(num_ended=lambda: ended), requests, messages))
    told = []
    for number in (1, 2, 4):
        ended = number
        receipt, message = await messages.take_async(60)
        messages.ack(receipt)
        told.append(message)
    await asyncio.sleep(0.05)
    assert told == [remote.Message([], number) for number in (1, 2, 4)]
    assert len(messages) == 0
    requests.put(remote.Request(0, commands.Close(3)), 1)
    await serving


async def test_where_nothing_can_be_told_any_more_the_serving_ends_with_that():
    class Lost(Full):
        async def put_async(self, record, timeout_s):
            raise DataError("the disk is full")

    with pytest.raises(DataError, match="the disk is full"):
        await served(executor_of(), MemoryTransport(8), Lost())


async def test_where_no_reply_can_be_given_any_more_the_serving_ends_with_that():
    class OnlyNotices(MemoryTransport):
        async def put_async(self, record, timeout_s):
            if record.reply is not None:
                raise DataError("too large")
            await super().put_async(record, timeout_s)

    requests = MemoryTransport(8)
    requests.put(remote.Request(0, commands.AskTeacher()), 1)
    with pytest.raises(DataError, match="too large"):
        await served(executor_of(), requests, OnlyNotices(8))


@pytest.mark.parametrize(("error", "is_printed"), [(ValueError("a bug"), True), (DataError("bad data"), False)])
async def test_only_a_bug_leaves_its_traceback_in_the_log(error, is_printed, capsys):
    async def start():
        raise error

    requests, messages = MemoryTransport(8), MemoryTransport(8)
    requests.put(remote.Request(0, commands.Start()), 1)
    serving = asyncio.create_task(served(executor_of(start=start), requests, messages))
    while True:
        _, message = await messages.take_async(60)
        if message.reply is not None:
            break
    requests.put(remote.Request(1, commands.Close(3)), 1)
    await serving
    assert message.reply == remote.Reply(0, None, remote.Failure(type(error).__name__, str(error)))
    assert ("Traceback" in capsys.readouterr().err) == is_printed
