"""Patches vLLM's scheduler with a fast path for plain decode steps.

At some hundred sequences a decode step waits for the scheduler's Python code, not for the GPU. For each request it
allocates KV cache blocks despite room, hashes a block that is not full, evaluates stop conditions, and makes an
output nobody reads (`delivery` holds it back). Nearly all requests of nearly all steps are in *plain decode*: one
more token, not the request's last, in a block with room. For these alone the few remaining changes are
made here; anything else goes through vLLM's own code.

Guarantees: every scheduling decision is vLLM's own, step by step, and so is the scheduler's state after `flush`. It
runs before any code of vLLM's reads the state. (One number is not updated, `next_decode_eligible_step`: it decides
nothing without pipeline parallelism.)

Changed: `KVCacheManager.allocate_slots`; `Scheduler.schedule`, `finish_requests`, `reset_prefix_cache`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from slipstream.inference.plugin.patches.deferred_steps import DeferredSteps, wrong_token
from slipstream.inference.plugin.patches.patch_table import Absent
from slipstream.inference.plugin.patches.undelivered import StepLogprobs, Undelivered

_STALE_FIELDS = ("async_tokens_to_discard", "num_stale_output_tokens")
"""By vLLM version, the attribute of a `Request` for marking tokens in flight to be discarded."""
_UNUSUAL_FIELDS = (
    *("pooler_output", "kv_connector_output", "ec_connector_output", "num_nans_in_logits", "prompt_logprobs_dict"),
    *("prompt_token_id_logprobs_dict", "routed_experts", "sampling_masks", "aux_output_connector_output"),
)
"""Fields of `ModelRunnerOutput` beside tokens and their log-probabilities."""
_MANAGER_FIELDS = {"empty_kv_cache_blocks", "coordinator", "block_pool", "enable_caching", "max_model_len"}
"""Required attributes of `KVCacheManager`."""
_WAITING_QUEUES = ("waiting", "skipped_waiting", "kv_holding_waiting")
_UNSUPPORTED = (
    *("connector", "ec_connector", "aux_output_connector", "use_pp", "num_spec_tokens", "num_lookahead_tokens"),
    *("num_prefill_lookahead", "dynamic_sd_lookup", "need_mamba_block_aligned_split", "needs_kv_cache_zeroing"),
    *("defer_block_free", "enable_return_routed_experts", "is_encoder_decoder"),
)
"""Attributes of a scheduler; a true one makes its steps do more than the fast path knows."""
_READERS = ("finish_requests", "reset_prefix_cache")
"""Readers of running requests: public methods of the scheduler, beside `schedule` and `update_from_output`."""


def allocate_with_room() -> None:
    """Patch `KVCacheManager.allocate_slots`: return at once for a running request with room in its last block."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SingleTypeKVCacheManager

    manager: Any = KVCacheManager
    single: Any = SingleTypeKVCacheManager
    for kind, needed in ((manager, _MANAGER_FIELDS), (single, {"req_to_blocks", "num_cached_block", "block_size"})):
        if missing := needed - set(kind.__init__.__code__.co_names):
            raise Absent(f"{kind.__name__}.{min(missing)}")
    _skip_allocation(manager, FullAttentionManager)


