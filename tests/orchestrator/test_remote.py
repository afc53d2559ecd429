"""Commands to a generating side in another process: answers, failures, cancellation, notices, either side's end."""

import asyncio
import contextlib
import threading
import time

import pytest

from slipstream.errors import DataError, DeadlineError, Interrupted, OrchestratorError, WeightsError
from slipstream.orchestrator.control import commands, remote
from slipstream.orchestrator.control.remote import NoticeLog, NoticeProgress, Outbox, RemoteCaller, serve
from slipstream.orchestrator.evaluate import Evaluation
from slipstream.processes import heartbeat
from slipstream.records import ApplyReport, ParameterSpec, Rollout, Ticket, Version
from slipstream.records import Sequence as TokenSequence
from slipstream.transport import (
    FileStreams,
    MemoryTransport,
    RecordError,
    TransportLost,
    open_transport,
)

from ..waiting import until
from .executors import executor_of

TICKET = Ticket(Version(0, 3, "abc"), "disk", "/somewhere", (ParameterSpec("w", (2, 3), "float32", "ff"),), 24)


class Sides:
    """Both sides over one pair of queues: the other one in a thread with an event loop of its own."""

    def __init__(self, transports):
        self.requests, self.messages = transports
        self.is_apart = self.requests[0] is not self.requests[1]
        self.outbox, self.heard, self.reason = Outbox(), [], None
        self.should_stop = threading.Event()
        self.thread = None

    def silent(self, seconds):
        self.reason = OrchestratorError(f"silent for {seconds:g} s")
        return self.reason

    def serve(self, executor):
        async def main():
            with contextlib.suppress(TransportLost):  # tests raise it themselves
                await serve(executor, self.requests[1], self.messages[1], self.outbox)

        self.thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
        self.thread.start()
        self.caller = RemoteCaller(
            self.requests[0],
            self.messages[0],
            on_notice=self.heard.append,
            ended=lambda: self.reason,
            silent=self.silent,
            should_stop=self.should_stop.is_set,
        )
        return self.caller

    def end(self):
        if self.thread is not None and self.thread.is_alive() and not self.reason:
            self.caller.call(commands.Close(5), commands.Done, 60.0, "the end", may_stop=False)
            self.thread.join(60.0)
            assert not self.thread.is_alive()
        self.caller.close()
        if self.reason:  # nobody listens any more
            self.requests[0].put(remote.Request(10**6, commands.Close(5)), 60.0)
            self.thread.join(60.0)


@pytest.fixture(params=["memory", "files"])
def sides(request, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "POLL_S", 0.1)
    monkeypatch.setattr(remote, "_STATE_S", 60.0)

    def both(topic, kind):
        if request.param == "memory":
            queue = MemoryTransport(remote.PLACES)
            return queue, queue
        return tuple(open_transport(FileStreams(tmp_path), topic, kind, capacity=remote.PLACES) for _ in range(2))

    made = Sides((both("requests", remote.Request), both("messages", remote.Message)))
    yield made
    made.end()


def evaluation():
    sequence = TokenSequence([1, 2, 3], [False, True, True], [0.0, -0.5, -1.25])
    return Evaluation(2, 1, 0, 0.5, 2.0, 0.0, [Rollout("e", "t", "g", [sequence], 1.0, "done")])


class Engine:
    """Answers as an engine would."""

    is_up, is_in_memory_only = True, False

    async def held(self):
        return Version(0, 2, "dd")

    async def joined(self):
        return 4

    def take_metrics(self):
        return {"replica_0/requests": 2.0}


class Versions:
    def __init__(self):
        self.released = []

    async def apply(self, ticket):
        if ticket.version.step == 9:
            raise WeightsError("the engine holds another version")
        return ApplyReport(ticket.version, num_bytes=ticket.num_bytes)

    async def release(self, step):
        self.released.append(step)


async def probe():
    return [TokenSequence([1, 2], [False, True], [0.0, -0.1])]


async def evaluated(command):
    return evaluation()


def test_answers_are_those_of_the_executor(sides):
    versions = Versions()
    caller = sides.serve(executor_of(Engine(), versions, probe=probe, evaluate=evaluated, teacher_digest="t"))
    applied = caller.call(commands.Apply(TICKET), commands.Applied, 60.0, "the version")
    assert applied.report == ApplyReport(TICKET.version, num_bytes=24)
    assert caller.call(commands.SampleProbe(), commands.Probed, 60.0, "it").sequences == asyncio.run(probe())
    assert applied.metrics == {"replica_0/requests": 2.0}
    assert caller.call(commands.Evaluate(2), commands.Evaluated, 60.0, "it").evaluation == evaluation()
    assert caller.call(commands.AskHeld(), commands.Held, 60.0, "it").version == Version(0, 2, "dd")
    assert caller.call(commands.AskJoined(), commands.Joined, 60.0, "it").count == 4
    assert caller.call(commands.AskTeacher(), commands.TeacherDigest, 60.0, "it").digest == "t"
    assert caller.engine_state(settles=False) == commands.EngineState(True, False)
    caller.submit(commands.Release(4, 2)).result(60.0)
    assert versions.released == [4]


