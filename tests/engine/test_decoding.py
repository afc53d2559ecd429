"""vLLM's own scheduler, without an engine: with our shortcuts it decides and tells the same, step by step."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import RequestOutputKind
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from slipstream.inference.plugin.patches import decoding, deferred_steps, delivery

BLOCK, STOP = 16, 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen2Config(**sizes, num_key_value_heads=2, vocab_size=100, max_position_embeddings=256)
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(path)
    return path


def make_scheduler(folder: Any, seed: int) -> Any:
    """Asynchronous or not, with room or too few blocks, for one runner or the other."""
    kind, num_blocks = [Scheduler, AsyncScheduler][seed % 3 > 0], [2000, 40][seed % 2]
    model = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=120)
    scheduling = SchedulerConfig(
        max_num_seqs=24,
        max_num_batched_tokens=256,
        max_model_len=120,
        async_scheduling=kind is AsyncScheduler,
        is_encoder_decoder=False,
    )
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    cache.num_gpu_blocks = num_blocks
    config = VllmConfig(
        model_config=model, scheduler_config=scheduling, cache_config=cache, device_config=DeviceConfig("cpu")
    )
    layers = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    options = {
        "vllm_config": config,
        "kv_cache_config": KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], layers)]),
        "structured_output_manager": StructuredOutputManager(config),
        "block_size": BLOCK,
        "hash_block_size": BLOCK,
        "log_stats": False,
    }
    known = inspect.signature(Scheduler.__init__).parameters
    scheduler = kind(**{name: value for name, value in options.items() if name in known})
    scheduler.use_v2_model_runner = seed > 4
    return scheduler


def requests(seed: int) -> list[Request]:
    draw = random.Random(seed)
    init_none_hash(sha256)
    shared = [[draw.randrange(10, 99) for _ in range(60)] for _ in range(2)]
    made = []
    for number in range(60):
        streams = number % 11 == 3
        params = SamplingParams(
            max_tokens=draw.choice([1, 2, 17, 40, 100]),
            min_tokens=draw.choice([0, 0, 1]),
            stop_token_ids=[STOP] if number % 2 else None,
            logprobs=None if number % 7 == 5 else 0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if streams else RequestOutputKind.FINAL_ONLY,
        )
        prompt = [draw.randrange(10, 99) for _ in range(draw.randrange(1, 50))]
        if number % 3 == 0:
            prompt = [*shared[number % 2][: draw.randrange(1, 60)], *prompt[: draw.randrange(3)]]
        hasher = get_request_block_hasher(BLOCK, sha256)
        made.append(Request(f"r{number}", prompt, params, None, client_index=number % 2, block_hasher=hasher))
    return made


def step_result(scheduled: Any, number: int, scheduler: Any) -> ModelRunnerOutput:
    """A token for every request that is past its prompt, and a log-probability that tells which."""
    ids = list(scheduled.num_scheduled_tokens)
    if not ids:
        return ModelRunnerOutput([], {})
    draw = random.Random(number)
    tokens = [[draw.choice([STOP, *range(10, 40)])] for _ in ids]
    for place, id_ in enumerate(ids):
        request = scheduler.requests.get(id_)
        if request is not None and request.is_prefill_chunk:
            tokens[place] = []
    values = np.float32([[-0.001 * number - place] for place in range(len(ids))])
    lists = LogprobsLists(np.zeros((len(ids), 1), np.int32), values, np.zeros(len(ids), np.int32))
    return ModelRunnerOutput(ids, {id_: i for i, id_ in enumerate(ids)}, tokens, lists, {})


def state(scheduler: Any) -> tuple[Any, ...]:
    """What the scheduler remembers of every request, which blocks are free, in order, and what the cached ones hold."""
    decoding.flush(scheduler)
    pool, (manager,) = (
        scheduler.kv_cache_manager.block_pool,
        scheduler.kv_cache_manager.coordinator.single_type_managers,
    )
    counts = ("num_tokens", "num_computed_tokens", "num_output_placeholders", "num_in_flight_tokens", "status")
    counts += ("is_prefill_chunk", "spec_token_ids", "num_preemptions")
    requests = [
        (
            *(request.request_id, *(getattr(request, name, None) for name in counts), len(request.block_hashes)),
            manager.num_cached_block.get(request.request_id),
            [block.block_id for block in manager.req_to_blocks.get(request.request_id, [])],
        )
        for request in scheduler.requests.values()
    ]
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    hashes = [(block.block_id, block.block_hash) for block in pool.blocks if block.block_hash is not None]
    order = [[request.request_id for request in queue] for queue in (scheduler.running, scheduler.waiting)]
    ids = (scheduler.prev_step_scheduled_req_ids, scheduler.finished_req_ids, scheduler.reset_preempted_req_ids)
    limits = (scheduler.current_step, scheduler.max_num_running_reqs, getattr(scheduler, "max_num_active_reqs", 0))
    return requests, free, hashes, order, [set(some) for some in ids], limits, scheduler.prefill_capacity_bound


def record(output: Any) -> dict[str, Any]:
    """All that a step's record says, the order of its requests too."""
    fields = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    fields["num_scheduled_tokens"] = list(output.num_scheduled_tokens.items())
    new = output.scheduled_new_reqs
    fields["scheduled_new_reqs"] = [(one.req_id, one.block_ids, one.num_computed_tokens) for one in new]
    cached = dataclasses.asdict(output.scheduled_cached_reqs)
    tokens = output.scheduled_cached_reqs.all_token_ids
    fields["scheduled_cached_reqs"] = cached | {"all_token_ids": [(id_, list(t)) for id_, t in tokens.items()]}
    return copy.deepcopy(fields)


