"""What vLLM's scheduler does for every request and token, left out where it comes to nothing.

At some hundred sequences a decode step waits for the scheduler's Python, not for the GPU: for each request it asks for
memory that is there, hashes a block that is not full, looks for reasons to stop, and makes a record that nobody reads
(`delivery` keeps it). Nearly all requests of nearly all steps are plain: one more token, which ends nothing, in a block
that has room. For these alone the few changes that remain are made here; whatever else a step holds goes through
vLLM's own code. Guarantees: all that the scheduler decides is the same as without this, step by step, and so is its
state once what `ledger` keeps is written, which is done before any code of vLLM's reads it. (One number is left as it
was, `next_decode_eligible_step`, which without pipeline stages decides nothing.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.inference.plugin.patches.deferred_steps import Ledger, wrong_token
from slipstream.inference.plugin.patches.patch_table import Absent

if TYPE_CHECKING:
    from slipstream.inference.plugin.patches.delivery import Held, StepLogprobs

_STALE = ("async_tokens_to_discard", "num_stale_output_tokens")
"""By version, how a request says that tokens on their way to it are to be dropped."""
_UNUSUAL = (
    *("pooler_output", "kv_connector_output", "ec_connector_output", "num_nans_in_logits", "prompt_logprobs_dict"),
    *("prompt_token_id_logprobs_dict", "routed_experts", "sampling_masks", "aux_output_connector_output"),
)
"""What a step's result may hold beside tokens and their log-probabilities."""

_OF_MANAGER = {"empty_kv_cache_blocks", "coordinator", "block_pool", "enable_caching", "max_model_len"}
"""What a memory manager must have."""

_WAITING = ("waiting", "skipped_waiting", "kv_holding_waiting")
_NO_STEPS_WITH = (
    *("connector", "ec_connector", "aux_output_connector", "use_pp", "num_spec_tokens", "num_lookahead_tokens"),
    *("num_prefill_lookahead", "dynamic_sd_lookup", "need_mamba_block_aligned_split", "needs_kv_cache_zeroing"),
    *("defer_block_free", "enable_return_routed_experts", "is_encoder_decoder"),
)
"""What a scheduler may have or do that plain steps know nothing of."""
_READERS = ("finish_requests", "reset_prefix_cache")
"""What is called from outside and reads or changes a running request, besides scheduling and taking its results."""