def test_failures_come_as_what_they_were(sides):
    async def evaluate(command):
        raise ValueError("a bug")

    async def probe():
        return [object()]

    caller = sides.serve(executor_of(Engine(), Versions(), evaluate=evaluate, probe=probe))
    wrong = Ticket(Version(0, 9), "disk", "", ())
    with pytest.raises(WeightsError, match=r"^the engine holds another version$"):
        caller.call(commands.Apply(wrong), commands.Applied, 60.0, "it")
    with pytest.raises(RuntimeError, match=r"ValueError: a bug .*orchestrator\*\.log"):
        caller.call(commands.Evaluate(2), commands.Evaluated, 60.0, "it")
    if sides.is_apart:
        with pytest.raises(RuntimeError, match=r"TypeError: .*orchestrator\*\.log"):  # what cannot be encoded
            caller.call(commands.SampleProbe(), commands.Probed, 60.0, "it")
    with pytest.raises(TypeError, match="answered Held and not Joined"):
        caller.call(commands.AskHeld(), commands.Joined, 60.0, "it")


def test_commands_overlap_and_one_that_nobody_waits_for_is_cancelled(sides):
    begun, cancelled = threading.Event(), threading.Event()

    async def make_batches(command):
        begun.set()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    caller = sides.serve(executor_of(Engine(), Versions(), make_batches=make_batches))
    making = caller.submit(commands.MakeBatches(0, 5))
    assert begun.wait(60.0)
    assert caller.call(commands.AskJoined(), commands.Joined, 60.0, "it").count == 4
    with pytest.raises(DeadlineError, match="the batches did not end within 0 s"):
        caller.wait(making, commands.Done, 0.4, "the batches")
    assert cancelled.wait(60.0)
    begun.clear()
    sides.should_stop.set()
    with pytest.raises(Interrupted, match="--resume"):
        caller.call(commands.MakeBatches(0, 5), commands.Done, 60.0, "the batches")
    sides.should_stop.clear()


def test_notices_come_in_order_and_before_the_reply_that_follows_them(sides, tmp_path):
    log, progress = NoticeLog(sides.outbox, tmp_path, 2), NoticeProgress(sides.outbox)
    ended = 0

    async def start():
        nonlocal ended
        progress.phase("generate", 8)
        for _ in range(3):
            progress.advance()
            ended += 1
        log.event("engine", patches=["a", "b"], path=tmp_path)
        log.warning("look", step=1)
        log.count({"retry/late": 1.0})
        log.sample({"id": "0.1.2", "error": tmp_path})
        progress.end_phase()

    caller = sides.serve(executor_of(Engine(), Versions(), start=start, num_ended=lambda: ended))
    caller.call(commands.Start(), commands.Done, 60.0, "it")
    assert sides.heard == [
        remote.Progressed("phase", ["generate", 8]),
        remote.Progressed("advance", [3]),
        remote.Event("engine", {"patches": ["a", "b"], "path": str(tmp_path)}),
        remote.Event("warning", {"message": "look", "step": 1}),
        remote.Counted({"retry/late": 1.0}),
        remote.Sampled({"id": "0.1.2", "error": str(tmp_path)}),
        remote.Progressed("end_phase", []),
    ]
    assert caller.activity() == 3
    log.event("later")
    until(lambda: len(sides.heard) == 8)
    assert sides.heard[-1] == remote.Event("later", {}), "told without a reply"


def test_its_heartbeat_tells_its_phase_and_gets_on_with_what_ends(sides, tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.05)
    progress, ended, goes_on = NoticeProgress(sides.outbox), 0, threading.Event()

    def progress_at(doing, since=0.0):
        def found():
            beats = heartbeat.read_folder(tmp_path)
            return beats and beats[0].doing == doing and beats[0].progress_at > since and beats[0].progress_at

        return until(found)

    async def start():
        progress.phase("generate", 8)
        await asyncio.to_thread(goes_on.wait, 600.0)
        progress.end_phase()

    heartbeat.begin(tmp_path, "orchestrator")
    try:
        caller = sides.serve(executor_of(Engine(), Versions(), start=start, num_ended=lambda: ended))
        progress_at("serving the trainer")
        starting = caller.submit(commands.Start())
        begun = progress_at('"generate"')
        ended = 1
        progress_at('"generate"', begun)
        goes_on.set()
        starting.result(60.0)
        progress_at("serving the trainer")
    finally:
        heartbeat.end()