def run(scheduler: Any, seed: int) -> tuple[list[Any], dict[str, list[Any]], list[int]]:
    """What was decided in every step, what each request was told in all, and how many outputs each step had.

    Requests are aborted and versions come at any step, with results that come one, two or three steps later, pauses in
    which running requests keep their context or do not, and few new requests, so that many steps are plain.
    """

    def hear(outputs: Any) -> None:
        for output in outputs:
            values = [] if output.new_logprobs is None else output.new_logprobs.logprobs[:, 0].tolist()
            mine = told.setdefault(output.request_id, [[], [], None])
            mine[0] += output.new_token_ids
            mine[1] += values
            mine[2] = output.finish_reason

    def abort() -> None:
        some = draw.sample(sorted(scheduler.requests), min(2, len(scheduler.requests)))
        scheduler.finish_requests(some, RequestStatus.FINISHED_ABORTED)

    def work_off() -> None:
        answers = scheduler.update_from_output(*ahead.popleft())
        outputs = [output for answer in answers.values() for output in answer.outputs]
        sizes.append(len(outputs))
        hear(outputs)

    def pause() -> None:
        """As `AsyncHost` does: what is under way comes, or is waited for later."""
        scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while ahead and draw.random() < 0.7:
            work_off()
        if draw.random() < 0.5:
            for outputs in delivery._drain(scheduler).values():
                hear(outputs)
        if draw.random() < 0.5:
            scheduler.reset_prefix_cache(True)
        if draw.random() < 0.2:
            abort()
        scheduler.set_pause_state(PauseState.UNPAUSED)

    coming, draw = deque(requests(seed)), random.Random(seed)
    trace: list[Any] = []
    told: dict[str, list[Any]] = {}
    sizes: list[int] = []
    ahead: deque[Any] = deque()
    looks = random.Random(seed + 1).choices([True, False], [1, 9], k=2000)  # some steps apart
    number = 0
    while coming or scheduler.has_requests() or ahead:
        for _ in range(draw.randrange(4) if draw.random() < 0.1 else 0):
            if coming:
                scheduler.add_request(coming.popleft())
        depth = draw.choice([1, 2, 2, 2, 3]) if isinstance(scheduler, AsyncScheduler) else 1
        if draw.random() < 0.03:
            abort()
        if draw.random() < 0.03:
            pause()
        if scheduler.has_requests():
            output = scheduler.schedule()
            seen = state(scheduler) if looks[number] else None
            trace.append((record(output), seen))
            ahead.append((output, step_result(output, number, scheduler)))
        number += 1
        assert number < 2000
        if len(ahead) < depth and scheduler.has_requests():
            continue
        while len(ahead) > (depth if scheduler.has_requests() else 0):
            work_off()
        if ahead:
            work_off()
    return trace, told, sizes


def keep_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what the plugin patches put back at the end. Here up to three steps are under way."""
    monkeypatch.setattr(delivery, "_max_in_flight", lambda _: 2)
    names = ("update_from_output", "schedule", "finish_requests", "reset_prefix_cache")
    patched = (*((Scheduler, name) for name in names), (KVCacheManager, "allocate_slots"))
    for owner, name in (*patched, (LogprobsProcessor, "_update_sample_logprobs")):
        monkeypatch.setattr(owner, name, getattr(owner, name))


SCHEDULING = {
    "block_with_room": decoding.allocate_with_room,
    "final_delivery": delivery.deliver_at_the_end,
    "plain_steps": decoding.schedule_plainly,
}
"""Fast paths in the scheduler."""


REQUIRED = {"checked_tokens": delivery.check_tokens}
"""What an unknown vLLM's scheduler is given."""


