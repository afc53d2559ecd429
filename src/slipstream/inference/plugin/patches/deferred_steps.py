"""Defers per-request scheduler bookkeeping during plain decode steps.

A decode step changes four numbers and four lists of every vLLM `Request`; at a thousand sequences the step waits for
this Python code, not for the GPU. Most of it is read only when the request's block is full, or it ends, is aborted or
preempted. `DeferredSteps` therefore keeps the counters and new tokens of all running requests in NumPy arrays.
`flush` writes them to a `Request` before vLLM's own code reads it: the request is then as vLLM itself leaves it.
"""

from __future__ import annotations

from itertools import chain, repeat
from typing import Any

import numpy as np

from slipstream.inference.plugin.patches.undelivered import StepLogprobs, Undelivered, UndeliveredRequest

_ARRAYS = ("_scheduled", "_sampled", "_in_flight", "_num_output", "_max_output", "_tokens", "_logprobs")
_MAX_DEFERRED = 32
"""Most deferred tokens of a request."""


def wrong_token(num_requests: int, *, is_unasked: bool) -> RuntimeError:
    """The error of a step with a token without a scheduled step, or with a placeholder."""
    return RuntimeError(
        f"a step of {num_requests} requests came back with a token that was "
        f"{'not asked for' if is_unasked else 'not sampled yet'}: what is kept for the requests is wrong, "
        "please report it with the version of vLLM"
    )


