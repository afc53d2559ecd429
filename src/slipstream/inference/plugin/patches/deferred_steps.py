"""What running requests were given and have made, in arrays, until somebody reads it in the requests themselves.

A decode step changes four numbers and four lists of every request, and at a thousand sequences that is what the step
waits for, not the GPU. Nobody reads most of it: not before a request's block is full, it ends, is aborted or moved. So
steps are counted and tokens kept here, for all requests at once, and written to a request when it is its turn
(`settle`): then it is as vLLM's own code would have left it.
"""

from __future__ import annotations

from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from slipstream.inference.plugin.patches.delivery import Held, Kept, StepLogprobs

_COUNTS = ("_given", "_made", "_ahead", "_made_before", "_most", "_tokens", "_logprobs")
_WIDTH = 32
"""Tokens of a request that may wait here."""


def wrong_token(num_requests: int, *, is_unasked: bool) -> RuntimeError:
    """What to raise when a step brings a token that it cannot have made."""
    return RuntimeError(
        f"a step of {num_requests} requests came back with a token that was "
        f"{'not asked for' if is_unasked else 'not sampled yet'}: what is kept for the requests is wrong, "
        "please report it with the version of vLLM"
    )


class Ledger:
    """The running requests of a scheduler, each in a place of its own, in their order."""

    def __init__(self, scheduler: Any, stale: str) -> None:
        """`stale` is how a request says that tokens on their way to it are to be dropped."""
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.request import RequestStatus

        self._is_async, self._running = isinstance(scheduler, AsyncScheduler), RequestStatus.RUNNING
        self._stale, self._hash_size = stale, scheduler.hash_block_size
        self._memory = scheduler.kv_cache_manager
        (self._blocks,) = self._memory.coordinator.single_type_managers
        self.drop()

    def drop(self) -> None:
        """Forget all requests; they must be settled."""
        self.requests: list[Any] = []
        self.ids: list[str] = []
        self._make_arrays([])

    def _make_arrays(self, columns: list[tuple[int, ...]]) -> None:
        size = len(self.requests)
        self.places = {id_: place for place, id_ in enumerate(self.ids)}
        numbers = np.array(columns, np.int64).reshape(size, 4)
        self.computed, self.until, self.prompt, self._clients = numbers.T.copy()
        self._given, self._made, self._ahead, self._made_before, self._most = np.zeros((5, size), np.int64)
        """Steps and tokens that the request does not know of; what it knows: tokens under way, made, and in all."""
        self._tokens, self._logprobs = np.zeros((size, _WIDTH), np.int64), np.zeros((size, _WIDTH), np.float32)
        self._kept: list[Kept | None] = [None] * size
        self._is_open = np.zeros(size, bool)
        """Whether tokens of a request may be kept here: for others vLLM's own code is asked."""
        self._stops: set[int] = set()

    def hold(self, running: list[Any]) -> bool:
        """Make the places those of the requests that run now; false when one of them is more than a plain decode."""
        is_waited_for = not self._is_async and (self._given != self._made).any()
        if running == self.requests and not is_waited_for:
            return True
        if self.requests and not is_waited_for:  # some have ended
            keep = [request.status is self._running for request in self.requests]
            if [request for request, stays in zip(self.requests, keep, strict=True) if stays] == running:
                self._keep(np.flatnonzero(keep))
                return True
        self.settle_all()
        self.drop()
        columns: list[tuple[int, ...]] = []
        for request in running:
            computed = request.num_computed_tokens
            if (
                len(request._all_token_ids) + request.num_output_placeholders - computed != 1
                or request.is_prefill_chunk
            ):
                return False
            columns.append((computed, request._slipstream_until, request.num_prompt_tokens, request.client_index))
        self.requests, self.ids = running.copy(), [request.request_id for request in running]
        self._make_arrays(columns)
        return True

    def _keep(self, places: Any) -> None:
        order: list[int] = places.tolist()
        self.requests, self.ids = [self.requests[i] for i in order], [self.ids[i] for i in order]
        self._kept = [self._kept[i] for i in order]
        self.places = {id_: place for place, id_ in enumerate(self.ids)}
        for name in (*("computed", "until", "prompt", "_clients", "_is_open"), *_COUNTS):
            setattr(self, name, getattr(self, name)[places])

    def due(self) -> list[int]:
        """The places of requests whose next step may be more than one more token in a block that has room; settled."""
        under_way = self._is_open & (self._ahead + self._given - self._made > 0)
        places: list[int] = np.flatnonzero(self.computed + ~(under_way & self._is_async) >= self.until).tolist()
        self.settle(places)
        return places

    def give(self, places: Any) -> None:
        """Count a step for these."""
        self.computed[places] += 1
        self._given[places] += 1

    def all_token_ids(self, request_id: str) -> list[int]:
        """A request's prompt and tokens."""
        place = self.places[request_id]
        self.settle([place])
        return self.requests[place]._all_token_ids.copy()

    def take(
        self, scheduled: dict[str, int], result: Any, step: StepLogprobs | None, held: Held
    ) -> tuple[dict[str, int], set[int]]:
        """Keep a step's plain tokens. Returns what of `scheduled` is left, and the clients whose tokens these were.
        Raises RuntimeError for a token that was not sampled yet, and for one that no step was made for."""
        ids, sampled = result.req_ids, result.sampled_token_ids
        if not self.requests:
            return scheduled, set()
        if not len(ids) == len(sampled) == len(scheduled) or set(map(len, sampled)) != {1}:
            self.close()
            return scheduled, set()
        self._open(held)
        if int(self._made.max()) == _WIDTH:
            self.settle_all()
        if ids == self.ids:
            places = np.arange(len(ids))
            plain = self._is_open & (self._made_before + self._made + 1 < self._most)
        else:
            places = np.fromiter(map(self.places.get, ids, repeat(-1)), np.int64, len(ids))
            plain = (self._is_open & (self._made_before + self._made + 1 < self._most))[places] & (places >= 0)
        tokens = list(chain.from_iterable(sampled))
        if not self._stops.isdisjoint(tokens):
            for i, token in enumerate(tokens):
                kept = self._kept[places[i]] if token in self._stops else None
                if kept is not None and token in kept.stops:
                    plain[i] = False
        if set(scheduled.values()) != {1}:
            plain &= np.fromiter(map(scheduled.get, ids), np.int64, len(ids)) == 1
        rows, taken = places[plain], np.array(tokens)[plain]
        is_unasked = self._is_async and bool((self._made[rows] >= self._ahead[rows] + self._given[rows]).any())
        if is_unasked or (taken < 0).any():
            raise wrong_token(len(ids), is_unasked=is_unasked)
        columns = self._made[rows]
        self._tokens[rows, columns] = taken
        if step is not None:
            self._logprobs[rows, columns] = step.lists.logprobs[plain, 0]
        self._made[rows] += 1
        clients: set[int] = set(self._clients[rows].tolist())
        if len(rows) == len(ids):
            return {}, clients
        left = {ids[i] for i in np.flatnonzero(~plain).tolist()}
        rest = {id_: count for id_, count in scheduled.items() if id_ in left}
        for id_ in rest:
            self.close(id_)
        return rest, clients

    def _open(self, held: Held) -> None:
        for place in np.flatnonzero(~self._is_open).tolist():
            request = self.requests[place]
            kept = held.of_client(request.client_index).get(request.request_id)
            if kept is None or request.status is not self._running or getattr(request, self._stale):
                continue
            self._kept[place], self._is_open[place] = kept, True
            self._ahead[place] = request.num_output_placeholders
            self._made_before[place], self._most[place] = len(request._output_token_ids), kept.most
            self._stops |= kept.stops

    def close(self, request_id: str | None = None) -> None:
        """Settle a request, or all, and let the next tokens be looked at by others; one that is not here is let be."""
        if request_id is None:
            self.settle_all()
            self._is_open[:] = False
        elif request_id in self.places:
            place = self.places[request_id]
            self.settle([place])
            self._is_open[place] = False

    def settle_all(self) -> None:
        """Write all that is kept here."""
        self.settle(np.flatnonzero(self._given | self._made).tolist())

    def settle(self, places: list[int]) -> None:
        """Write to the requests in these places what they were given and have made."""
        if not places:
            return
        given: list[int] = self._given[places].tolist()
        made: list[int] = self._made[places].tolist()
        width = max(made)
        tokens: list[list[int]] = self._tokens[places, :width].tolist()
        logprobs: list[list[float]] = self._logprobs[places, :width].tolist()
        for i, place in enumerate(places):
            request, ahead = self.requests[place], given[i] - made[i]
            request.num_computed_tokens += given[i]
            request.num_in_flight_tokens += ahead
            if self._is_async:
                request.num_output_placeholders += ahead
            kept = self._kept[place]
            if made[i] and kept is not None:
                self._append(request, kept, tokens[i][: made[i]], logprobs[i][: made[i]])
        self._ahead[places] += self._given[places] - self._made[places]
        self._made_before[places] += self._made[places]
        self._given[places] = self._made[places] = 0

    def _append(self, request: Any, kept: Kept, tokens: list[int], logprobs: list[float]) -> None:
        request._output_token_ids += tokens
        request._all_token_ids += tokens
        kept.tokens += tokens
        if kept.logprobs is not None:
            kept.logprobs += logprobs
        if len(request._all_token_ids) >= (len(request.block_hashes) + 1) * self._hash_size:
            request.update_block_hashes()
        if self._is_async:
            done = request.num_computed_tokens - request.num_output_placeholders
            if done // self._blocks.block_size > self._blocks.num_cached_block.get(request.request_id, 0):
                self._memory.cache_blocks(request, done)