def allocate_with_room() -> None:
    """Patch the memory manager: a running request's next token needs nothing where its blocks have room."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SingleTypeKVCacheManager

    manager: Any = KVCacheManager
    single: Any = SingleTypeKVCacheManager
    for kind, needed in ((manager, _OF_MANAGER), (single, {"req_to_blocks", "num_cached_block", "block_size"})):
        if missing := needed - set(kind.__init__.__code__.co_names):
            raise Absent(f"{kind.__name__}.{min(missing)}")
    _skip_allocation(manager, FullAttentionManager)


def schedule_plainly() -> None:
    """Patch the scheduler: steps in which all that happens is that running requests make one more token each."""
    from vllm.v1.core.sched.scheduler import Scheduler

    _schedule_plainly(Scheduler)


def sole_manager(kv_cache_manager: Any, kind: Any) -> Any:
    """The one manager of blocks of a model whose layers all see everything; None where there are others, or where
    parts of a block are cached too."""
    managers = kv_cache_manager.coordinator.single_type_managers
    if len(managers) != 1 or type(managers[0]) is not kind:
        return None
    return managers[0] if managers[0].block_size == kv_cache_manager.block_pool.hash_block_size else None


def _skip_allocation(kv_cache_manager: Any, kind: Any) -> None:
    from vllm.v1.request import Request, RequestStatus

    allocate, running = kv_cache_manager.allocate_slots, RequestStatus.RUNNING
    any_request: Any = Request
    any_request._slipstream_until = 0

    def allocate_slots(self: Any, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        try:
            manager = self._slipstream_manager
        except AttributeError:
            manager = self._slipstream_manager = sole_manager(self, kind)
        # So is a running request asked for. Where its blocks have room and none of them has become full, there is
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
        request._slipstream_until = 0 if manager is None or blocks is None else _plain_until(self, manager, request)
        return blocks

    kv_cache_manager.allocate_slots = allocate_slots


def _plain_until(kv_cache_manager: Any, manager: Any, request: Any) -> int:
    """Below how many computed tokens one more needs no memory, fills no block and does not end the request, while the
    token before it is under way; without one, it may fill a block one token earlier. It holds while the request runs:
    blocks are taken from it, and counted as cached, only through `allocate_slots`, when it is preempted, or so that
    more would be plain."""
    if not _is_simple(request):
        return 0
    cached = manager.num_cached_block.get(request.request_id)
    room = len(manager.req_to_blocks[request.request_id]) * manager.block_size
    if kv_cache_manager.enable_caching:
        room = 0 if cached is None else min(room, (cached + 1) * manager.block_size)
    return min(room, kv_cache_manager.max_model_len - 1, request.num_prompt_tokens + request.max_tokens - 2)


def _is_simple(request: Any) -> bool:
    """Whether a request is text in and text out, in one piece."""
    return (
        request.structured_output_request is None
        and request.pooling_params is None
        and not request.mm_features
        and not request.resumable
        and not request.spec_token_ids
    )


def _schedule_plainly(kind: Any) -> None:
    schedule = kind.schedule

    def schedule_plainly(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            steps = self._slipstream_steps
        except AttributeError:
            steps = self._slipstream_steps = PlainSteps.of(self, schedule)
        if steps is not None and not any(args) and not any(kwargs.values()):
            output = steps.make(self)
            if output is not None:
                return output
        if steps is not None:
            settle(self)
            self._slipstream_ledger.drop()
        return schedule(self, *args, **kwargs)

    kind.schedule = schedule_plainly
    for name in _READERS:
        _settle_before(kind, name)


def _settle_before(kind: Any, name: str) -> None:
    function = getattr(kind, name)

    def settled(self: Any, *args: Any, **kwargs: Any) -> Any:
        settle(self)
        return function(self, *args, **kwargs)

    setattr(kind, name, settled)


def settle(scheduler: Any, request_id: str | None = None) -> None:
    """Write to all requests, or one, what the scheduler's ledger keeps for them."""
    ledger: Ledger | None = getattr(scheduler, "_slipstream_ledger", None)
    if ledger is not None:
        ledger.close(request_id)


def _stale_name() -> str:
    from vllm.v1.request import Request

    return next(name for name in _STALE if name in Request.__init__.__code__.co_names)