class DeferredSteps:
    """Deferred bookkeeping of a scheduler's running requests: one row for each, in the order of `Scheduler.running`."""

    def __init__(self, scheduler: Any, stale_field: str) -> None:
        """`stale_field`: the attribute of a `Request` for marking tokens in flight to be discarded."""
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.request import RequestStatus

        self._is_async, self._running = isinstance(scheduler, AsyncScheduler), RequestStatus.RUNNING
        self._stale_field, self._hash_block_size = stale_field, scheduler.hash_block_size
        self._kv_cache_manager = scheduler.kv_cache_manager
        (self._block_manager,) = self._kv_cache_manager.coordinator.single_type_managers
        self.clear()

    def clear(self) -> None:
        """Forget all requests; they must be flushed."""
        self.requests: list[Any] = []
        self.ids: list[str] = []
        self._make_arrays([])

    def _make_arrays(self, columns: list[tuple[int, ...]]) -> None:
        size = len(self.requests)
        self.rows = {id_: row for row, id_ in enumerate(self.ids)}
        numbers = np.array(columns, np.int64).reshape(size, 4)
        self.computed, self.plain_until, self.prompt, self._clients = numbers.T.copy()
        """Computed tokens, deferred ones included; `_slipstream_plain_until`; prompt tokens; client index."""
        self._scheduled, self._sampled, self._in_flight, self._num_output, self._max_output = np.zeros(
            (5, size), np.int64
        )
        """Deferred: steps scheduled, tokens sampled. Known to the `Request`: tokens scheduled and not sampled, output
        tokens. And its number of output tokens at the end."""
        self._tokens = np.zeros((size, _MAX_DEFERRED), np.int64)
        self._logprobs = np.zeros((size, _MAX_DEFERRED), np.float32)
        self._undelivered: list[UndeliveredRequest | None] = [None] * size
        self._defers_tokens = np.zeros(size, bool)
        """Whether a request's sampled tokens may be deferred; vLLM's own code takes the others'."""
        self._stop_ids: set[int] = set()

    def track(self, running: list[Any]) -> bool:
        """Set the rows to the `running` requests; False when one of them is not in plain decode."""
        waits = not self._is_async and (self._scheduled != self._sampled).any()
        if running == self.requests and not waits:
            return True
        if self.requests and not waits:  # some have ended
            stays = [request.status is self._running for request in self.requests]
            if [request for request, is_left in zip(self.requests, stays, strict=True) if is_left] == running:
                self._select(np.flatnonzero(stays))
                return True
        self.flush_all()
        self.clear()
        columns: list[tuple[int, ...]] = []
        for request in running:
            computed = request.num_computed_tokens
            if (
                len(request._all_token_ids) + request.num_output_placeholders - computed != 1
                or request.is_prefill_chunk
            ):
                return False
            columns.append((computed, request._slipstream_plain_until, request.num_prompt_tokens, request.client_index))
        self.requests, self.ids = running.copy(), [request.request_id for request in running]
        self._make_arrays(columns)
        return True

    def _select(self, rows: Any) -> None:
        order: list[int] = rows.tolist()
        self.requests, self.ids = [self.requests[row] for row in order], [self.ids[row] for row in order]
        self._undelivered = [self._undelivered[row] for row in order]
        self.rows = {id_: row for row, id_ in enumerate(self.ids)}
        for name in (*("computed", "plain_until", "prompt", "_clients", "_defers_tokens"), *_ARRAYS):
            setattr(self, name, getattr(self, name)[rows])

    def rows_to_check(self) -> list[int]:
        """Flush and return the rows whose next step may not be plain: it may need a block, or end the request."""
        in_flight = self._defers_tokens & (self._in_flight + self._scheduled - self._sampled > 0)
        rows: list[int] = np.flatnonzero(self.computed + ~(in_flight & self._is_async) >= self.plain_until).tolist()
        self.flush(rows)
        return rows

    def schedule(self, rows: Any) -> None:
        """Count a scheduled step for these rows."""
        self.computed[rows] += 1
        self._scheduled[rows] += 1

    def all_token_ids(self, request_id: str) -> list[int]:
        """A request's prompt and output tokens."""
        row = self.rows[request_id]
        self.flush([row])
        return self.requests[row]._all_token_ids.copy()

    def collect(
        self, scheduled: dict[str, int], result: Any, step: StepLogprobs | None, undelivered: Undelivered
    ) -> tuple[dict[str, int], set[int]]:
        """Defer the plain tokens of a step's `result`, a `ModelRunnerOutput`. Returns the rest of `scheduled` (tokens
        by request), and the clients of the deferred tokens. Raises RuntimeError for a placeholder, and for a
        token without a scheduled step."""
        ids, sampled = result.req_ids, result.sampled_token_ids
        if not self.requests:
            return scheduled, set()
        if not len(ids) == len(sampled) == len(scheduled) or set(map(len, sampled)) != {1}:
            self.stop_deferring()
            return scheduled, set()
        self._start_deferring(undelivered)
        if int(self._sampled.max()) == _MAX_DEFERRED:
            self.flush_all()
        if ids == self.ids:
            rows = np.arange(len(ids))
            plain = self._defers_tokens & (self._num_output + self._sampled + 1 < self._max_output)
        else:
            rows = np.fromiter(map(self.rows.get, ids, repeat(-1)), np.int64, len(ids))
            plain = (self._defers_tokens & (self._num_output + self._sampled + 1 < self._max_output))[rows]
            plain &= rows >= 0
        tokens = list(chain.from_iterable(sampled))
        if not self._stop_ids.isdisjoint(tokens):
            for i, token in enumerate(tokens):
                request = self._undelivered[rows[i]] if token in self._stop_ids else None
                if request is not None and token in request.stop_ids:
                    plain[i] = False
        if set(scheduled.values()) != {1}:
            plain &= np.fromiter(map(scheduled.get, ids), np.int64, len(ids)) == 1
        deferred, taken = rows[plain], np.array(tokens)[plain]
        in_flight = self._in_flight[deferred] + self._scheduled[deferred]
        is_unasked = self._is_async and bool((self._sampled[deferred] >= in_flight).any())
        if is_unasked or (taken < 0).any():
            raise wrong_token(len(ids), is_unasked=is_unasked)
        columns = self._sampled[deferred]
        self._tokens[deferred, columns] = taken
        if step is not None:
            self._logprobs[deferred, columns] = step.lists.logprobs[plain, 0]
        self._sampled[deferred] += 1
        clients: set[int] = set(self._clients[deferred].tolist())
        if len(deferred) == len(ids):
            return {}, clients
        left = {ids[i] for i in np.flatnonzero(~plain).tolist()}
        rest = {id_: count for id_, count in scheduled.items() if id_ in left}
        others = rows[~plain]
        self._stop_deferring(others[others >= 0])
        return rest, clients

    def _start_deferring(self, undelivered: Undelivered) -> None:
        """Defer tokens of requests with earlier ones held back: nobody reads the next either."""
        for row in np.flatnonzero(~self._defers_tokens).tolist():
            request = self.requests[row]
            held = undelivered.of_client(request.client_index).get(request.request_id)
            if held is None or request.status is not self._running or getattr(request, self._stale_field):
                continue
            self._undelivered[row], self._defers_tokens[row] = held, True
            self._in_flight[row] = request.num_output_placeholders
            self._num_output[row], self._max_output[row] = len(request._output_token_ids), held.max_tokens
            self._stop_ids |= held.stop_ids

    def stop_deferring(self, request_id: str | None = None) -> None:
        """Flush a request, or all, and leave its next tokens to vLLM's own code. Ignores unknown requests."""
        if request_id is None:
            self._stop_deferring(np.arange(len(self.ids)))
        elif request_id in self.rows:
            self._stop_deferring(np.array([self.rows[request_id]]))

    def _stop_deferring(self, rows: Any) -> None:
        """All rows at once: streams are left to vLLM in every step."""
        self.flush(rows[(self._scheduled | self._sampled)[rows] > 0].tolist())
        self._defers_tokens[rows] = False

    def flush_all(self) -> None:
        """Write everything deferred to the requests."""
        self.flush(np.flatnonzero(self._scheduled | self._sampled).tolist())

    def flush(self, rows: list[int]) -> None:
        """Write the deferred steps and tokens of these rows to their requests."""
        if not rows:
            return
        scheduled: list[int] = self._scheduled[rows].tolist()
        sampled: list[int] = self._sampled[rows].tolist()
        width = max(sampled)
        tokens: list[list[int]] = self._tokens[rows, :width].tolist()
        logprobs: list[list[float]] = self._logprobs[rows, :width].tolist()
        for i, row in enumerate(rows):
            request, in_flight = self.requests[row], scheduled[i] - sampled[i]
            request.num_computed_tokens += scheduled[i]
            request.num_in_flight_tokens += in_flight
            if self._is_async:
                request.num_output_placeholders += in_flight
            held = self._undelivered[row]
            if sampled[i] and held is not None:
                self._append(request, held, tokens[i][: sampled[i]], logprobs[i][: sampled[i]])
        self._in_flight[rows] += self._scheduled[rows] - self._sampled[rows]
        self._num_output[rows] += self._sampled[rows]
        self._scheduled[rows] = self._sampled[rows] = 0

    def _append(self, request: Any, held: UndeliveredRequest, tokens: list[int], logprobs: list[float]) -> None:
        """Append sampled tokens as `Scheduler.update_from_output` does, with block hashes and cached blocks."""
        request._output_token_ids += tokens
        request._all_token_ids += tokens
        held.tokens += tokens
        if held.logprobs is not None:
            held.logprobs += logprobs
        if len(request._all_token_ids) >= (len(request.block_hashes) + 1) * self._hash_block_size:
            request.update_block_hashes()
        if self._is_async:
            known = request.num_computed_tokens - request.num_output_placeholders
            cached_blocks = self._block_manager.num_cached_block.get(request.request_id, 0)
            if known // self._block_manager.block_size > cached_blocks:
                self._kv_cache_manager.cache_blocks(request, known)