def schedule_plainly() -> None:
    """Patch `Scheduler.schedule`: make steps of plain decode alone without vLLM's own code."""
    from vllm.v1.core.sched.scheduler import Scheduler

    kind: Any = Scheduler
    schedule = kind.schedule

    def plainly(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            steps = self._slipstream_plain_steps
        except AttributeError:
            steps = self._slipstream_plain_steps = PlainSteps.of(self, schedule)
        if steps is not None and not any(args) and not any(kwargs.values()):
            output = steps.schedule(self)
            if output is not None:
                return output
        if steps is not None:
            flush(self)
            self._slipstream_deferred_steps.clear()
        return schedule(self, *args, **kwargs)

    kind.schedule = plainly
    for name in _READERS:
        _flush_before(kind, name)


def sole_manager(kv_cache_manager: Any, kind: Any) -> Any:
    """The only block manager of a model with full attention in all layers; None if there are others, or if
    parts of a block are cached too."""
    managers = kv_cache_manager.coordinator.single_type_managers
    if len(managers) != 1 or type(managers[0]) is not kind:
        return None
    return managers[0] if managers[0].block_size == kv_cache_manager.block_pool.hash_block_size else None


def _skip_allocation(kv_cache_manager: Any, kind: Any) -> None:
    from vllm.v1.request import Request, RequestStatus

    allocate, running = kv_cache_manager.allocate_slots, RequestStatus.RUNNING
    any_request: Any = Request
    any_request._slipstream_plain_until = 0

    def allocate_slots(self: Any, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        try:
            manager = self._slipstream_block_manager
        except AttributeError:
            manager = self._slipstream_block_manager = sole_manager(self, kind)
        # The arguments for a running request in decode. If its blocks have room and none has become full, there is
        # nothing to allocate, to free or to cache.
        if (
            manager is not None
            and num_new_tokens == 1
            and request.status is running
            and not args
            and kwargs == {"num_lookahead_tokens": 0}
        ):
            request_id, size = request.request_id, manager.block_size
            end, cached = request.num_computed_tokens + 1, manager.num_cached_block.get(request_id)
            if (
                cached is not None
                and end <= len(manager.req_to_blocks[request_id]) * size
                and end <= self.max_model_len
                and (not self.enable_caching or min(end, len(request._all_token_ids)) // size <= cached)
            ):
                return self.empty_kv_cache_blocks
        blocks = allocate(self, request, num_new_tokens, *args, **kwargs)
        request._slipstream_plain_until = (
            0 if manager is None or blocks is None else _plain_until(self, manager, request)
        )
        return blocks

    kv_cache_manager.allocate_slots = allocate_slots


def _plain_until(kv_cache_manager: Any, manager: Any, request: Any) -> int:
    """A bound on computed tokens: below it a decode step of `request` is plain, while its last token is in flight
    (otherwise one fewer, as the step may fill a block). It holds while the request runs: only `allocate_slots` and a
    preemption change its blocks, or the number of cached ones."""
    if not _is_simple(request):
        return 0
    cached = manager.num_cached_block.get(request.request_id)
    room = len(manager.req_to_blocks[request.request_id]) * manager.block_size
    if kv_cache_manager.enable_caching:
        room = 0 if cached is None else min(room, (cached + 1) * manager.block_size)
    return min(room, kv_cache_manager.max_model_len - 1, request.num_prompt_tokens + request.max_tokens - 2)


def _is_simple(request: Any) -> bool:
    """Whether a request generates text from text, without structured output, pooling, images or streamed input."""
    return (
        request.structured_output_request is None
        and request.pooling_params is None
        and not request.mm_features
        and not request.resumable
        and not request.spec_token_ids
    )


def _flush_before(kind: Any, name: str) -> None:
    function = getattr(kind, name)

    def flushed(self: Any, *args: Any, **kwargs: Any) -> Any:
        flush(self)
        return function(self, *args, **kwargs)

    setattr(kind, name, flushed)


def flush(scheduler: Any, request_id: str | None = None) -> None:
    """Write deferred bookkeeping to a request, or to all, before its state is read; see `DeferredSteps`."""
    deferred: DeferredSteps | None = getattr(scheduler, "_slipstream_deferred_steps", None)
    if deferred is not None:
        deferred.stop_deferring(request_id)


def _stale_field() -> str:
    from vllm.v1.request import Request

    return next(name for name in _STALE_FIELDS if name in Request.__init__.__code__.co_names)


class PlainSteps:
    """Schedules steps of plain decode alone.

    The rest of a `SchedulerOutput` comes from vLLM's own `schedule`, called while it sees none of these requests.
    """

    def __init__(self, scheduler: Any, schedule: Any) -> None:
        """Call `of` instead: it checks that the scheduler is supported. `schedule` is vLLM's own method."""
        from vllm.v1.core.sched.interface import PauseState
        from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

        self._schedule = schedule
        self._block_manager = sole_manager(scheduler.kv_cache_manager, FullAttentionManager)
        self._deferred = scheduler._slipstream_deferred_steps = DeferredSteps(scheduler, _stale_field())
        self._paused = PauseState.PAUSED_ALL
        self._queues = [name for name in _WAITING_QUEUES if hasattr(scheduler, name)]
        self._limit_field = next(n for n in ("max_num_active_reqs", "max_num_running_reqs") if hasattr(scheduler, n))
        self._max_tokens = min(scheduler.max_num_scheduled_tokens, scheduler.scheduler_config.max_num_batched_tokens)

    @classmethod
    def of(cls, scheduler: Any, schedule: Any) -> PlainSteps | None:
        """None if a scheduler's steps do more than the fast path knows."""
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

        if (
            type(scheduler) not in (Scheduler, AsyncScheduler)
            or any(getattr(scheduler, name, None) for name in _UNSUPPORTED)
            or scheduler.num_sampled_tokens_per_step != 1
            or sole_manager(scheduler.kv_cache_manager, FullAttentionManager) is None
        ):
            return None
        return cls(scheduler, schedule)

    def schedule(self, scheduler: Any) -> Any:
        """The `SchedulerOutput` of a plain step; None, with nothing changed, if vLLM must schedule the step."""
        running = scheduler.running
        if (
            not 0 < len(running) <= self._max_tokens
            or scheduler._inflight_prefills
            or scheduler._pause_state == self._paused
            or (any(getattr(scheduler, name) for name in self._queues) and not self._is_full(scheduler))
        ):
            return None
        deferred = self._deferred
        if not deferred.track(running):
            return None
        ending: list[int] = []
        growing: list[tuple[int, Any]] = []
        for row in deferred.rows_to_check():
            request = running[row]
            computed, in_flight = request.num_computed_tokens, request.num_output_placeholders
            if in_flight > 0 and computed + 2 - in_flight >= request.num_prompt_tokens + request.max_tokens:
                ending.append(row)  # by a token in flight: vLLM schedules no further one
            elif computed > scheduler.max_model_len - 2 or not _is_simple(request):
                return None
            else:
                growing.append((row, request))
        if len(growing) > scheduler.kv_cache_manager.block_pool.get_num_free_blocks():
            return None  # vLLM will preempt some
        new_blocks: list[Any] = [None] * len(running)
        for row, request in growing:
            new_blocks[row] = self._allocate(scheduler.kv_cache_manager, request)
            deferred.plain_until[row] = request._slipstream_plain_until
        rows = np.delete(np.arange(len(running)), ending)
        return self._output(scheduler, rows, [new_blocks[row] for row in rows] if ending else new_blocks)

    def _allocate(self, kv_cache_manager: Any, request: Any) -> Any:
        """As `allocate_slots` for one more token of a running request, if there is a free block. Returns the
        new block, if any, in the form of `CachedRequestData.new_block_ids`."""
        manager, request_id = self._block_manager, request.request_id
        end, cached = request.num_computed_tokens + 1, manager.num_cached_block.get(request_id)
        if cached is None:
            blocks = kv_cache_manager.allocate_slots(request, 1, num_lookahead_tokens=0)
            return blocks.get_block_ids(allow_none=True)
        blocks, new = manager.req_to_blocks[request_id], None
        if end > len(blocks) * manager.block_size:
            blocks += kv_cache_manager.block_pool.get_new_blocks(1)
            new = ([blocks[-1].block_id],)
        known = min(end, len(request._all_token_ids))
        if kv_cache_manager.enable_caching and known // manager.block_size > cached:
            kv_cache_manager.coordinator.cache_blocks(request, known)
        request._slipstream_plain_until = _plain_until(kv_cache_manager, manager, request)
        return new

    def _output(self, scheduler: Any, rows: Any, new_blocks: list[Any]) -> Any:
        before = None if scheduler.use_v2_model_runner else scheduler.prev_step_scheduled_req_ids.copy()
        output, deferred = self._without_requests(scheduler), self._deferred
        ids = deferred.ids.copy() if len(rows) == len(deferred.ids) else [deferred.ids[row] for row in rows]
        output.num_scheduled_tokens = dict.fromkeys(ids, 1)
        output.total_num_scheduled_tokens = len(ids)
        cached, computed = output.scheduled_cached_reqs, deferred.computed[rows]
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens = ids, new_blocks, computed.tolist()
        cached.num_output_tokens = (computed + 1 - deferred.prompt[rows]).tolist()
        if before is not None:
            if not before.issuperset(ids):
                cached.all_token_ids = {id_: deferred.all_token_ids(id_) for id_ in ids if id_ not in before}
            scheduler.prev_step_scheduled_req_ids.update(ids)
        if getattr(output, "num_common_prefix_blocks", None):  # some versions count them: a zero for each group
            first = scheduler.running[0].request_id
            output.num_common_prefix_blocks = scheduler.kv_cache_manager.get_num_common_prefix_blocks(first)
        deferred.schedule(rows)
        return output

    def _without_requests(self, scheduler: Any) -> Any:
        running, limit = scheduler.running, getattr(scheduler, self._limit_field)
        scheduler.running = []
        setattr(scheduler, self._limit_field, 0)
        try:
            return self._schedule(scheduler)
        finally:
            scheduler.running = running
            setattr(scheduler, self._limit_field, limit)

    def _is_full(self, scheduler: Any) -> bool:
        return len(scheduler.running) + scheduler.num_waiting_for_streaming_input >= getattr(
            scheduler, self._limit_field
        )


def end_conditions(scheduler: Any, request: Any) -> tuple[frozenset[int], int]:
    """See `undelivered.EndConditions`."""
    params = request.sampling_params
    if (
        request.structured_output_request is not None
        or request.mm_features
        or request.pooling_params is not None
        or params.repetition_detection is not None
    ):
        return frozenset(), 0
    max_tokens = min(request.max_tokens, scheduler.max_model_len - request.num_prompt_tokens)
    return frozenset({params.eos_token_id, *(params.stop_token_ids or ())}), max_tokens


class PlainTokens:
    """Takes the tokens of plain decode out of a step's `ModelRunnerOutput`."""

    def __init__(self, scheduler: Any) -> None:
        """Call `of` instead: it checks that the scheduler is supported."""
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
        from vllm.v1.request import Request, RequestStatus

        known = Request.__init__.__code__.co_names
        self._stale_field = _stale_field()
        self._counts_in_flight = "num_in_flight_tokens" in known
        self._is_async = isinstance(scheduler, AsyncScheduler)
        self._running = RequestStatus.RUNNING
        self._block_manager = sole_manager(scheduler.kv_cache_manager, FullAttentionManager)
        self._hash_block_size: int = scheduler.hash_block_size

    @classmethod
    def of(cls, scheduler: Any) -> PlainTokens | None:
        """None if a scheduler's, or a vLLM's, steps do more than the fast path knows."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.request import Request

        known = Request.__init__.__code__.co_names
        is_known = (
            type(scheduler) in (Scheduler, AsyncScheduler)
            and hasattr(SamplingParams, "eos_token_id")
            and "repetition_detection" in SamplingParams.__struct_fields__
            and hasattr(scheduler, "hash_block_size")
            and any(name in known for name in _STALE_FIELDS)
            and {"num_output_placeholders", "block_hashes", "_all_token_ids", "_output_token_ids"} <= set(known)
        )
        return cls(scheduler) if is_known else None

    def collect(
        self,
        scheduler: Any,
        scheduled: dict[str, int],
        result: Any,
        step: StepLogprobs | None,
        undelivered: Undelivered,
    ) -> tuple[dict[str, int], set[int]]:
        """Append plain tokens to their requests and to `undelivered`. Returns the rest of `scheduled` (tokens by
        request) for vLLM's own code, and the clients of these tokens. Raises RuntimeError for a placeholder, and
        with the asynchronous scheduler for a token without a scheduled step."""
        rest: dict[str, int] = {}
        clients: set[int] = set()
        deferred: DeferredSteps | None = getattr(scheduler, "_slipstream_deferred_steps", None)
        if deferred is not None:
            scheduled, clients = deferred.collect(scheduled, result, step, undelivered)
        requests, sampled, indices = scheduler.requests, result.sampled_token_ids, result.req_id_to_index
        values = None if step is None else step.values
        running, stale_field, hash_size = self._running, self._stale_field, self._hash_block_size
        manager, counts_in_flight, is_async = self._block_manager, self._counts_in_flight, self._is_async
        block_size, cached_blocks = (0, {}) if manager is None else (manager.block_size, manager.num_cached_block)
        client, of_client = -1, undelivered.of_client(-1)
        for request_id, count in scheduled.items():
            request: Any = requests.get(request_id)
            if request is None:
                rest[request_id] = count
                continue
            if request.client_index != client:
                client = request.client_index
                of_client = undelivered.of_client(client)
            held = of_client.get(request_id)
            if held is None or count != 1 or request.status is not running or getattr(request, stale_field):
                rest[request_id] = count
                continue
            index = indices[request_id]
            tokens, output_ids = sampled[index], request._output_token_ids
            if len(tokens) != 1 or len(output_ids) + 1 >= held.max_tokens or tokens[0] in held.stop_ids:
                rest[request_id] = count
                continue
            token, all_ids = tokens[0], request._all_token_ids
            if token < 0 or (is_async and request.num_output_placeholders < 1):
                raise wrong_token(len(sampled), is_unasked=token >= 0)
            held.tokens.append(token)
            if values is not None and held.logprobs is not None:
                held.logprobs.append(values[index])
            output_ids.append(token)
            all_ids.append(token)
            if len(all_ids) >= (len(request.block_hashes) + 1) * hash_size:
                request.update_block_hashes()
            if counts_in_flight:
                request.num_in_flight_tokens -= 1
            if is_async:
                request.num_output_placeholders = in_flight = request.num_output_placeholders - 1
                known = request.num_computed_tokens - in_flight
                if manager is None or known // block_size > cached_blocks.get(request_id, 0):
                    scheduler.kv_cache_manager.cache_blocks(request, known)
            clients.add(client)
        return rest, clients


def is_usual(scheduler: Any, scheduler_output: Any, result: Any) -> bool:
    """Whether a step's `ModelRunnerOutput` holds tokens and their log-probabilities, and nothing else."""
    if scheduler.connector is not None or scheduler_output.scheduled_spec_decode_tokens:
        return False
    if not result.sampled_token_ids:
        return False
    found = (getattr(result, name, None) for name in _UNUSUAL_FIELDS)
    return all(value is None or (isinstance(value, (dict, list)) and not value) for value in found)
