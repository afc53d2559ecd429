"""What a step of plain decode says and changes, and which steps vLLM makes itself; with plain objects as vLLM's."""

from types import SimpleNamespace

import pytest

from slipstream.inference.plugin.patches.decoding import PlainSteps, flush

from .fakes import put

BLOCK = 4


class AsyncScheduler:
    """Its own `schedule` is called while it has no requests."""

    def __init__(self, requests, cached, blocks, num_free=3, **fields):
        self.manager = Full(cached, blocks)
        self.asked, self.seen, self.fails = [], [], False
        self.free = [SimpleNamespace(block_id=100 + number) for number in range(num_free)]
        self.kv_cache_manager = SimpleNamespace(
            coordinator=SimpleNamespace(single_type_managers=[self.manager], cache_blocks=self._cache),
            block_pool=SimpleNamespace(
                hash_block_size=BLOCK,
                get_num_free_blocks=lambda: len(self.free),
                get_new_blocks=lambda number: [self.free.pop(0) for _ in range(number)],
            ),
            enable_caching=True,
            max_model_len=50,
            allocate_slots=self._allocate,
            get_num_common_prefix_blocks=lambda id_: [f"of {id_}"],
        )
        self.running, self.waiting, self.num_waiting_for_streaming_input = requests, [], 0
        self.hash_block_size, self.num_sampled_tokens_per_step, self.max_num_running_reqs = BLOCK, 1, 8
        self.max_num_scheduled_tokens, self.scheduler_config = 16, SimpleNamespace(max_num_batched_tokens=16)
        self.max_model_len, self._inflight_prefills, self._pause_state = 50, 0, "running"
        self.use_v2_model_runner, self.prev_step_scheduled_req_ids, self.prefix_blocks = False, set(), [0]
        vars(self).update(fields)

    def _cache(self, request, number):
        self.manager.num_cached_block[request.request_id] = number // BLOCK
        self.asked.append(("cache", request.request_id, number))

    def _allocate(self, request, number, **options):
        self.asked.append(("allocate", request.request_id, number, options))
        request._slipstream_plain_until = 40
        return SimpleNamespace(get_block_ids=lambda allow_none=False: ([7],) if allow_none else ([],))

    def schedule(self):
        self.seen.append((self.running, self.max_num_running_reqs))
        self.prev_step_scheduled_req_ids.clear()
        if self.fails:
            raise KeyError
        cached = SimpleNamespace(all_token_ids={})
        return SimpleNamespace(scheduled_cached_reqs=cached, num_common_prefix_blocks=self.prefix_blocks)


class Full:
    """As vLLM's manager of full attention."""

    def __init__(self, cached, blocks):
        self.block_size, self.num_cached_block = BLOCK, cached
        self.req_to_blocks = {
            id_: [SimpleNamespace(block_id=number) for number in range(count)] for id_, count in blocks.items()
        }


class VllmRequest:
    def __init__(self):
        self.num_stale_output_tokens = 0


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    put(
        monkeypatch,
        v1__core__sched__scheduler={"Scheduler": None},
        v1__core__sched__async_scheduler={"AsyncScheduler": AsyncScheduler},
        v1__core__sched__interface={"PauseState": SimpleNamespace(PAUSED_ALL="paused")},
        v1__core__single_type_kv_cache_manager={"FullAttentionManager": Full},
        v1__request={"Request": VllmRequest, "RequestStatus": SimpleNamespace(RUNNING="running")},
    )


class Request(SimpleNamespace):
    def __init__(self, id_, computed, in_flight=0, **fields):
        super().__init__(
            request_id=id_,
            client_index=0,
            status="running",
            num_stale_output_tokens=0,
            num_in_flight_tokens=in_flight,
            num_output_placeholders=in_flight,
            num_computed_tokens=computed,
            num_prompt_tokens=3,
            max_tokens=40,
            _all_token_ids=list(range(computed + 1 - in_flight)),
            is_prefill_chunk=False,
            _slipstream_plain_until=0,
            structured_output_request=None,
            pooling_params=None,
            mm_features=[],
            resumable=False,
            spec_token_ids=[],
        )
        vars(self).update(fields)

    def __eq__(self, other):
        return self is other


def scheduled(scheduler):
    return PlainSteps.of(scheduler, AsyncScheduler.schedule).schedule(scheduler)


