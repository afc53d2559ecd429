"""The trainer's handles: which commands they send, how long they wait, and what the run's hooks are told."""

import contextlib
from concurrent.futures import Future

import pytest

from slipstream.errors import DeadlineError, EngineError, Interrupted, WeightsError
from slipstream.orchestrator import thread as thread_module
from slipstream.orchestrator.control import commands
from slipstream.orchestrator.control import handle as module
from slipstream.orchestrator.control.handle import Caller, Orchestrator, RolloutReader, Waits
from slipstream.orchestrator.hooks import TrainerHooks
from slipstream.records import ApplyReport, Batch, Sequence, Ticket, Version
from slipstream.transport import MemoryTransport, TransportClosed


class Answering(Caller):
    """Answers each kind of command as the test has it: with an answer, an error, or never."""

    def __init__(self, **answers):
        super().__init__(lambda: self.stops)
        self.stops, self.ticks, self.num_ended = False, 0, 0
        self.answers, self.sent, self.futures = answers, [], []

    def submit(self, command):
        future = Future()
        answer = self.answers.get(type(command).__name__, commands.Done())
        if isinstance(answer, list):
            answer = answer.pop(0)
        if isinstance(answer, Exception):
            future.set_exception(answer)
        elif answer is not None:
            future.set_result(answer)
        self.sent.append(command)
        self.futures.append(future)
        return future

    def activity(self):
        if self.ticks:  # rollouts go on for so many looks
            self.ticks -= 1
            self.num_ended += 1
        return self.num_ended

    def engine_state(self, *, settles):
        raise AssertionError


class Told(TrainerHooks):
    """Everything that the hooks are told."""

    repeats = False

    def __init__(self):
        self.told = []

    def waiting_for_engine(self):
        self.told.append("waits for the engine")
        return contextlib.closing(self)

    def close(self):
        self.told.append("has the engine")

    def before_update(self):
        self.told.append("before the update")

    def repeats_update(self, error):
        self.told.append(str(error))
        return self.repeats

    def version_applied(self, report, metrics):
        self.told.append((report.version.step, metrics))

    def version_evaluated(self, step, evaluation):
        self.told.append(("evaluated", step, evaluation.num_right))

    def version_released(self, step):
        self.told.append(("released", step))

    def batch_taken(self):
        self.told.append("batch taken")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for each in (module, thread_module):
        monkeypatch.setattr(each, "POLL_S", 0.01)
    monkeypatch.setattr(module, "_CAUSE_S", 0.01)


PROBE = [Sequence([1, 2], [False, True], [0.0, -0.1])]
APPLIED = commands.Applied(ApplyReport(Version(0, 3)), {"replica_0/requests": 2.0})


def ticket(step):
    return Ticket(Version(0, step), "disk", "f", ())


def orchestrator_of(caller, hooks=None, publish=None, waits=(0.03, 0.03, 0.03), **options):
    def announce_at_once(step, announce):
        caller.has_begun = announce(ticket(step))
        return ticket(step)

    hooks = hooks or Told()
    return Orchestrator(caller, publish=publish or announce_at_once, waits=Waits(*waits), hooks=hooks, **options)


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("error", [EngineError("the engine died"), WeightsError("it holds another")])
def test_an_update_that_failed_is_published_again_where_the_hooks_say_so(repeats, error):
    caller, hooks = Answering(Apply=[error, APPLIED], SampleProbe=commands.Probed(PROBE)), Told()
    hooks.repeats = repeats
    orchestrator = orchestrator_of(caller, hooks)
    if repeats:
        orchestrator.update(3)
        assert orchestrator.probe() == PROBE
        caller.sent.pop()
    else:
        with pytest.raises(type(error), match=str(error)):
            orchestrator.update(3)
    assert caller.sent[1:] == [commands.Apply(ticket(3))] * (1 + repeats)
    assert hooks.told.count("before the update") == 1
    assert str(error) in hooks.told


@pytest.mark.parametrize("repeats", [False, True])
def test_an_engine_that_died_in_the_probe_has_its_version_published_again(repeats):
    died = EngineError("one of two died")
    caller, hooks = Answering(Apply=[APPLIED, APPLIED], SampleProbe=[died, commands.Probed(PROBE)]), Told()
    hooks.repeats = repeats
    orchestrator = orchestrator_of(caller, hooks)
    orchestrator.update(3)
    if repeats:
        assert orchestrator.probe() == PROBE
    else:
        with pytest.raises(EngineError, match="one of two died"):
            orchestrator.probe()
    assert caller.sent[1:].count(commands.Apply(ticket(3))) == 1 + repeats


def test_an_update_is_not_published_a_third_time():
    caller, hooks = Answering(Apply=[EngineError("once"), EngineError("twice"), APPLIED]), Told()
    hooks.repeats = True
    with pytest.raises(EngineError, match="twice"):
        orchestrator_of(caller, hooks).update(3)


def test_where_the_weights_cannot_be_sent_the_engines_wait_for_them_is_cancelled():
    def publish(step, announce):
        announce(ticket(step))
        raise WeightsError("could not be sent")

    caller = Answering(Apply=None)
    with pytest.raises(WeightsError, match="could not be sent"):
        orchestrator_of(caller, publish=publish).update(3)
    assert caller.futures[-1].cancelled()


