"""Checkpoints beside training: whose state they hold, who waits for whom, and what becomes of a failure."""

import ctypes
import functools
import resource
import threading
from types import SimpleNamespace

import pytest
import torch
from tests.trainer.steps import advance
from tests.waiting import Clock

from slipstream.errors import SlipstreamError, TrainingError
from slipstream.trainer.checkpoints import snapshot
from slipstream.trainer.checkpoints import writer as checkpoint_writer
from slipstream.trainer.checkpoints.checkpoint import CheckpointStore, damage
from slipstream.trainer.checkpoints.snapshot import Snapshots
from slipstream.trainer.checkpoints.writer import EVERY_S, CheckpointWriter, Schedule
from slipstream.trainer.learner import Learner
from slipstream.trainer.loss import SFTObjective
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.optim.adamw_bf16 import RoundedAdamW
from slipstream.trainer.optim.base import MasterAdamW

WAIT_S = 60.0


def files_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def is_page_locked(tensor):
    """As the driver has it: `is_pinned` knows torch's own memory only."""
    registered, attributes = 1, (ctypes.c_uint64 * 32)()  # cudaPointerAttributes begins with the type, an int
    driver = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
    assert driver.cudaPointerGetAttributes(attributes, ctypes.c_void_p(tensor.data_ptr())) == 0
    return attributes[0] & 0xFFFFFFFF == registered


class Told:
    """A run folder that only remembers."""

    def __init__(self, folder):
        self.folder = folder
        self.events, self.warnings, self.noted = [], [], {}

    def event(self, kind, **fields):
        self.events.append((kind, fields["step"]))

    def warning(self, message, **fields):
        self.warnings.append(message)

    def note(self, values):
        self.noted |= values


class SlowStore(CheckpointStore):
    """A disk that takes nothing until it is let go."""

    def __init__(self, folder, **options):
        super().__init__(folder, **options)
        self.begun, self.may_go_on = threading.Event(), threading.Event()

    def save(self, *arguments, **options):
        self.begun.set()
        assert self.may_go_on.wait(WAIT_S)
        return super().save(*arguments, **options)


@pytest.fixture
def make_writer(make_learner, make_batch, tmp_path):
    """Of a learner that has made a step."""
    made = []

    def make(every=1, *, store=None, beside=True, clock=None, num_steps=100):
        told = Told(tmp_path)
        schedule = Schedule(every, num_steps, clock or Clock())
        store = store or CheckpointStore(tmp_path / "checkpoints", keep=3)
        writer = CheckpointWriter(store, make_learner(), None, told, schedule, beside=beside)
        made.append((writer, store))
        writer.store, writer.told, writer.learner = store, told, writer._learner
        advance(writer.learner, make_batch(seed=1))
        return writer

    yield make
    for writer, store in made:
        getattr(store, "may_go_on", threading.Event()).set()
        writer.close()