def test_a_step_gives_each_request_a_token_and_a_block_to_those_that_need_one():
    requests = [
        Request("roomy", 5, _slipstream_plain_until=30),
        Request("full", 8),
        Request("fills", 7),
        Request("ahead", 8, in_flight=1),
        Request("new", 4),
    ]
    cached, blocks = {"full": 2, "fills": 1, "ahead": 1}, {"roomy": 2, "full": 2, "fills": 2, "ahead": 3}
    scheduler = AsyncScheduler(requests, cached, blocks, 4, prev_step_scheduled_req_ids={"roomy", "full", "ended"})
    before = scheduler.running
    output = scheduled(scheduler)
    ids = [request.request_id for request in requests]
    assert scheduler.seen == [([], 0)], "vLLM's own schedule saw no requests"
    assert (scheduler.running, scheduler.max_num_running_reqs) == (before, 8)
    assert (output.num_scheduled_tokens, output.total_num_scheduled_tokens) == (dict.fromkeys(ids, 1), 5)
    made = output.scheduled_cached_reqs
    assert (made.req_ids, made.new_block_ids) == (ids, [None, ([100],), None, None, ([7],)])
    assert (made.num_computed_tokens, made.num_output_tokens) == ([5, 8, 7, 8, 4], [3, 6, 5, 6, 2])
    assert made.all_token_ids == {id_: list(range(number)) for id_, number in (("fills", 8), ("ahead", 8), ("new", 5))}
    assert (scheduler.prev_step_scheduled_req_ids, output.num_common_prefix_blocks) == (set(ids), ["of roomy"])
    assert scheduler.asked == [
        ("cache", "fills", 8),
        ("cache", "ahead", 8),
        ("allocate", "new", 1, {"num_lookahead_tokens": 0}),
    ]
    assert [block.block_id for block in scheduler.manager.req_to_blocks["full"]] == [0, 1, 100]
    assert len(scheduler.free) == 3
    until = [30, 12, 8, 12, 40]
    assert [request._slipstream_plain_until for request in requests] == until
    assert scheduler._slipstream_deferred_steps.plain_until.tolist() == until
    flush(scheduler)
    assert [request.num_computed_tokens for request in requests] == [6, 9, 8, 9, 5]


def test_a_request_that_a_token_in_flight_ends_gets_no_further_one():
    requests = [
        Request("ends", 5, in_flight=1, max_tokens=3),
        Request("last", 5, in_flight=1, max_tokens=4),
        Request("still", 5, max_tokens=4),
    ]
    ids = [request.request_id for request in requests]
    scheduler = AsyncScheduler(requests, dict.fromkeys(ids, 1), {"ends": 0, "last": 1, "still": 2})
    output = scheduled(scheduler)
    made = output.scheduled_cached_reqs
    assert (made.req_ids, made.new_block_ids) == (["last", "still"], [([100],), None])
    assert (output.num_scheduled_tokens, output.total_num_scheduled_tokens) == ({"last": 1, "still": 1}, 2)
    assert (made.num_computed_tokens, made.num_output_tokens) == ([5, 5], [3, 3])
    flush(scheduler)
    assert [request.num_computed_tokens for request in requests] == [5, 6, 6]


@pytest.mark.parametrize(
    ("fields", "num_free", "is_plain"),
    [
        ({}, 2, True),
        ({}, 1, False),
        ({"max_model_len": 10}, 2, True),
        ({"max_model_len": 9}, 2, False),
        ({"pooling_params": "mean"}, 2, False),
    ],
)
def test_a_step_that_may_preempt_or_end_by_length_or_is_of_another_kind_is_left_to_vllm(fields, num_free, is_plain):
    requests = [Request("a", 8), Request("b", 8)]
    vars(requests[1]).update(fields)
    longest = {"max_model_len": fields["max_model_len"]} if "max_model_len" in fields else {}
    scheduler = AsyncScheduler(requests, {"a": 2, "b": 2}, {"a": 2, "b": 2}, num_free, **longest)
    assert (scheduled(scheduler) is not None) == is_plain
    assert (len(scheduler.free), len(scheduler.seen)) == ((0, 1) if is_plain else (num_free, 0))
    flush(scheduler)
    assert [request.num_computed_tokens for request in requests] == ([9, 9] if is_plain else [8, 8])


def test_what_only_some_versions_and_settings_know_is_left_as_it_is():
    scheduler = AsyncScheduler([Request("a", 7)], {"a": 1}, {"a": 2}, use_v2_model_runner=True, prefix_blocks=[])
    scheduler.kv_cache_manager.enable_caching = False
    output = scheduled(scheduler)
    assert (output.scheduled_cached_reqs.all_token_ids, output.num_common_prefix_blocks) == ({}, [])
    assert (scheduler.prev_step_scheduled_req_ids, scheduler.asked) == (set(), [])
    known = AsyncScheduler([Request("a", 7)], {"a": 1}, {"a": 2}, prev_step_scheduled_req_ids={"a"})
    assert scheduled(known).scheduled_cached_reqs.all_token_ids == {}
    assert known.prev_step_scheduled_req_ids == {"a"}


def test_a_schedule_that_fails_loses_no_request():
    scheduler = AsyncScheduler([Request("a", 7)], {"a": 1}, {"a": 2})
    scheduler.fails, before = True, scheduler.running
    with pytest.raises(KeyError):
        scheduled(scheduler)
    assert (scheduler.running is before, scheduler.max_num_running_reqs) == (True, 8)