def test_the_other_sides_end_fails_what_waits_and_what_comes(sides):
    async def forever(command):
        await asyncio.sleep(600)

    caller = sides.serve(executor_of(Engine(), Versions(), make_batches=forever))
    making = caller.submit(commands.MakeBatches(0, 5))
    sides.reason = OrchestratorError("the orchestrator ended with code -9; its log is orchestrator.log")
    with pytest.raises(OrchestratorError, match="the orchestrator ended with code -9; its log is"):
        making.result(60.0)
    with pytest.raises(OrchestratorError, match="code -9"):
        caller.call(commands.AskHeld(), commands.Held, 60.0, "it")
    assert caller.engine_state(settles=True) == commands.EngineState(False, True)


@pytest.mark.quick("files")
def test_silence_is_blamed_only_where_no_sign_of_life_comes(sides, monkeypatch):
    monkeypatch.setattr(remote, "_SILENCE_S", 1.0)
    monkeypatch.setattr(remote, "_LONGEST_POLL_S", 0.15)
    monkeypatch.setattr(remote, "_BEAT_S", 0.1)
    queue, taken, in_a_row, speaks = sides.messages[0], sides.messages[0].take, 0, True

    def take(timeout_s):
        """While the other side speaks it is late by no more than five polls, even if its threads stand still."""
        nonlocal in_a_row
        in_a_row += 1
        found = taken(60.0 if speaks and in_a_row > 5 else timeout_s)
        in_a_row = 0
        return found

    monkeypatch.setattr(queue, "take", take)
    caller = sides.serve(executor_of(Engine(), Versions()))
    with remote.Beats(sides.messages[1]):
        time.sleep(1.5)
        assert caller.call(commands.AskJoined(), commands.Joined, 60.0, "it").count == 4
    assert caller.activity() == 0
    asked = caller.submit(commands.AskHeld()).result(60.0)
    assert asked.version == Version(0, 2, "dd"), "a reply is a sign of life, too"
    speaks = False
    until(lambda: sides.reason is not None)
    with pytest.raises(OrchestratorError, match=r"silent for 1 s"):
        caller.call(commands.AskHeld(), commands.Held, 60.0, "it")


def test_a_close_cancels_what_goes_on_and_writes_the_rest(sides):
    done = []

    async def make_batches(command):
        try:
            await asyncio.sleep(600)
        finally:
            done.append("cancelled")

    caller = sides.serve(
        executor_of(Engine(), Versions(), make_batches=make_batches, close=lambda end: done.append(end))
    )
    making = caller.submit(commands.MakeBatches(0, 5))
    end = commands.Close(3, "all 3 steps are made")
    caller.call(end, commands.Done, 60.0, "the end")
    sides.thread.join(60.0)
    assert done in (["cancelled", end], [end]), "without the first the command had not begun"
    assert not sides.thread.is_alive()
    assert not making.done() or making.exception() is None


def test_a_close_that_cannot_write_says_so(sides):
    def close(end):
        raise DataError("the disk is full")

    caller = sides.serve(executor_of(Engine(), Versions(), close=close))
    with pytest.raises(DataError, match="the disk is full"):
        caller.call(commands.Close(3), commands.Done, 60.0, "the end")
    sides.thread.join(60.0)


class Refusing:
    """A queue that a server refuses to fill."""

    def __init__(self, queue, error):
        self.queue, self.error, self.is_refusing = queue, error, True

    def __getattr__(self, name):
        return getattr(self.queue, name)

    def put(self, record, timeout_s):
        if self.is_refusing:
            raise self.error
        self.queue.put(record, timeout_s)

    async def put_async(self, record, timeout_s):
        if self.is_refusing:
            raise self.error
        await self.queue.put_async(record, timeout_s)


def test_a_silent_server_does_not_keep_a_stop_request_waiting(sides):
    sides.requests = (Refusing(sides.requests[0], DeadlineError("the server does not answer")), sides.requests[1])
    caller = sides.serve(executor_of(Engine(), Versions()))
    sides.should_stop.set()
    began = time.monotonic()
    with pytest.raises(Interrupted):
        caller.call(commands.AskHeld(), commands.Held, 60.0, "it")
    assert time.monotonic() - began < 30
    sides.should_stop.clear()
    sides.requests[0].is_refusing = False
    assert caller.call(commands.AskJoined(), commands.Joined, 60.0, "it").count == 4, "sent when it answers again"


