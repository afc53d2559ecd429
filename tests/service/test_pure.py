"""States, retries, order and placement, as functions."""

from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import ConfigError, EngineError, OutOfMemory
from slipstream.runlog.writer import exit_code_of
from slipstream.service.allocation import CPU, MAX_OVERTAKEN, Gpu, Process, choose, free_bytes, place, taken_bytes
from slipstream.service.policy import LIMITS, decide, kind_of
from slipstream.service.records import NEXT, TERMINAL, Handle, Lease, Need, cancelled, step

from .made import record

GIB = 1 << 30
STATES = st.sampled_from(sorted(NEXT))
KINDS = st.sampled_from(sorted(LIMITS))


@given(STATES, STATES, st.booleans())
def test_terminal_is_sticky_and_cancel_wins(before, after, is_cancelled):
    old = record(state=before, handle=Handle(1, 1, "", ""), leases=(Lease(CPU),))
    new = msgspec.structs.replace(old, state=after, cancel_requested=1.0 if is_cancelled else 0.0)
    if before in TERMINAL:
        assert step(old, new, 5.0) is old
        return
    wanted = "cancelled" if is_cancelled and after in ("queued", "done", "failed") else after
    if wanted != before and wanted not in NEXT[before]:
        with pytest.raises(ValueError, match="no transition"):
            step(old, new, 5.0)
        return
    found = step(old, new, 5.0)
    assert found.state == wanted
    assert (found.handle is None) == (found.leases == ()) == (wanted in {"queued", *TERMINAL})


@given(STATES, st.booleans())
def test_a_request_to_cancel_ends_what_nobody_has_claimed(state, is_claimed):
    old = record(state=state, handle=Handle(1, 1, "", "") if is_claimed else None)
    found = step(old, cancelled(old, 7.0), 7.0)
    if state in TERMINAL:
        assert found is old
    elif state == "queued" or (state == "preparing" and not is_claimed):
        assert found.state == "cancelled"
    else:
        assert (found.state, found.cancel_requested) == (state, 7.0)


@given(st.lists(KINDS, max_size=12))
def test_retries_are_bounded_by_the_kind(kinds):
    tries = []
    for kind in kinds:
        if not decide(kind, tries).retries:
            break
        tries.append(kind)
    assert all(tries.count(kind) <= limit for kind, limit in LIMITS.items())
    assert not {"user", "finished"} & set(tries)


@pytest.mark.parametrize(
    ("code", "failure_class", "retriable", "ran_out", "kind"),
    [
        (0, "", False, False, "finished"),
        (exit_code_of(ConfigError("")), "", False, False, "user"),
        (exit_code_of(OutOfMemory("")), "memory", True, False, "memory"),
        (exit_code_of(OutOfMemory("")), "", False, False, "memory"),
        (exit_code_of(EngineError("")), "engine", True, False, "infrastructure"),
        (7, "guard", False, False, "user"),
        (130, "stopped", True, False, "infrastructure"),
        (-9, "", False, False, "infrastructure"),
        (-9, "", False, True, "memory"),
        (None, "", False, False, "infrastructure"),
    ],
)
def test_the_kind_of_an_end(code, failure_class, retriable, ran_out, kind):
    assert kind_of(code, failure_class, retriable=retriable, ran_out=ran_out) == kind


def test_waits_before_retries_grow():
    waits = [decide("infrastructure", ["infrastructure"] * used).wait_s for used in range(3)]
    assert waits == [2.0, 4.0, 8.0]
    assert decide("memory", ["infrastructure"] * 3).wait_s == 0.0


def test_memory_of_others_and_of_runs_without_it_yet():
    gpu = Gpu("a", "H200", 80 * GIB, 30 * GIB, (Process(5, 20 * GIB, "python"), Process(6, 10 * GIB, "python")))
    assert taken_bytes(gpu, {5}, 40 * GIB) == 50 * GIB  # leased, not used yet, and 10 foreign
    assert taken_bytes(gpu, {5}, 10 * GIB) == 30 * GIB  # used above its lease
    hidden = msgspec_gpu(gpu, ())
    assert taken_bytes(hidden, {5}, 0) == 30 * GIB
    assert taken_bytes(hidden, {5}, 40 * GIB) == 40 * GIB
    running = record(state="running", leases=(Lease("a", 40 * GIB, 70 * GIB),))
    assert free_bytes([gpu], [running], {5}) == {"a": 30 * GIB}
    assert free_bytes([], [record(state="running", leases=(Lease(CPU),))], ()) == {}


