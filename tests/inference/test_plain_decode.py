"""Which requests and steps are in plain decode, and what is done with their tokens; with plain objects as vLLM's."""

from types import SimpleNamespace

import pytest

from slipstream.inference.plugin.patches import decoding
from slipstream.inference.plugin.patches.decoding import (
    PlainSteps,
    PlainTokens,
    _is_simple,
    _plain_until,
    allocate_with_room,
    end_conditions,
    is_usual,
    sole_manager,
)
from slipstream.inference.plugin.patches.patch_table import Absent

from .fakes import put

SIMPLE = {
    "structured_output_request": None,
    "pooling_params": None,
    "mm_features": [],
    "resumable": False,
    "spec_token_ids": [],
}
ODD = {
    "structured_output_request": "json",
    "pooling_params": "mean",
    "mm_features": ["image"],
    "resumable": True,
    "spec_token_ids": [3],
}


class Full:
    """As vLLM's manager of full attention."""

    def __init__(self, block_size=4, cached=None, blocks=()):
        self.block_size, self.num_cached_block = block_size, dict(cached or {})
        self.req_to_blocks = {"a": list(blocks)}


class Windowed(Full):
    """Another kind."""


class Kind:
    """Classes of vLLM's with the attributes that `__init__` sets."""

    def __init__(self):
        self.num_output_placeholders = self.block_hashes = self._all_token_ids = self._output_token_ids = 0
        self.num_stale_output_tokens = self.num_in_flight_tokens = 0


class Scheduler:
    """vLLM's."""


class AsyncScheduler(Scheduler):
    """vLLM's."""


@pytest.fixture
def vllm(monkeypatch):
    state = SimpleNamespace(
        SamplingParams=SimpleNamespace(eos_token_id=1, __struct_fields__=("repetition_detection",)), Request=Kind
    )
    put(
        monkeypatch,
        v1__core__sched__scheduler={"Scheduler": Scheduler},
        v1__core__sched__async_scheduler={"AsyncScheduler": AsyncScheduler},
        v1__core__sched__interface={"PauseState": SimpleNamespace(PAUSED_ALL="paused")},
        v1__core__single_type_kv_cache_manager={"FullAttentionManager": Full},
        v1__request={"Request": Kind, "RequestStatus": SimpleNamespace(RUNNING="running")},
        sampling_params={"SamplingParams": state.SamplingParams},
    )
    return state


def pool(*managers, hash_block_size=4, **fields):
    return SimpleNamespace(
        coordinator=SimpleNamespace(single_type_managers=list(managers)),
        block_pool=SimpleNamespace(hash_block_size=hash_block_size),
        **{"enable_caching": True, "max_model_len": 1000, **fields},
    )


def test_only_text_from_text_is_simple():
    assert _is_simple(SimpleNamespace(**SIMPLE))
    for name, value in ODD.items():
        assert not _is_simple(SimpleNamespace(**{**SIMPLE, name: value})), name


def test_one_manager_of_full_attention_over_whole_blocks_is_known():
    assert isinstance(sole_manager(pool(Full()), Full), Full)
    for other in (pool(Windowed()), pool(Full(), Full()), pool(), pool(Full(), hash_block_size=2)):
        assert sole_manager(other, Full) is None


@pytest.mark.parametrize(
    ("manager", "fields", "request_fields", "until"),
    [
        (Full(cached={"a": 1}, blocks="xyz"), {}, {}, 8),
        (Full(cached={"a": 5}, blocks="xyz"), {}, {}, 12),
        (Full(blocks="xyz"), {}, {}, 0),
        (Full(blocks="xyz"), {"enable_caching": False}, {}, 12),
        (Full(cached={"a": 5}, blocks="xyz"), {"max_model_len": 11}, {}, 10),
        (Full(cached={"a": 5}, blocks="xyz"), {}, {"max_tokens": 7}, 8),
        (Full(cached={"a": 5}, blocks="xyz"), {}, {"resumable": True}, 0),
    ],
)
def test_a_step_is_plain_while_there_is_room_and_no_end(manager, fields, request_fields, until):
    request = SimpleNamespace(
        **{**SIMPLE, "request_id": "a", "num_prompt_tokens": 3, "max_tokens": 100, **request_fields}
    )
    assert _plain_until(pool(manager, **fields), manager, request) == until