class PlainSteps:
    """Schedules a step in which all that happens is that running requests make one more token each.

    What a step's record holds beside these requests is made by vLLM's own code, which is asked for a step while it
    sees no request.
    """

    def __init__(self, scheduler: Any, schedule: Any) -> None:
        """Use `of`, which knows whether this scheduler is one that can be helped."""
        from vllm.v1.core.sched.interface import PauseState
        from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

        self._schedule = schedule
        self._manager = sole_manager(scheduler.kv_cache_manager, FullAttentionManager)
        self._ledger = scheduler._slipstream_ledger = Ledger(scheduler, _stale_name())
        self._paused = PauseState.PAUSED_ALL
        self._waiting = [name for name in _WAITING if hasattr(scheduler, name)]
        self._limit = next(n for n in ("max_num_active_reqs", "max_num_running_reqs") if hasattr(scheduler, n))
        self._most = min(scheduler.max_num_scheduled_tokens, scheduler.scheduler_config.max_num_batched_tokens)

    @classmethod
    def of(cls, scheduler: Any, schedule: Any) -> PlainSteps | None:
        """None for a scheduler whose steps do more than is known here."""
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

        if (
            type(scheduler) not in (Scheduler, AsyncScheduler)
            or any(getattr(scheduler, name, None) for name in _NO_STEPS_WITH)
            or scheduler.num_sampled_tokens_per_step != 1
            or sole_manager(scheduler.kv_cache_manager, FullAttentionManager) is None
        ):
            return None
        return cls(scheduler, schedule)

    def make(self, scheduler: Any) -> Any:
        """A step's record; None, and nothing has changed, for a step that vLLM's own code must make."""
        running = scheduler.running
        if (
            not 0 < len(running) <= self._most
            or scheduler._inflight_prefills
            or scheduler._pause_state == self._paused
            or (any(getattr(scheduler, name) for name in self._waiting) and not self._is_full(scheduler))
        ):
            return None
        ledger = self._ledger
        if not ledger.hold(running):
            return None
        late: list[int] = []
        unsure: list[tuple[int, Any]] = []
        for place in ledger.due():
            request = running[place]
            computed, ahead = request.num_computed_tokens, request.num_output_placeholders
            if ahead > 0 and computed + 2 - ahead >= request.num_prompt_tokens + request.max_tokens:
                late.append(place)  # what is under way ends it
            elif computed > scheduler.max_model_len - 2 or not _is_simple(request):
                return None
            else:
                unsure.append((place, request))
        if len(unsure) > scheduler.kv_cache_manager.block_pool.get_num_free_blocks():
            return None  # some will be preempted
        new_blocks: list[Any] = [None] * len(running)
        for place, request in unsure:
            new_blocks[place] = self._grow(scheduler.kv_cache_manager, request)
            ledger.until[place] = request._slipstream_until
        places = np.delete(np.arange(len(running)), late)
        return self._record(scheduler, places, [new_blocks[place] for place in places] if late else new_blocks)

    def _grow(self, kv_cache_manager: Any, request: Any) -> Any:
        """What `allocate_slots` does for one more token of a running request, where there is a free block. Returns the
        new block, if any, as a step's record has it."""
        manager, request_id = self._manager, request.request_id
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
        request._slipstream_until = _plain_until(kv_cache_manager, manager, request)
        return new

    def _record(self, scheduler: Any, places: Any, new_blocks: list[Any]) -> Any:
        before = None if scheduler.use_v2_model_runner else scheduler.prev_step_scheduled_req_ids.copy()
        output, ledger = self._without_requests(scheduler), self._ledger
        ids = ledger.ids.copy() if len(places) == len(ledger.ids) else [ledger.ids[place] for place in places]
        output.num_scheduled_tokens = dict.fromkeys(ids, 1)
        output.total_num_scheduled_tokens = len(ids)
        cached, computed = output.scheduled_cached_reqs, ledger.computed[places]
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens = ids, new_blocks, computed.tolist()
        cached.num_output_tokens = (computed + 1 - ledger.prompt[places]).tolist()
        if before is not None:
            if not before.issuperset(ids):
                cached.all_token_ids = {id_: ledger.all_token_ids(id_) for id_ in ids if id_ not in before}
            scheduler.prev_step_scheduled_req_ids.update(ids)
        if getattr(output, "num_common_prefix_blocks", None):  # of versions that count them: a zero for each group
            first = scheduler.running[0].request_id
            output.num_common_prefix_blocks = scheduler.kv_cache_manager.get_num_common_prefix_blocks(first)
        ledger.give(places)
        return output

    def _without_requests(self, scheduler: Any) -> Any:
        running, limit = scheduler.running, getattr(scheduler, self._limit)
        scheduler.running = []
        setattr(scheduler, self._limit, 0)
        try:
            return self._schedule(scheduler)
        finally:
            scheduler.running = running
            setattr(scheduler, self._limit, limit)

    def _is_full(self, scheduler: Any) -> bool:
        return len(scheduler.running) + scheduler.num_waiting_for_streaming_input >= getattr(scheduler, self._limit)


def ends(scheduler: Any, request: Any) -> tuple[frozenset[int], int]:
    """The tokens that may end a request, and with how many it ends; 0 for one that is never plain."""
    params = request.sampling_params
    if (
        request.structured_output_request is not None
        or request.mm_features
        or request.pooling_params is not None
        or params.repetition_detection is not None
    ):
        return frozenset(), 0
    most = min(request.max_tokens, scheduler.max_model_len - request.num_prompt_tokens)
    return frozenset({params.eos_token_id, *(params.stop_token_ids or ())}), most


