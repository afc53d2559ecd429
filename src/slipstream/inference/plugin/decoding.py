"""What vLLM's scheduler does for every request and token, left out where it comes to nothing.

At some hundred sequences a decode step waits for the scheduler's Python, not for the GPU: for each request it asks for
memory that is there, hashes a block that is not full, looks for reasons to stop, and makes a record that nobody reads
(`delivery` keeps it). Nearly all requests of nearly all steps are plain: one more token, which ends nothing, in a block
that has room. For these alone the few changes that remain are made here; whatever else a step holds goes through
vLLM's own code. Guarantees: the scheduler's state and all that it decides are the same as without this, step by step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.inference.plugin.delivery import Held, StepLogprobs

_STALE = ("async_tokens_to_discard", "num_stale_output_tokens")
"""By version, how a request says that tokens on their way to it are to be dropped."""
_UNUSUAL = (
    *("pooler_output", "kv_connector_output", "ec_connector_output", "num_nans_in_logits", "prompt_logprobs_dict"),
    *("prompt_token_id_logprobs_dict", "routed_experts", "sampling_masks", "aux_output_connector_output"),
)
"""What a step's result may hold beside tokens and their log-probabilities."""

_OF_MANAGER = {"empty_kv_cache_blocks", "coordinator", "block_pool", "enable_caching", "max_model_len"}
"""What a memory manager must have."""


def apply() -> list[str]:
    """Patch the memory manager where this vLLM has what is needed; names of what is in force."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SingleTypeKVCacheManager

    manager: Any = KVCacheManager
    single: Any = SingleTypeKVCacheManager
    for kind, needed in ((manager, _OF_MANAGER), (single, {"req_to_blocks", "num_cached_block", "block_size"})):
        if not needed <= set(kind.__init__.__code__.co_names):
            return []
    _skip_allocation(manager, FullAttentionManager)
    return ["block_with_room"]


def sole_manager(kv_cache_manager: Any, kind: Any) -> Any:
    """The one manager of blocks of a model whose layers all see everything; None where there are others, or where
    parts of a block are cached too."""
    managers = kv_cache_manager.coordinator.single_type_managers
    if len(managers) != 1 or type(managers[0]) is not kind:
        return None
    return managers[0] if managers[0].block_size == kv_cache_manager.block_pool.hash_block_size else None


def _skip_allocation(kv_cache_manager: Any, kind: Any) -> None:
    from vllm.v1.request import RequestStatus

    allocate, running = kv_cache_manager.allocate_slots, RequestStatus.RUNNING

    def allocate_slots(self: Any, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        # So is a running request asked for. Where its blocks have room and none of them has become full, there is
        # nothing to allocate, to free or to cache.
        if num_new_tokens == 1 and request.status is running and not args and kwargs == {"num_lookahead_tokens": 0}:
            try:
                manager = self._slipstream_manager
            except AttributeError:
                manager = self._slipstream_manager = sole_manager(self, kind)
            if manager is not None:
                request_id, size = request.request_id, manager.block_size
                end, cached = request.num_computed_tokens + 1, manager.num_cached_block.get(request_id)
                if (
                    cached is not None
                    and end <= len(manager.req_to_blocks[request_id]) * size
                    and end <= self.max_model_len
                    and (not self.enable_caching or min(end, len(request._all_token_ids)) // size <= cached)
                ):
                    return self.empty_kv_cache_blocks
        return allocate(self, request, num_new_tokens, *args, **kwargs)

    kv_cache_manager.allocate_slots = allocate_slots


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
        self._stale = next(name for name in _STALE if name in known)
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
        and the clients whose tokens these were."""
        rest: dict[str, int] = {}
        clients: set[int] = set()
        requests, sampled, places = scheduler.requests, result.sampled_token_ids, result.req_id_to_index
        values = None if step is None else step.values
        running, stale, hash_size, manager = self._running, self._stale, self._hash_size, self._manager
        for request_id, count in scheduled.items():
            request: Any = requests.get(request_id)
            if request is None:
                rest[request_id] = count
                continue
            kept = held.kept(request.client_index, request_id)
            if kept is None or count != 1 or request.status is not running or getattr(request, stale):
                rest[request_id] = count
                continue
            place = places[request_id]
            tokens, own = sampled[place], request._output_token_ids
            if len(tokens) != 1 or len(own) + 1 >= kept.most or tokens[0] in kept.stops:
                rest[request_id] = count
                continue
            token, whole = tokens[0], request._all_token_ids
            kept.tokens.append(token)
            if kept.logprobs is not None and values is not None:
                kept.logprobs.append(values[place])
            own.append(token)
            whole.append(token)
            if len(whole) >= (len(request.block_hashes) + 1) * hash_size:
                request.update_block_hashes()
            if self._counts_flight:
                request.num_in_flight_tokens -= 1
            if self._is_async:
                request.num_output_placeholders -= 1
                done = request.num_computed_tokens - request.num_output_placeholders
                if manager is None or done // manager.block_size > manager.num_cached_block.get(request_id, 0):
                    scheduler.kv_cache_manager.cache_blocks(request, done)
            clients.add(request.client_index)
        return rest, clients


def is_usual(scheduler: Any, scheduler_output: Any, result: Any) -> bool:
    """Whether a step made tokens and their log-probabilities, and nothing else."""
    if scheduler.connector is not None or scheduler_output.scheduled_spec_decode_tokens:
        return False
    if not result.sampled_token_ids:
        return False
    found = (getattr(result, name, None) for name in _UNUSUAL)
    return all(value is None or (isinstance(value, (dict, list)) and not value) for value in found)
