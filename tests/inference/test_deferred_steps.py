"""Bookkeeping that is deferred ends as that which is done at once; with plain objects in the place of vLLM's."""

import random
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

from slipstream.inference.plugin.patches.deferred_steps import DeferredSteps

from .fakes import put

BLOCK, STOP, PROMPT = 4, 7, 3
COUNTS = ("num_computed_tokens", "num_in_flight_tokens", "num_output_placeholders", "num_prompt_tokens", "client_index")


class AsyncScheduler:
    """Has the blocks of its requests counted."""

    def __init__(self):
        self.hash_block_size = BLOCK
        manager = SimpleNamespace(block_size=BLOCK, num_cached_block={})

        def cache_blocks(request, known):
            assert known // BLOCK > manager.num_cached_block.get(request.request_id, 0), "only what is new"
            manager.num_cached_block[request.request_id] = known // BLOCK

        self.kv_cache_manager = SimpleNamespace(
            coordinator=SimpleNamespace(single_type_managers=[manager]), cache_blocks=cache_blocks
        )

    @property
    def cached(self):
        return self.kv_cache_manager.coordinator.single_type_managers[0].num_cached_block


class Scheduler(AsyncScheduler):
    """As vLLM's, it is no asynchronous one."""


class Request(SimpleNamespace):
    """A running request whose prompt and first token are there."""

    def __init__(self, number):
        super().__init__(
            request_id=f"r{number}",
            client_index=number % 2,
            status="running",
            num_computed_tokens=PROMPT,
            num_in_flight_tokens=0,
            num_output_placeholders=0,
            num_prompt_tokens=PROMPT,
            _all_token_ids=[1] * PROMPT + [50],
            _output_token_ids=[50],
            block_hashes=[0],
            is_prefill_chunk=False,
            _slipstream_plain_until=[30, 11, 1000][number % 3],
            stale=0,
        )

    def __eq__(self, other):
        return self is other

    def update_block_hashes(self):
        new = len(self._all_token_ids) // BLOCK
        assert new > len(self.block_hashes), "only when there is one"
        self.block_hashes = list(range(new))


def held_of(request, number):
    return SimpleNamespace(
        tokens=[50],
        logprobs=None if number % 4 == 3 else [0.0],
        stop_ids=frozenset({STOP}) if number % 2 else frozenset({9}),
        max_tokens=[100, 40, 12][number % 3],
    )


@pytest.fixture(autouse=True)
def scripted(monkeypatch):
    put(
        monkeypatch,
        v1__core__sched__async_scheduler={"AsyncScheduler": AsyncScheduler},
        v1__request={"RequestStatus": SimpleNamespace(RUNNING="running")},
    )


class Twin:
    """Requests, what is held of their tokens, and their scheduler."""

    def __init__(self, is_async, number):
        self.scheduler = AsyncScheduler() if is_async else type("Plain", (), dict(vars(AsyncScheduler)))()
        self.is_async = is_async
        self.running = [Request(n) for n in range(number)]
        self.requests = {request.request_id: request for request in self.running}
        self.held = {request.request_id: held_of(request, n) for n, request in enumerate(self.running) if n != 4}

    def of_client(self, client):
        return {id_: held for id_, held in self.held.items() if self.requests[id_].client_index == client}

    def schedule(self, ids):
        for id_ in ids:
            request = self.requests[id_]
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += self.is_async

    def take(self, id_, token, value):
        """As vLLM takes a token at once."""
        request, held = self.requests[id_], self.held.get(id_)
        request._output_token_ids.append(token)
        request._all_token_ids.append(token)
        request.num_in_flight_tokens -= 1
        request.num_output_placeholders -= self.is_async
        if held is not None:
            held.tokens.append(token)
            if held.logprobs is not None:
                held.logprobs.append(value)
        if len(request._all_token_ids) // BLOCK > len(request.block_hashes):
            request.update_block_hashes()
        known = request.num_computed_tokens - request.num_output_placeholders
        if self.is_async and known // BLOCK > self.scheduler.cached.get(id_, 0):
            self.scheduler.kv_cache_manager.cache_blocks(request, known)

    def end(self, id_):
        self.requests[id_].status = "ended"
        self.running = [request for request in self.running if request.request_id != id_]

    def state(self):
        return {
            id_: (
                *(getattr(request, name) for name in COUNTS),
                *(request._all_token_ids, request._output_token_ids, request.block_hashes),
                *((self.held[id_].tokens, self.held[id_].logprobs) if id_ in self.held else ()),
                self.scheduler.cached.get(id_),
            )
            for id_, request in self.requests.items()
        }