def patch(*names: str) -> None:
    """Make these changes, or all that are fast paths, in the order of the table."""
    for name, make in (SCHEDULING | REQUIRED).items():
        if name in (names or SCHEDULING):
            make()


def compare(own: tuple[Any, ...], theirs: tuple[Any, ...]) -> None:
    """That both runs decided and told the same."""
    (own_trace, own_told, _), (trace, told, _) = own, theirs
    for number, (mine, expected) in enumerate(zip(own_trace, trace, strict=True)):
        assert mine == expected, f"step {number}"
    aborted = {id_ for id_, (_, _, reason) in told.items() if reason is None}
    assert {id_: own_told[id_] for id_ in told.keys() - aborted} == {id_: told[id_] for id_ in told.keys() - aborted}


@pytest.mark.parametrize("seed", range(2, 8))
def test_whatever_happens_every_step_is_the_one_that_vllm_makes(seed, folder, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    theirs = run(make_scheduler(folder, seed), seed)
    keep_patched(monkeypatch)
    steps: list[bool] = []
    make = decoding.PlainSteps.schedule

    def making(*args: Any) -> Any:
        output = make(*args)
        steps.append(output is not None)
        return output

    monkeypatch.setattr(decoding.PlainSteps, "schedule", making)
    monkeypatch.setattr(deferred_steps, "_MAX_DEFERRED", 5)  # so that it is reached before the end of a block
    patch()
    own = run(make_scheduler(folder, seed), seed)
    compare(own, theirs)
    assert sum(steps) > 0.3 * len(steps), "many steps are plain"
    assert sum(own[2]) < 0.9 * sum(theirs[2]), "and their tokens are told of at the end"


@pytest.mark.parametrize(
    ("names", "seed"),
    [
        (("block_with_room", "final_delivery"), 2),
        (("checked_tokens",), 5),
        (("checked_tokens", *SCHEDULING), 3),
        *(pytest.param(("block_with_room", "final_delivery"), seed, marks=pytest.mark.full) for seed in range(3, 8)),
        *(pytest.param((name,), seed, marks=pytest.mark.full) for name in list(SCHEDULING)[:2] for seed in (4, 7)),
    ],
)
def test_some_fast_paths_without_the_others_change_nothing_either(names, seed, folder, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    theirs = run(make_scheduler(folder, seed), seed)
    keep_patched(monkeypatch)
    patch(*names)
    compare(run(make_scheduler(folder, seed), seed), theirs)


@pytest.mark.parametrize("defers_steps", [True, False])
@pytest.mark.parametrize("problem", ["not sampled yet", "not asked for"])
def test_a_token_that_no_step_made_ends_the_engine(problem, defers_steps, folder, monkeypatch):
    keep_patched(monkeypatch)
    if not defers_steps:
        monkeypatch.setattr(decoding.PlainSteps, "of", lambda *_: None)
    patch()
    scheduler = make_scheduler(folder, 2)
    for number in range(3):
        params = SamplingParams(max_tokens=60, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        scheduler.add_request(Request(f"r{number}", [1, 2, 3], params, None))

    def step(*tokens: int) -> tuple[Any, ModelRunnerOutput]:
        scheduled = scheduler.schedule()
        ids = list(scheduled.num_scheduled_tokens)
        return scheduled, ModelRunnerOutput(ids, {id_: i for i, id_ in enumerate(ids)}, [[token] for token in tokens])

    for _ in range(4):
        scheduler.update_from_output(*step(11, 12, 13))
    if problem == "not asked for":
        asked = step(11, 12, 13)
        scheduler.update_from_output(*asked)
    else:
        asked = step(-1, -1, -1)
    with pytest.raises(RuntimeError, match=f"of 3 requests came back with a token that was {problem}"):
        scheduler.update_from_output(*asked)


def test_a_scheduler_of_another_kind_is_left_alone():
    class Other(Scheduler):
        def __init__(self) -> None:
            pass

    assert decoding.PlainTokens.of(Other()) is None
    assert decoding.PlainSteps.of(Other(), Scheduler.schedule) is None