class PlainTokens:
    """Takes the plain tokens out of a step's result."""

    def __init__(self, scheduler: Any) -> None:
        """Use `of`, which knows whether this scheduler is one that can be helped."""
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
        from vllm.v1.request import Request, RequestStatus

        known = Request.__init__.__code__.co_names
        self._stale = _stale_name()
        self._counts_flight = "num_in_flight_tokens" in known
        self._is_async = isinstance(scheduler, AsyncScheduler)
        self._running = RequestStatus.RUNNING
        self._manager = sole_manager(scheduler.kv_cache_manager, FullAttentionManager)
        self._hash_size: int = scheduler.hash_block_size

    @classmethod
    def of(cls, scheduler: Any) -> PlainTokens | None:
        """None for a scheduler, or a vLLM, whose steps do more than is known here."""
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
            and any(name in known for name in _STALE)
            and {"num_output_placeholders", "block_hashes", "_all_token_ids", "_output_token_ids"} <= set(known)
        )
        return cls(scheduler) if is_known else None

    def take(
        self, scheduler: Any, scheduled: dict[str, int], result: Any, step: StepLogprobs | None, held: Held
    ) -> tuple[dict[str, int], set[int]]:
        """Give plain tokens to their requests and to `held`. Returns what of `scheduled` is left to vLLM's own code,
        and the clients whose tokens these were. Raises RuntimeError for a token that was not sampled yet, and, with the
        asynchronous scheduler, for one that no step was made for."""
        rest: dict[str, int] = {}
        clients: set[int] = set()
        ledger: Ledger | None = getattr(scheduler, "_slipstream_ledger", None)
        if ledger is not None:
            scheduled, clients = ledger.take(scheduled, result, step, held)
        requests, sampled, places = scheduler.requests, result.sampled_token_ids, result.req_id_to_index
        values = None if step is None else step.values
        running, stale, hash_size, manager = self._running, self._stale, self._hash_size, self._manager
        counts_flight, is_async = self._counts_flight, self._is_async
        size, full = (0, {}) if manager is None else (manager.block_size, manager.num_cached_block)
        client, of_client = -1, held.of_client(-1)
        for request_id, count in scheduled.items():
            request: Any = requests.get(request_id)
            if request is None:
                rest[request_id] = count
                continue
            if request.client_index != client:
                client = request.client_index
                of_client = held.of_client(client)
            kept = of_client.get(request_id)
            if kept is None or count != 1 or request.status is not running or getattr(request, stale):
                rest[request_id] = count
                continue
            place = places[request_id]
            tokens, own = sampled[place], request._output_token_ids
            if len(tokens) != 1 or len(own) + 1 >= kept.most or tokens[0] in kept.stops:
                rest[request_id] = count
                continue
            token, whole = tokens[0], request._all_token_ids
            if token < 0 or (is_async and request.num_output_placeholders < 1):
                raise wrong_token(len(sampled), is_unasked=token >= 0)
            kept.tokens.append(token)
            if values is not None and kept.logprobs is not None:
                kept.logprobs.append(values[place])
            own.append(token)
            whole.append(token)
            if len(whole) >= (len(request.block_hashes) + 1) * hash_size:
                request.update_block_hashes()
            if counts_flight:
                request.num_in_flight_tokens -= 1
            if is_async:
                request.num_output_placeholders = ahead = request.num_output_placeholders - 1
                done = request.num_computed_tokens - ahead
                if manager is None or done // size > full.get(request_id, 0):
                    scheduler.kv_cache_manager.cache_blocks(request, done)
            clients.add(client)
        return rest, clients


def is_usual(scheduler: Any, scheduler_output: Any, result: Any) -> bool:
    """Whether a step made tokens and their log-probabilities, and nothing else."""
    if scheduler.connector is not None or scheduler_output.scheduled_spec_decode_tokens:
        return False
    if not result.sampled_token_ids:
        return False
    found = (getattr(result, name, None) for name in _UNUSUAL)
    return all(value is None or (isinstance(value, (dict, list)) and not value) for value in found)