@pytest.mark.parametrize(
    ("dtype", "kind", "settings"),
    [("float32", MasterAdamW, {}), ("bfloat16", MasterAdamW, {}), ("bfloat16", RoundedAdamW, {"seed": 3})],
)
def test_a_snapshot_is_what_was_then(dtype, kind, settings, make_learner, make_batch, model_folder, tmp_path):
    learner = make_learner(dtype=dtype, kind=kind, **settings)
    snapshots = Snapshots(learner)
    for step in (1, 2):  # the second in the memory of the first
        advance(learner, make_batch(seed=step))
        direct = CheckpointStore(tmp_path / "direct").save(step, learner, model_folder, {"step": step})
        taken = snapshots.take()
        advance(learner, make_batch(seed=9))
        beside = CheckpointStore(tmp_path / "beside").save(step, taken, model_folder, {"step": step})
        assert files_of(beside) == files_of(direct)
        assert damage(beside) is None
    after = CheckpointStore(tmp_path / "after").save(2, learner, model_folder, {"step": 2})
    assert files_of(after) != files_of(direct)
    resumed, again = make_learner(dtype=dtype, kind=kind, **settings), make_learner(dtype=dtype, kind=kind, **settings)
    CheckpointStore(tmp_path / "beside").load(beside, resumed)
    CheckpointStore(tmp_path / "direct").load(direct, again)
    for each in (resumed, again):
        advance(each, make_batch(seed=4))
    assert all(torch.equal(a, b) for a, b in zip(resumed.state().values(), again.state().values(), strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", [MasterAdamW, functools.partial(RoundedAdamW, seed=3)])
def test_a_gpu_copies_into_locked_memory_while_training_goes_on(kind, make_batch, model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "_PIECE_BYTES", 50_000)
    model = PolicyModel.load(model_folder, "bfloat16", "cuda")
    learner = Learner(model, kind(model.network.named_parameters()), micro_batch_tokens=256)
    snapshots = Snapshots(learner)
    advance(learner, make_batch(seed=1))
    snapshots.preparation()()
    for step in (1, 2):
        direct = CheckpointStore(tmp_path / "direct").save(step, learner, model_folder, {})
        taken = snapshots.take()
        advance(learner, make_batch(seed=step + 1))
        assert all(is_page_locked(tensor) for tensor in taken.state.values() if tensor.numel())
        assert files_of(CheckpointStore(tmp_path / "beside").save(step, taken, model_folder, {})) == files_of(direct)
    snapshots.close()


def test_a_state_between_the_halves_of_an_update_is_refused(make_learner, make_batch):
    learner = make_learner()
    learner.forward_backward(make_batch(), SFTObjective())
    learner.optim_prepare(1e-3)
    with pytest.raises(TrainingError, match="between optim_prepare and optim_commit"):
        Snapshots(learner).take()


def test_training_does_not_wait_for_the_disk(make_writer, make_batch, tmp_path):
    writer = make_writer(store=SlowStore(tmp_path / "checkpoints"))
    before = [tensor.clone() for tensor in writer.learner.state().values()]
    writer.save(1, {"step": 1})
    assert writer.store.begun.wait(WAIT_S)
    advance(writer.learner, make_batch(seed=2))
    assert writer.store.latest() is None, "a step was made while nothing was on the disk"
    assert (writer.told.events, writer.saved_step) == ([], 0)
    writer.store.may_go_on.set()
    writer.wait()
    assert (writer.told.events, writer.saved_step) == ([("checkpoint", 1)], 1)
    writer.store.load(writer.store.latest(), writer.learner)
    assert all(torch.equal(a, b) for a, b in zip(before, writer.learner.state().values(), strict=True))


def test_without_room_the_caller_writes(make_writer):
    writer = make_writer(beside=False)
    writer.save(1, {"step": 1})
    assert writer.told.events == [("checkpoint", 1)]
    assert writer.is_due(2)
    assert writer._thread is None, "nor is memory taken"


@pytest.mark.parametrize("beside", [True, False])
def test_what_it_takes_from_training_decides_when_the_next_is_due(beside, make_writer, monkeypatch):
    """The write, where training waits for it; the copy alone, where it does not."""
    ticks = iter(range(0, 10**6, 40))
    writer = make_writer("10min", beside=beside)
    monkeypatch.setattr(checkpoint_writer, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    writer.save(1, {})
    assert any("took" in told and "from training" in told for told in writer.told.warnings)
    writer.wait()
    writer.told.warnings.clear()
    writer._schedule.interval_s = EVERY_S
    writer.save(2, {}, last=True)
    assert not writer.told.warnings, "none follows the last"


def test_by_steps_each_is_written_and_waits_for_the_one_before(make_writer, tmp_path):
    writer = make_writer(every=1, store=SlowStore(tmp_path / "checkpoints", keep=3))
    writer.save(1, {"step": 1})
    assert writer.is_due(2)
    threading.Timer(0.05, writer.store.may_go_on.set).start()
    for step in (2, 3):
        writer.save(step, {"step": step})
    writer.wait()
    assert writer.told.events == [("checkpoint", 1), ("checkpoint", 2), ("checkpoint", 3)]
    assert writer.told.noted == {}


def test_by_the_clock_one_that_would_wait_is_put_off_and_counted(make_writer, tmp_path):
    clock = Clock()
    writer = make_writer(every="10min", store=SlowStore(tmp_path / "checkpoints"), clock=clock)
    writer.begin()
    clock.now = EVERY_S - 1
    assert not writer.is_due(1)
    writer.wait()
    clock.now = EVERY_S
    assert writer.is_due(2)
    writer.save(2, {"step": 2})
    clock.now = 2 * EVERY_S
    assert not writer.is_due(3)
    assert not writer.is_due(4)
    assert writer.told.noted == {"checkpoint/skipped": 2.0}
    writer.store.may_go_on.set()
    writer.wait()
    assert writer.is_due(5)


def test_a_failed_write_is_raised_as_it_was(make_writer, model_folder, tmp_path):
    writer = make_writer()
    free = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, free[1]))
    try:
        with pytest.raises(SlipstreamError) as direct:
            CheckpointStore(tmp_path / "checkpoints").save(1, writer.learner, model_folder, {})
        writer.save(1, {"step": 1})
        writer._thread.join(WAIT_S)
        with pytest.raises(SlipstreamError) as beside:
            writer.is_due(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, free)
    assert (type(beside.value), str(beside.value)) == (type(direct.value), str(direct.value))
    assert "make room on its disk" in str(beside.value)
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert writer.told.events == []
    writer.wait()


def test_who_waits_for_a_write_learns_of_its_error_once(make_writer, monkeypatch):
    writer = make_writer()

    def fails(*_, **__):
        raise SlipstreamError("the disk is gone")

    monkeypatch.setattr(writer.store, "save", fails)
    writer.save(1, {"step": 1})
    with pytest.raises(SlipstreamError, match="the disk is gone"):
        writer.wait()
    writer.wait()


def test_a_disk_that_takes_nothing_is_not_waited_for_without_end(make_writer, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_writer, "_POLL_S", 0.02)
    monkeypatch.setattr(checkpoint_writer, "QUIET_S", 0.1)
    writer = make_writer(store=SlowStore(tmp_path / "checkpoints"))
    writer.save(1, {"step": 1})
    with pytest.raises(SlipstreamError, match=r"step-000001 cannot be written \(the disk took nothing for 0.1 s\)"):
        writer.wait()
    assert writer._thread.daemon, "nor does the process wait for it"
    writer.close()
    assert "was not written" in writer.told.warnings[0], "where something else ends the run it is only told"
    writer.store.may_go_on.set()
    writer._thread.join(WAIT_S)


def test_quiet_is_counted_in_polls_since_the_disk_took_something(make_writer, monkeypatch):
    monkeypatch.setattr(checkpoint_writer, "_POLL_S", 1.0)
    monkeypatch.setattr(checkpoint_writer, "QUIET_S", 3.0)
    writer, polls = make_writer(), []
    written = iter([5, 5, 5, 6, 6, 6, 6, 6])
    monkeypatch.setattr(writer.store, "unfinished_bytes", lambda: next(written))
    writer._thread = SimpleNamespace(is_alive=lambda: True, join=polls.append)
    with pytest.raises(SlipstreamError, match="checkpoints cannot be written"):
        writer.wait()
    assert polls == [1.0] * 7
    writer._thread = None


def test_checkpoints_by_the_clock_get_rarer_where_they_cost_much():
    clock = Clock()
    schedule = Schedule("10min", 1000, clock)
    clock.now = EVERY_S - 1
    assert not schedule.is_due(7)
    assert schedule.is_near(7)
    clock.now = EVERY_S
    assert schedule.is_due(8)
    assert schedule.saved(0.5) == ""
    assert not schedule.is_due(9)
    assert not schedule.is_near(9)
    assert "a checkpoint took 36 s from training: they are made every 20 minutes in place of 10" in schedule.saved(36.0)
    assert schedule.saved(37.0) == "", "told once"
    clock.now = EVERY_S + 1200
    assert not schedule.is_due(10)
    assert schedule.saved(1.0) == ""
    clock.now += EVERY_S
    assert schedule.is_due(11)
    by_steps = Schedule(4, 10, clock)
    assert [step for step in range(1, 11) if by_steps.is_due(step)] == [4, 8]
    assert [step for step in range(1, 11) if by_steps.is_near(step)] == [1, 2, 3, 4, 5, 6, 7]
    assert by_steps.saved(1000.0) == ""


def test_near_is_half_of_the_interval_and_nothing_is_near_the_end():
    clock = Clock()
    schedule = Schedule("10min", 1000, clock)
    clock.now = EVERY_S / 2 - 1
    assert not schedule.is_near(1)
    clock.now = EVERY_S / 2
    assert schedule.is_near(1)
    by_steps = Schedule(4, 8, clock)
    assert [step for step in range(1, 9) if by_steps.is_near(step)] == [1, 2, 3], "the last is not scheduled"
    assert (schedule.is_by_clock, by_steps.is_by_clock) == (True, False)
    # Three percent: 27 s stand for 900.
    assert schedule.saved(26.9) == ""
    schedule = Schedule("10min", 1000, clock)
    assert schedule.saved(27.1).startswith("a checkpoint took 27 s from training: they are made every 15 minutes in")


def test_what_is_told_of_a_checkpoint(make_writer, tmp_path):
    writer = make_writer(every=1)
    told = []
    writer.told.event = lambda kind, **fields: told.append((kind, fields))
    writer.save(1, {"step": 1}, best=0.5)
    writer.wait()
    writer.save(2, {"step": 2}, last=True)
    writer.link_best(1, 0.25)
    (first, best, second, again) = told
    assert first[1].pop("seconds") >= 0.0
    path = writer.store.latest(until=1)
    assert first == (
        "checkpoint",
        {
            "step": 1,
            "path": "checkpoints/step-000001",
            "digest": writer.store.read_fingerprints(path).digest,
            "beside": True,
        },
    )
    assert best == ("best", {"step": 1, "accuracy": 0.5})
    assert (second[1]["step"], second[1]["beside"]) == (2, False), "the last is not beside training"
    assert again == ("best", {"step": 1, "accuracy": 0.25})
    assert writer.store.best() == path


def test_what_a_checkpoint_took_is_told_in_milliseconds(make_writer, monkeypatch):
    writer, told = make_writer(beside=False), []
    ticks = iter([10.0, 12.34567, 20.0])
    monkeypatch.setattr(checkpoint_writer, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    writer.told.event = lambda kind, **fields: told.append(fields)
    writer.save(1, {"step": 1})
    assert [(fields["seconds"], fields["beside"]) for fields in told] == [(2.346, False)]


def test_a_critics_state_is_written_beside_training_too(make_learner, make_batch, tmp_path, monkeypatch):
    told, learner, closed = Told(tmp_path), make_learner(), []
    critic = SimpleNamespace(learner=make_learner(), save=lambda folder: 1 / 0)
    advance(critic.learner, make_batch(seed=1))
    store = CheckpointStore(tmp_path / "checkpoints")
    writer = CheckpointWriter(store, learner, critic, told, Schedule(1, 9, Clock()), beside=True)
    writer.begin()
    writer.save(1, {"step": 1})
    writer.wait()
    names = sorted(file.name for file in (tmp_path / "checkpoints/step-000001/state/critic").iterdir())
    assert names == ["learner.json", "learner.safetensors"]
    resumed = make_learner()
    resumed.load(tmp_path / "checkpoints/step-000001/state/critic")
    assert resumed.step == 1
    assert all(
        torch.equal(a, b) for a, b in zip(resumed.state().values(), critic.learner.state().values(), strict=True)
    )
    monkeypatch.setattr(Snapshots, "close", lambda self: closed.append(self))
    writer.close()
    assert len(closed) == 2


def test_memory_is_taken_once_in_time_and_each_tensor_begins_on_a_page(make_writer):
    writer = make_writer(every=3)
    assert not writer.is_due(1)
    assert writer._thread is not None
    writer.wait()
    prepared = writer._thread
    assert not writer.is_due(2)
    assert writer._thread is prepared, "once"
    memory = writer._snapshots._buffer._bytes.data_ptr()
    taken = writer._snapshots.take()
    starts = [tensor.data_ptr() for tensor in (*dict(taken.weights).values(), *taken.state.values())]
    assert starts[0] == memory
    assert starts == sorted(set(starts))
    assert {start % 4096 for start in starts} == {0}
    assert not Snapshots(writer.learner, deployed=False).take().weights


def test_the_clock_starts_when_training_does(make_writer):
    clock = Clock()
    writer = make_writer("10min", beside=False, clock=clock)
    clock.now = 500.0
    writer.begin()
    for clock.now, due in ((600.0, False), (1099.0, False), (1100.0, True)):
        assert writer.is_due(1) is due


@pytest.mark.parametrize(("beside", "step"), [(True, 5), (False, 1), (True, 4)])
def test_memory_is_not_taken_where_no_snapshot_comes_soon(beside, step, make_writer):
    """After the last scheduled one, for a caller that writes itself, and where a snapshot takes it at once."""
    writer = make_writer(every=4, num_steps=8, beside=beside)
    assert writer.is_due(step) is (step == 4)
    assert writer._thread is None


def test_memory_is_prepared_for_policy_and_critic_before_the_first_snapshot_only(make_learner, tmp_path):
    learner, critic = make_learner(), SimpleNamespace(learner=make_learner())
    store = CheckpointStore(tmp_path / "checkpoints")
    writer = CheckpointWriter(store, learner, critic, Told(tmp_path), Schedule(3, 99, Clock()), beside=True)
    writer.is_due(1)
    writer.wait()
    sizes = [each._buffer._bytes.nbytes for each in (writer._snapshots, writer._critics)]
    assert sizes[0] > sizes[1] > 0
    writer.save(3, {})
    writer.wait()
    thread = writer._thread
    assert not writer.is_due(4)
    assert writer._thread is thread
    writer.close()


def test_the_first_snapshot_may_come_without_preparation(make_writer):
    writer = make_writer(every=3)
    writer.save(1, {"step": 1})
    writer.wait()
    thread = writer._thread
    assert not writer.is_due(2)
    assert writer._thread is thread


def test_the_last_is_written_without_a_copy(make_writer, monkeypatch):
    writer = make_writer()
    monkeypatch.setattr(Snapshots, "take", None)
    writer.save(1, {"step": 1}, last=True)
    assert writer.saved_step == 1


def test_what_is_being_written_can_be_marked_as_the_best(make_writer, tmp_path):
    writer = make_writer(store=SlowStore(tmp_path / "checkpoints"))
    writer.save(1, {"step": 1})
    threading.Timer(0.05, writer.store.may_go_on.set).start()
    writer.link_best(1, 0.5)
    assert writer.told.events == [("checkpoint", 1), ("best", 1)]
    assert writer.store.best() == writer.store.latest()