def msgspec_gpu(gpu, processes):
    return Gpu(gpu.uuid, gpu.name, gpu.total, gpu.used, processes)


FREE = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 80), max_size=4)
NEEDS = st.builds(Need, st.integers(1, 3), st.integers(20, 60), st.integers(1, 20))


@given(NEEDS, FREE)
def test_a_place_has_enough_free_memory_and_no_gpu_twice(need, free):
    leases = place(need, free)
    fitting = [uuid for uuid in free if free[uuid] >= need.least_bytes]
    assert len(leases) == (need.gpus if len(fitting) >= need.gpus else 0)
    assert len({lease.place for lease in leases}) == len(leases)
    assert all(need.least_bytes <= lease.bytes <= free[lease.place] == lease.granted_bytes for lease in leases)
    assert all(free[each] <= min(lease.granted_bytes for lease in leases) for each in fitting if leases
               and each not in {lease.place for lease in leases})  # fmt: skip


@dataclass
class Machine:
    """Runs that start, and end one by one."""

    free: dict
    queued: list
    running: list

    def start(self):
        choice = choose(self.queued, self.free, 0.0)
        started = {each.id: each for each in choice.starts}
        for each in self.queued:
            each_waits = each.id not in started
            assert each_waits == (each.id in choice.waits)
        self.running += [(each, started[each.id].leases) for each in self.queued if each.id in started]
        for lease in (lease for start in choice.starts for lease in start.leases):
            self.free[lease.place] -= lease.bytes
            assert self.free[lease.place] >= 0
        self.queued = [
            msgspec.structs.replace(each, overtaken=each.overtaken + choice.overtaken.get(each.id, 0))
            for each in self.queued
            if each.id not in started
        ]
        return list(started)

    def end(self, number):
        _, leases = self.running.pop(number % len(self.running))
        for lease in leases:
            self.free[lease.place] += lease.bytes


@given(st.lists(NEEDS, min_size=1, max_size=14), st.integers(3, 4), st.randoms(use_true_random=False))
def test_every_run_starts_and_none_is_overtaken_too_often(needs, num_gpus, random):
    runs = [record(f"r{i:02}", need=need, submitted=float(i)) for i, need in enumerate(needs)]
    machine = Machine(dict.fromkeys("abcd"[:num_gpus], 60), list(runs), [])
    order = machine.start()
    while machine.queued:
        assert machine.running, "the queue stands still"
        machine.end(random.randrange(100))
        order += machine.start()
    for place_, name in enumerate(order):
        assert sum(later > name for later in order[:place_]) <= MAX_OVERTAKEN


def test_two_gpus_and_eight_runs_in_the_documented_order():
    needs = [Need(1, 30, 20), Need(2, 40, 40), Need(1, 60, 60), Need(1, 10, 10), *[Need(1, 5, 5)] * 4]
    runs = [record(f"r{i}", need=need, submitted=float(i)) for i, need in enumerate(needs)]
    choice = choose(runs, {"a": 60, "b": 60}, 0.0)
    # r0 has one GPU, so r1 waits for two; r2 fills the other; r3 to r5 share the first one with r0, which is overtaken
    # no more.
    assert [(each.id, *(lease.place for lease in each.leases)) for each in choice.starts] == [
        ("r0", "a"),
        ("r2", "b"),
        ("r3", "a"),
        ("r4", "a"),
        ("r5", "a"),
    ]
    assert choice.overtaken == {"r1": MAX_OVERTAKEN}
    assert choice.waits.keys() == {"r1", "r6", "r7"}
    assert "r1, overtaken" in choice.waits["r6"]


def test_a_run_that_waits_before_a_retry_holds_nobody_up():
    runs = [record("a", not_before=10.0), record("b", submitted=1.0)]
    assert [each.id for each in choose(runs, {CPU: 0}, 4.0).starts] == ["b"]
    assert [each.id for each in choose(runs, {CPU: 0}, 10.0).starts] == ["a"]