def result_of(ids, tokens, number):
    values = np.float32([[-number - place / 64] for place in range(len(ids))])
    step = SimpleNamespace(lists=SimpleNamespace(logprobs=values))
    return SimpleNamespace(req_ids=ids, sampled_token_ids=[[token] for token in tokens]), step


class Run:
    """Two twins that get the same: one with bookkeeping that is deferred, one without."""

    def __init__(self, seed):
        self.draw, self.is_async = random.Random(seed), seed % 3 > 0
        self.ours, self.theirs = Twin(self.is_async, 7), Twin(self.is_async, 7)
        self.deferred = DeferredSteps(self.ours.scheduler, "stale")
        self.deferring = set()
        self.num_plain = self.num_left = 0

    def schedule(self):
        """Schedules most requests; returns which."""
        assert self.deferred.track(self.ours.running)
        assert self.deferred.ids == [request.request_id for request in self.ours.running]
        asked = [row for row, request in enumerate(self.theirs.running) if self.may_not_be_plain(request)]
        assert self.deferred.rows_to_check() == asked
        for row in asked:
            request = self.ours.running[row]
            assert self.ours.state()[request.request_id][:7] == self.theirs.state()[request.request_id][:7]
            more = request.num_computed_tokens + self.draw.choice([3, 9, 80])
            request._slipstream_plain_until = self.theirs.running[row]._slipstream_plain_until = more
            self.deferred.plain_until[row] = more
        rows = np.array([row for row in range(len(self.ours.running)) if self.draw.random() < 0.97], np.int64)
        ids = [self.ours.running[row].request_id for row in rows]
        self.deferred.schedule(rows)
        self.theirs.schedule(ids)
        return ids

    def may_not_be_plain(self, request):
        is_ahead = self.is_async and request.request_id in self.deferring and request.num_output_placeholders > 0
        return request.num_computed_tokens + (not is_ahead) >= request._slipstream_plain_until

    def collect(self, ids, number):
        """A token comes for each of these."""
        if self.draw.random() < 0.3:
            self.draw.shuffle(ids)
        tokens = {id_: self.draw.choice([STOP, *range(10, 90)]) for id_ in ids}
        result, step = result_of(ids, tokens.values(), number)
        values = dict(zip(ids, step.lists.logprobs[:, 0].tolist(), strict=True))
        plain = {id_ for id_, token in tokens.items() if self.is_plain(id_, token)}
        rest, clients = self.deferred.collect(
            dict.fromkeys(self.draw.sample(ids, len(ids)), 1), result, step, self.ours
        )
        assert rest == {id_: 1 for id_ in ids if id_ not in plain}
        assert clients == {self.theirs.requests[id_].client_index for id_ in plain}
        self.deferring = {request.request_id for request in self.ours.running} & self.theirs.held.keys() - rest.keys()
        self.num_plain, self.num_left = self.num_plain + len(plain), self.num_left + len(rest)
        for id_, token in tokens.items():
            for twin in (self.ours, self.theirs) if id_ in rest else (self.theirs,):
                twin.take(id_, token, values[id_])
            is_long = id_ in rest and len(self.ours.requests[id_]._output_token_ids) >= 45
            if is_long or (id_ in rest and token == STOP and self.draw.random() < 0.3):
                self.ours.end(id_)
                self.theirs.end(id_)

    def is_plain(self, id_, token):
        held = self.theirs.held.get(id_)
        if held is None or token in held.stop_ids:
            return False
        return len(self.theirs.requests[id_]._output_token_ids) + 1 < held.max_tokens

    def look(self):
        """Somebody reads requests, as vLLM's own code does."""
        self.deferred.stop_deferring("unknown")
        if self.draw.random() < 0.02:
            self.deferred.stop_deferring()
            self.deferring = set()
            assert self.ours.state() == self.theirs.state()
        if not self.ours.running:
            return
        id_ = self.draw.choice(self.ours.running).request_id
        if self.draw.random() < 0.05:
            assert self.deferred.all_token_ids(id_) == self.theirs.requests[id_]._all_token_ids
        if self.draw.random() < 0.02:
            self.deferred.stop_deferring(id_)
            self.deferring.discard(id_)
            assert self.ours.state()[id_] == self.theirs.state()[id_]


@pytest.mark.parametrize("seed", range(12))
def test_after_a_flush_all_is_as_if_nothing_had_been_deferred(seed):
    run, ahead, number = Run(seed), deque(), 0
    while run.ours.running or ahead:
        number += 1
        if run.ours.running:
            ahead.append(run.schedule())
        if run.is_async and run.ours.running and len(ahead) < 2:
            continue
        ids = [id_ for id_ in ahead.popleft() if run.ours.requests[id_].status == "running"]
        if ids:
            run.collect(ids, number)
            run.look()
    run.deferred.flush_all()
    assert run.ours.state() == run.theirs.state()
    assert run.num_plain > run.num_left > 0