def test_a_request_ends_by_its_tokens_or_their_number():
    params = SimpleNamespace(repetition_detection=None, eos_token_id=2, stop_token_ids=[5, 6])
    scheduler = SimpleNamespace(max_model_len=50)
    request = SimpleNamespace(**SIMPLE, sampling_params=params, max_tokens=30, num_prompt_tokens=10)
    assert end_conditions(scheduler, request) == ({2, 5, 6}, 30)
    scheduler.max_model_len, params.stop_token_ids = 35, None
    assert end_conditions(scheduler, request) == ({2}, 25)
    for name in ("structured_output_request", "pooling_params", "mm_features"):
        other = SimpleNamespace(**{**vars(request), name: ODD[name]})
        assert end_conditions(scheduler, other) == (frozenset(), 0)
    params.repetition_detection = "some"
    assert end_conditions(scheduler, request) == (frozenset(), 0)


def test_a_step_with_anything_beside_tokens_is_unusual():
    scheduler, output = SimpleNamespace(connector=None), SimpleNamespace(scheduled_spec_decode_tokens={})
    plain = {"sampled_token_ids": [[1]], "prompt_logprobs_dict": {}, "pooler_output": [], "routed_experts": None}
    assert is_usual(scheduler, output, SimpleNamespace(**plain))
    for name, value in (
        *(("prompt_logprobs_dict", {"a": 1}), ("pooler_output", [None]), ("routed_experts", ()), ("sampling_masks", 0)),
        *(("sampled_token_ids", []), ("num_nans_in_logits", {"a": 0}), ("kv_connector_output", SimpleNamespace())),
    ):
        assert not is_usual(scheduler, output, SimpleNamespace(**{**plain, name: value})), name
    assert not is_usual(SimpleNamespace(connector=1), output, SimpleNamespace(**plain))
    speculative = SimpleNamespace(scheduled_spec_decode_tokens={"a": [1]})
    assert not is_usual(scheduler, speculative, SimpleNamespace(**plain))


def scheduler_of(kind=AsyncScheduler, manager=None, **fields):
    made = kind()
    vars(made).update(
        {
            "hash_block_size": 4,
            "num_sampled_tokens_per_step": 1,
            "kv_cache_manager": pool(manager or Full()),
            "max_num_running_reqs": 8,
            "max_num_scheduled_tokens": 16,
            "scheduler_config": SimpleNamespace(max_num_batched_tokens=16),
            "waiting": [],
            "running": [],
            "num_waiting_for_streaming_input": 0,
            **fields,
        }
    )
    return made