def test_a_request_that_is_refused_fails_whoever_waits(sides):
    sides.requests = (Refusing(sides.requests[0], DataError("the server is full")), sides.requests[1])
    caller = sides.serve(executor_of(Engine(), Versions()))
    with pytest.raises(DataError, match="the server is full"):
        caller.call(commands.AskHeld(), commands.Held, 60.0, "it")
    state = caller.engine_state(settles=False)
    assert not state.is_in_memory_only, "that is no death of an engine"
    sides.reason = DataError("over")
    sides.requests[0].is_refusing = False


def test_a_reply_that_is_refused_ends_the_serving_with_its_error(sides):
    caught = []

    async def main():
        refusing = Refusing(sides.messages[1], DataError("the server is full"))
        try:
            await serve(executor_of(Engine(), Versions()), sides.requests[1], refusing, sides.outbox)
        except DataError as error:
            caught.append(error)

    sides.requests[0].put(remote.Request(0, commands.AskHeld()), 5.0)
    asyncio.run(asyncio.wait_for(main(), 60.0))
    assert caught
    sides.serve(executor_of(Engine(), Versions()))


@pytest.mark.quick("files")
def test_a_trainer_that_does_not_read_is_waited_for(sides):
    sides.messages = (sides.messages[0], Refusing(sides.messages[1], DeadlineError("waited for the trainer")))
    caller = sides.serve(executor_of(Engine(), Versions()))
    sides.outbox.add(remote.Event("before", {}))
    asked = caller.submit(commands.AskJoined())
    time.sleep(1.5)
    assert not asked.done()
    sides.messages[1].is_refusing = False
    assert asked.result(60.0).count == 4
    assert sides.heard == [remote.Event("before", {})], "nothing is lost, nor told twice"


def test_texts_that_are_no_unicode_are_told(sides, tmp_path):
    name = b"r\xe9sum\xe9".decode("utf-8", "surrogateescape")

    async def evaluate(command):
        NoticeLog(sides.outbox, tmp_path, 0).warning(f"no file {name}", files=[name])
        raise DataError(f"no file {name}")

    caller = sides.serve(executor_of(Engine(), Versions(), evaluate=evaluate))
    with pytest.raises(DataError, match=r"no file r\\udce9sum"):
        caller.call(commands.Evaluate(2), commands.Evaluated, 60.0, "it")
    ((told),) = sides.heard
    assert told.fields["files"] == [r"r\udce9sum\udce9"]


def test_errors_of_other_modules_keep_their_class(sides):
    async def evaluate(command):
        raise TransportLost("it lost its records")

    async def start():
        raise RecordError("a record cannot be read")

    caller = sides.serve(executor_of(Engine(), Versions(), evaluate=evaluate, start=start))
    with pytest.raises(RecordError, match="a record cannot be read"):
        caller.call(commands.Start(), commands.Done, 60.0, "it")
    sides.reason = OrchestratorError("it ended with code 1")  # as it does where its queues are lost
    with pytest.raises((TransportLost, OrchestratorError)):
        caller.call(commands.Evaluate(2), commands.Evaluated, 60.0, "it")
    assert caller.engine_state(settles=True).is_in_memory_only


@pytest.mark.quick("files")
def test_work_that_swallows_its_cancellation_does_not_keep_the_ledger_open(sides, monkeypatch):
    monkeypatch.setattr(remote, "_CANCEL_S", 0.5)
    closed, let_go = [], threading.Event()

    async def make_batches(command):
        while not let_go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.1)

    caller = sides.serve(executor_of(Engine(), Versions(), make_batches=make_batches, close=closed.append))
    caller.submit(commands.MakeBatches(0, 5))
    assert caller.call(commands.AskJoined(), commands.Joined, 60.0, "it").count == 4
    caller.call(commands.Close(3), commands.Done, 60.0, "the end")
    assert closed == [commands.Close(3)]
    assert any("did not end when cancelled" in each.fields["message"] for each in sides.heard)
    let_go.set()
    sides.thread.join(60.0)


def test_warnings_that_are_sent_no_more_are_still_known(tmp_path):
    outbox = Outbox()
    log = NoticeLog(outbox, tmp_path, 0)
    log.event("engine")
    log.warning("close() of an environment raised")
    assert outbox.take_warnings() == ["close() of an environment raised"]
    assert outbox.take() == []