def started(is_async=True, number=3):
    twin = Twin(is_async, number)
    deferred = DeferredSteps(twin.scheduler, "stale")
    assert deferred.track(twin.running)
    return twin, deferred


def step(twin, deferred, tokens, schedules=True, counts=None, ids=None):
    if schedules:
        deferred.schedule(np.arange(len(twin.running)))
    ids = ids or [request.request_id for request in twin.running]
    result, lists = result_of(ids, tokens, 1)
    return deferred.collect(counts or dict.fromkeys(ids, 1), result, lists, twin)


def test_steps_of_another_form_are_left_to_vllm():
    twin, deferred = started()
    assert step(twin, deferred, [0] * 3) == ({}, {0, 1})
    ids = list(twin.requests)
    for sampled in ([[11], [12]], [[11], [12], []], [[11], [12], [13, 14]]):
        result = SimpleNamespace(req_ids=ids, sampled_token_ids=sampled)
        scheduled = dict.fromkeys(ids, 1)
        assert deferred.collect(scheduled, result, None, twin) == (scheduled, set())
        assert twin.held["r0"].tokens == [50, 0], "what was deferred is written"
    short = {"r0": 1}
    assert deferred.collect(short, result_of(ids, [1] * 3, 1)[0], None, twin) == (short, set())
    deferred.clear()
    assert step(twin, deferred, [11] * 3, schedules=False) == (dict.fromkeys(ids, 1), set())
    assert (deferred.requests, deferred.ids) == ([], [])


def test_some_requests_of_a_step_are_left_to_vllm():
    twin, deferred = started(number=6)
    twin.requests["r0"].stale = 1
    twin.requests["r1"].status = "preempted"
    counts = {"r0": 1, "r1": 1, "r2": 2, "r3": 1, "r4": 1, "r5": 1}
    rest, clients = step(twin, deferred, [10, 11, 12, STOP, 14, 15], counts=counts)
    assert (rest, clients) == ({"r0": 1, "r1": 1, "r2": 2, "r3": 1, "r4": 1}, {1})
    deferred.flush_all()
    assert [twin.held[f"r{n}"].tokens for n in (0, 1, 2, 3, 5)] == [[50]] * 4 + [[50, 15]]
    assert deferred.all_token_ids("r5") is not twin.requests["r5"]._all_token_ids
    ids = ["r5", "unknown", "r0", "r1", "r2", "r3"]
    rest, clients = step(twin, deferred, [16] * 6, ids=ids)
    assert (rest, clients) == ({"unknown": 1, "r0": 1, "r1": 1}, {0, 1})


@pytest.mark.parametrize("why", ["prompt", "ahead"])
def test_a_request_that_is_not_in_plain_decode_is_none_to_track(why):
    twin = Twin(True, 3)
    if why == "prompt":
        twin.running[1].is_prefill_chunk = True
    else:
        twin.running[1].num_computed_tokens -= 1
    deferred = DeferredSteps(twin.scheduler, "stale")
    assert not deferred.track(twin.running)
    assert deferred.requests == []


@pytest.mark.parametrize("is_async", [True, False])
def test_a_step_is_scheduled_before_the_one_before_has_come_by_an_asynchronous_scheduler_alone(is_async):
    twin, deferred = started(is_async)
    deferred.schedule(np.arange(3))
    assert deferred.track(twin.running) == is_async
    assert [request.num_in_flight_tokens for request in twin.running] == [0 if is_async else 1] * 3
    deferred.flush_all()
    assert [request.num_computed_tokens for request in twin.running] == [PROMPT + 1] * 3


def test_requests_that_come_are_tracked_from_then_on():
    twin, deferred = started(number=2)
    step(twin, deferred, [10, 11])
    late = Request(2)
    twin.running.append(late)
    twin.requests["r2"] = late
    twin.held["r2"] = held_of(late, 2)
    assert deferred.track(twin.running)
    assert twin.held["r0"].tokens == [50, 10]
    assert deferred.computed.tolist() == [PROMPT + 1, PROMPT + 1, PROMPT]
    assert deferred.prompt.tolist() == [PROMPT] * 3
    assert step(twin, deferred, [12, 13, 14]) == ({}, {0, 1})
    twin.end("r0")
    assert deferred.track(twin.running)
    assert (deferred.ids, deferred.computed.tolist()) == (["r1", "r2"], [PROMPT + 2, PROMPT + 1])
    assert twin.held["r2"].tokens == [50], "and nothing needed to be written for it"
    assert step(twin, deferred, [15, 16]) == ({}, {0, 1})
    deferred.flush_all()
    assert (twin.held["r1"].tokens, twin.held["r2"].tokens) == ([50, 11, 13, 15], [50, 14, 16])