@pytest.mark.parametrize(
    "fields",
    [
        *({name: True} for name in ("connector", "use_pp", "num_spec_tokens", "enable_return_routed_experts")),
        {"num_sampled_tokens_per_step": 2},
        {"manager": Windowed()},
        {"kind": type("Other", (Scheduler,), {})},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_scheduler_that_does_more_is_left_alone(fields, vllm):
    assert isinstance(PlainSteps.of(scheduler_of(), None), PlainSteps)
    assert isinstance(PlainSteps.of(scheduler_of(Scheduler, connector=None, use_pp=False), None), PlainSteps)
    assert PlainSteps.of(scheduler_of(**fields), None) is None


@pytest.mark.parametrize("lacks", ["eos_token_id", "repetition_detection", "hash_block_size", "kind", "stale"])
def test_tokens_are_taken_only_from_a_vllm_that_is_known(lacks, vllm, monkeypatch):
    scheduler = scheduler_of()
    assert isinstance(PlainTokens.of(scheduler), PlainTokens)
    if lacks == "eos_token_id":
        del vllm.SamplingParams.eos_token_id
    elif lacks == "repetition_detection":
        vllm.SamplingParams.__struct_fields__ = ()
    elif lacks == "hash_block_size":
        del scheduler.hash_block_size
    elif lacks == "stale":
        monkeypatch.setattr(decoding, "_STALE_FIELDS", ("tokens_to_discard", "stale"))
    else:
        scheduler.__class__ = type("Other", (Scheduler,), {})
    assert PlainTokens.of(scheduler) is None


def test_steps_that_are_not_of_plain_decode_are_left_to_vllm(vllm):
    scheduler = scheduler_of(_inflight_prefills=0, _pause_state="running")
    steps = PlainSteps.of(scheduler, None)
    steps._deferred.track = lambda running: tracked.append(len(running))
    tracked = []
    assert (steps.schedule(scheduler), tracked) == (None, []), "nothing runs"
    scheduler.running = ["a"] * 16
    assert (steps.schedule(scheduler), tracked) == (None, [16])
    for name, value in (("running", ["a"] * 17), ("_inflight_prefills", 1), ("_pause_state", "paused")):
        before = getattr(scheduler, name)
        setattr(scheduler, name, value)
        assert (steps.schedule(scheduler), len(tracked)) == (None, 1), name
        setattr(scheduler, name, before)
    scheduler.waiting = ["b"]
    for running, others in ((8, 0), (7, 1), (9, 0)):
        scheduler.running, scheduler.num_waiting_for_streaming_input = ["a"] * running, others
        assert (steps.schedule(scheduler), tracked.pop()) == (None, running), "no more may run"
    scheduler.running = ["a"] * 6
    assert (steps.schedule(scheduler), len(tracked)) == (None, 1), "another may begin"


class Request(SimpleNamespace):
    def __init__(self, id_, **fields):
        super().__init__(
            request_id=id_,
            client_index=0,
            status="running",
            num_stale_output_tokens=0,
            num_in_flight_tokens=1,
            num_output_placeholders=1,
            num_computed_tokens=5,
            _output_token_ids=[8],
            _all_token_ids=[8] * 5,
            block_hashes=[0],
        )
        vars(self).update(fields)

    def update_block_hashes(self):
        self.block_hashes.append(0)


def held_of(**fields):
    return SimpleNamespace(**{"tokens": [], "logprobs": [], "stop_ids": {2}, "max_tokens": 10, **fields})


@pytest.mark.parametrize("is_async", [True, False])
def test_a_plain_token_is_appended_and_counted(is_async, vllm):
    manager, cached = Full(cached={"a": 0}), []
    scheduler = scheduler_of(AsyncScheduler if is_async else Scheduler, manager)
    scheduler.kv_cache_manager.cache_blocks = lambda request, known: cached.append((request.request_id, known))
    requests = {
        "a": Request("a", _all_token_ids=[8] * 7),
        "b": Request("b", client_index=1, num_computed_tokens=4),
    }
    scheduler.requests = requests
    held = {0: {"a": held_of()}, 1: {"b": held_of(logprobs=None)}}
    result = SimpleNamespace(sampled_token_ids=[[5], [6]], req_id_to_index={"b": 0, "a": 1})
    step = SimpleNamespace(values=[-0.25, -0.5])
    undelivered = SimpleNamespace(of_client=lambda client: held.get(client, {}))
    rest = PlainTokens.of(scheduler).collect(scheduler, {"a": 1, "b": 1}, result, step, undelivered)
    assert rest == ({}, {0, 1})
    a, b = requests.values()
    assert (a._output_token_ids, a._all_token_ids[-1], len(a.block_hashes)) == ([8, 6], 6, 2)
    assert (b._output_token_ids, len(b._all_token_ids), len(b.block_hashes)) == ([8, 5], 6, 1)
    assert (held[0]["a"].tokens, held[0]["a"].logprobs) == ([6], [-0.5])
    assert (held[1]["b"].tokens, held[1]["b"].logprobs) == ([5], None)
    assert [each.num_in_flight_tokens for each in (a, b)] == [0, 0]
    assert [each.num_output_placeholders for each in (a, b)] == ([0, 0] if is_async else [1, 1])
    assert cached == ([("a", 5), ("b", 4)] if is_async else [])
    manager.num_cached_block["b"] = 1
    b.num_output_placeholders = 1
    held[1]["b"].logprobs = []
    rest = PlainTokens.of(scheduler).collect(scheduler, {"b": 1}, result, None, undelivered)
    assert (rest, len(cached), held[1]["b"].logprobs) == (({}, {1}), 2 * is_async, [])


def test_blocks_are_cached_only_as_far_as_tokens_have_come(vllm):
    manager, cached = Full(cached={"a": 1}), []
    scheduler = scheduler_of(AsyncScheduler, manager)
    scheduler.kv_cache_manager.cache_blocks = lambda request, known: cached.append(known)
    request = Request("a", num_output_placeholders=3, num_computed_tokens=9)
    scheduler.requests, held = {"a": request}, held_of(max_tokens=4)
    undelivered = SimpleNamespace(of_client=lambda client: {"a": held})
    for token, known in ((0, []), (9, [8])):
        result = SimpleNamespace(sampled_token_ids=[[token]], req_id_to_index={"a": 0})
        PlainTokens.of(scheduler).collect(scheduler, {"a": 1}, result, None, undelivered)
        assert cached == known
    assert (held.tokens, request._output_token_ids, request.num_output_placeholders) == ([0, 9], [8, 0, 9], 1)


@pytest.mark.parametrize(
    ("fields", "held", "tokens", "count"),
    [
        ({"status": "preempted"}, {}, [5], 1),
        ({"num_stale_output_tokens": 1}, {}, [5], 1),
        ({}, None, [5], 1),
        ({}, {}, [5], 2),
        ({}, {}, [5, 6], 1),
        ({}, {}, [], 1),
        ({}, {}, [2], 1),
        ({}, {"max_tokens": 2}, [5], 1),
        (None, {}, [5], 1),
    ],
)
def test_any_other_token_is_left_to_vllm(fields, held, tokens, count, vllm):
    scheduler = scheduler_of()
    plain = Request("b")
    scheduler.requests = {"b": plain} if fields is None else {"a": Request("a", **fields), "b": plain}
    scheduler.kv_cache_manager.cache_blocks = lambda *given: None
    known = {"b": held_of()} | ({} if held is None else {"a": held_of(**held)})
    result = SimpleNamespace(sampled_token_ids=[tokens, [7]], req_id_to_index={"a": 0, "b": 1})
    undelivered = SimpleNamespace(of_client=lambda client: known if client == 0 else {})
    taken = PlainTokens.of(scheduler).collect(scheduler, {"a": count, "b": 1}, result, None, undelivered)
    assert taken == ({"a": count}, {0})
    assert (plain._output_token_ids, known["b"].tokens) == ([8, 7], [7])


def test_a_token_that_cannot_be_one_is_an_error(vllm):
    for token, fields, problem in ((-1, {}, "not sampled yet"), (0, {"num_output_placeholders": 0}, "not asked for")):
        scheduler = scheduler_of()
        scheduler.requests = {"a": Request("a", **fields)}
        result = SimpleNamespace(sampled_token_ids=[[token]], req_id_to_index={"a": 0})
        undelivered = SimpleNamespace(of_client=lambda client: {"a": held_of()})
        with pytest.raises(RuntimeError, match=f"a step of 1 requests came back with a token that was {problem}"):
            PlainTokens.of(scheduler).collect(scheduler, {"a": 1}, result, None, undelivered)


def test_a_vllm_with_other_managers_of_blocks_is_named(monkeypatch):
    fields = sorted(decoding._MANAGER_FIELDS)

    def kind(name, fields):
        space = {}
        exec("def __init__(self):\n" + "".join(f"    self.{each} = 0\n" for each in fields), space)
        return type(name, (), {"__init__": space["__init__"]})

    single = ["block_size", "num_cached_block", "req_to_blocks"]
    for fewer, other, missing in (
        (fields[1:], single, f"KVCacheManager.{fields[0]}"),
        (fields, single[1:], "SingleTypeKVCacheManager.block_size"),
    ):
        put(
            monkeypatch,
            v1__core__kv_cache_manager={"KVCacheManager": kind("KVCacheManager", fewer)},
            v1__core__single_type_kv_cache_manager={
                "SingleTypeKVCacheManager": kind("SingleTypeKVCacheManager", other),
                "FullAttentionManager": Full,
            },
        )
        with pytest.raises(Absent, match=missing):
            allocate_with_room()


class Blocks:
    """As `KVCacheManager`; notes what it is asked."""

    def __init__(self, manager, **fields):
        self.calls, self.answer, self.empty_kv_cache_blocks = [], "theirs", "none"
        vars(self).update(vars(pool(manager, **fields)))

    def allocate_slots(self, request, number, *given, **options):
        self.calls.append((number, given, options))
        return self.answer


def allocated(manager, fields=None, number=1, given=(), options=None, **of_request):
    kind = type("Fresh", (Blocks,), {})
    decoding._skip_allocation(kind, Full)
    made = kind(manager, **(fields or {}))
    plain = {"num_prompt_tokens": 3, "max_tokens": 100, "status": "running", "num_computed_tokens": 5}
    request = SimpleNamespace(**{**SIMPLE, **plain, "request_id": "a", "_all_token_ids": [1] * 6, **of_request})
    options = {"num_lookahead_tokens": 0} if options is None else options
    answer = made.allocate_slots(request, number, *given, **options)
    return answer, made.calls, getattr(request, "_slipstream_plain_until", None)


@pytest.mark.parametrize(
    ("fields", "of_request"),
    [
        ({}, {}),
        ({}, {"num_computed_tokens": 7, "_all_token_ids": [1] * 7}),
        ({"enable_caching": False}, {"num_computed_tokens": 7, "_all_token_ids": [1] * 8}),
        ({"max_model_len": 6}, {}),
    ],
)
def test_a_running_request_whose_block_has_room_is_given_none(fields, of_request, vllm):
    assert allocated(Full(cached={"a": 1}, blocks="xy"), fields, **of_request) == ("none", [], None)


@pytest.mark.parametrize(
    "change",
    [
        *({"number": 2}, {"given": (0,)}, {"options": {}}, {"options": {"num_lookahead_tokens": 1}}),
        *({"status": "waiting"}, {"num_computed_tokens": 8}, {"fields": {"max_model_len": 5}}),
        *({"num_computed_tokens": 7, "_all_token_ids": [1] * 8}, {"manager": Full(blocks="xy")}),
        {"manager": Windowed(cached={"a": 1}, blocks="xy")},
    ],
    ids=lambda fields: " ".join(fields),
)
def test_any_other_request_is_given_what_vllm_gives_it(change, vllm):
    made = {"manager": Full(cached={"a": 1}, blocks="xy"), **change}
    answer, calls, until = allocated(**made)
    options = made.get("options", {"num_lookahead_tokens": 0})
    assert (answer, calls) == ("theirs", [(made.get("number", 1), made.get("given", ()), options)])
    is_known = made["manager"].num_cached_block and not isinstance(made["manager"], Windowed)
    assert until == (min(8, made.get("fields", {}).get("max_model_len", 9) - 1) if is_known else 0)


def test_what_is_deferred_is_written_before_vllm_reads_it(vllm, monkeypatch):
    done = []

    class Fresh:
        def schedule(self, *given, **options):
            done.append(("schedule", given, options))
            return "theirs"

        def finish_requests(self, *given, **options):
            done.append(("finish", given, options))
            return "finished"

        def reset_prefix_cache(self):
            return True

    answers = ["ours", None]
    deferred = SimpleNamespace(
        stop_deferring=lambda id_: done.append(("flush", id_)), clear=lambda: done.append("clear")
    )
    steps = SimpleNamespace(schedule=lambda scheduler: answers.pop(0))
    monkeypatch.setattr(PlainSteps, "of", lambda scheduler, schedule: None if scheduler.odd else steps)
    decoding._schedule_plainly(Fresh)
    scheduler = Fresh()
    scheduler.odd, scheduler._slipstream_deferred_steps = False, deferred
    assert (scheduler.schedule(), done) == ("ours", [])
    assert (scheduler.schedule(False, x=0), done) == (
        "theirs",
        [("flush", None), "clear", ("schedule", (False,), {"x": 0})],
    )
    for given, options in (((1,), {}), ((), {"x": 1})):
        assert scheduler.schedule(*given, **options) == "theirs"
        assert done[-3:] == [("flush", None), "clear", ("schedule", given, options)]
    assert scheduler.finish_requests("a", by=2) == "finished"
    assert done[-2:] == [("flush", None), ("finish", ("a",), {"by": 2})]
    assert (scheduler.reset_prefix_cache(), done[-1]) == (True, ("flush", None))
    decoding.flush(scheduler, "a")
    assert done[-1] == ("flush", "a")
    other, before = Fresh(), len(done)
    other.odd = True
    assert (other.schedule(), other.reset_prefix_cache(), len(done) - before) == ("theirs", True, 1)