WAITS = {
    "start": ("Start", lambda made: made.update(3), "the engine to start"),
    "update": ("Apply", lambda made: made.update(3), r"the engine to apply version 0\.3"),
    "probe": ("SampleProbe", lambda made: made.probe(), "the probe"),
    "fence": ("Fence", lambda made: made.fence(), "the engine to pause"),
    "evaluate": ("Evaluate", lambda made: made.evaluate(3), "the evaluation of step 3"),
    "roll out": ("RollOut", lambda made: made.roll_out(3, [1], seed=0, temperature=0.5), "the rollouts of step 3"),
}
LIMITS = {"start": 0, "update": 1, "probe": 1, "fence": 1, "evaluate": 2, "roll out": 2}


@pytest.mark.parametrize("what", WAITS)
def test_each_wait_has_its_deadline_which_rollouts_that_go_on_extend(what):
    name, call, waits_for = WAITS[what]
    caller = Answering(**{name: None})
    caller.ticks = 12
    waits = [1e6] * 3
    waits[LIMITS[what]] = 0.03
    with pytest.raises(DeadlineError, match=f"^{waits_for} did not end within"):
        call(orchestrator_of(caller, waits=waits))
    assert (caller.ticks == 0) == (what != "start"), "before the first version nothing is generated"
    assert caller.futures[-1].cancelled()


@pytest.mark.parametrize("what", WAITS)
def test_a_stop_request_ends_each_wait_but_the_one_for_a_fence(what):
    name, call, waits_for = WAITS[what]
    caller = Answering(**{name: None})
    caller.stops = True
    with pytest.raises(DeadlineError if what == "fence" else Interrupted, match=waits_for):
        call(orchestrator_of(caller))


def test_work_of_the_trainer_comes_between_asking_for_an_evaluation_and_waiting_for_it():
    caller, seen = Answering(Evaluate=EngineError("the engine died")), []
    with pytest.raises(EngineError, match="the engine died"):
        orchestrator_of(caller).evaluate(3, lambda is_over: seen.append((list(caller.sent), is_over())))
    assert seen == [([commands.Evaluate(3)], True)]


def reader_of(caller, transport, hooks=None, rollouts_s=0.05):
    reader = RolloutReader(caller, transport, waits=Waits(1e6, 1e6, rollouts_s), hooks=hooks or Told())
    reader.start(commands.MakeBatches(0, 5))
    return reader


def test_batches_are_taken_in_order_and_those_that_wait_are_counted():
    caller, hooks, queue = Answering(MakeBatches=None), Told(), MemoryTransport(2)
    reader = reader_of(caller, queue, hooks)
    assert caller.sent == [commands.MakeBatches(0, 5)]
    for step in (3, 4):
        queue.put(Batch(step, Version(0, step), []), 1.0)
    found = [reader.take(step) for step in (3, 4)]
    assert [(batch.step, batch.metrics["rollout/batches_ready"]) for batch in found] == [(3, 1.0), (4, 0.0)]
    assert hooks.told == ["batch taken"] * 2
    queue.put(Batch(5, Version(0, 5), []), 0.1)
    queue.put(Batch(6, Version(0, 6), []), 0.1)


def test_the_wait_for_a_batch_ends_when_nothing_goes_on_any_more():
    caller = Answering(MakeBatches=None)
    caller.ticks = 20
    with pytest.raises(DeadlineError, match="the rollouts of step 3 are not ready, and none has gone on for 0 s"):
        reader_of(caller, MemoryTransport(1)).take(3)
    assert caller.ticks == 0


class Closed(MemoryTransport):
    """Nothing comes any more."""

    def take(self, timeout_s):
        raise TransportClosed("the other side has ended")


@pytest.mark.parametrize("transport", [MemoryTransport, Closed])
def test_what_ends_the_making_ends_the_wait_for_a_batch(transport):
    caller = Answering(MakeBatches=EngineError("the engine is gone"))
    with pytest.raises(EngineError, match="the engine is gone"):
        reader_of(caller, transport(1), rollouts_s=1e6).take(3)
    caller.stops = True  # it may come of the same signal
    with pytest.raises(Interrupted, match=r"stopped while waiting for the rollouts of step 3: continue with --resume"):
        reader_of(caller, transport(1), rollouts_s=1e6).take(3)


def test_a_queue_that_is_closed_for_no_known_reason_says_so():
    with pytest.raises(TransportClosed, match="the other side has ended"):
        reader_of(Answering(MakeBatches=None), Closed(1)).take(3)


def test_a_server_that_is_away_does_not_keep_a_batch_back():
    class Away(MemoryTransport):
        def take(self, timeout_s):
            return "", Batch(3, Version(0, 3), [])

        def __len__(self):
            raise DeadlineError("it is away")

    queue, hooks = Away(1), Told()
    batch = reader_of(Answering(MakeBatches=None), queue, hooks).take(3)
    assert "rollout/batches_ready" not in batch.metrics
    assert hooks.told == ["batch taken"]
