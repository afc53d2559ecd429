"""Tokens and log-probabilities sampled by the engine core and not yet sent to the front end.

State of the patch `final_delivery` (module `delivery`): a scheduler has one `Undelivered`, with an
`UndeliveredRequest` for each running request unless its tokens are read before its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

EndConditions = Callable[[Any, Any], tuple[frozenset[int], int]]
"""(scheduler, request) -> the token ids that may end the request, and its number of tokens at the end; 0 for a
request without plain decode steps."""


def never_plain(scheduler: Any, request: Any) -> tuple[frozenset[int], int]:
    """End conditions of a request without plain decode steps."""
    return frozenset(), 0


class StepLogprobs:
    """Log-probabilities of one step's sampled tokens, one array for all requests. Stands in for vLLM's
    `LogprobsLists` in `ModelRunnerOutput.logprobs`."""

    __slots__ = ("lists", "values")

    def __init__(self, lists: Any) -> None:
        self.lists = lists
        self.values: list[float] = lists.logprobs[:, 0].tolist()

    def slice_request(self, index: int, num_positions: int) -> Any:
        """The index itself for one sampled token, at no cost; vLLM's slice otherwise."""
        return index if num_positions == 1 else self.lists.slice_request(index, num_positions)


class UndeliveredRequest:
    """The undelivered tokens of one request."""

    __slots__ = ("logprobs", "max_tokens", "num_delivered", "output", "request", "stop_ids", "tokens")

    def __init__(self, output: Any, request: Any, stop_ids: frozenset[int], max_tokens: int) -> None:
        self.output = output
        """vLLM's `EngineCoreOutput` of the first undelivered token."""
        self.tokens: list[int] = list(output.new_token_ids)
        self.request = request
        """vLLM's `Request`."""
        self.num_delivered = len(request._output_token_ids) - len(self.tokens)
        """How many of the request's tokens were sent before."""
        self.logprobs: list[float] | None = None if output.new_logprobs is None else []
        self.stop_ids, self.max_tokens = stop_ids, max_tokens
        """See `EndConditions`."""

    def check(self, max_in_flight: int) -> None:
        """Compare the tokens of a finished request with vLLM's own. Raises RuntimeError when they differ, or when more
        than `max_in_flight` of its tokens are scheduled and not sampled."""
        own, in_flight = self.request._output_token_ids[self.num_delivered :], self.request.num_output_placeholders
        problem = "" if own == self.tokens else f"{len(self.tokens)} tokens, where vLLM has {len(own)} or others"
        if not problem and not 0 <= in_flight <= max_in_flight:
            problem = f"{in_flight} tokens still to come"
        if problem:
            raise RuntimeError(
                f"request {self.request.request_id} ended with {problem}: what is kept for the requests is wrong; use "
                'inference.patches = "required", and please report it with the version of vLLM'
            )

    def complete(self, last: Any = None) -> Any:
        """One `EngineCoreOutput` of all tokens, made from the `last` one or from the first. Log-probabilities have
        vLLM's form between processes; ranks are 0, as they are not computed."""
        from vllm.v1.outputs import LogprobsLists

        output: Any = self.output if last is None else last
        output.new_token_ids = self.tokens
        output.prefill_stats = output.prefill_stats or self.output.prefill_stats
        if self.logprobs is not None:
            ids = np.array(self.tokens, np.int32)[:, None]
            values = np.array(self.logprobs, np.float32)[:, None]
            output.new_logprobs = LogprobsLists(ids, values, np.zeros(len(values), np.int32))
        return output


_EMPTY: Mapping[str, UndeliveredRequest] = MappingProxyType({})


class Undelivered:
    """The undelivered tokens of a scheduler's running requests."""

    def __init__(
        self,
        max_in_flight: int,
        *,
        end_conditions: EndConditions = never_plain,
        flush: Callable[[Any, str | None], None] = lambda scheduler, request_id: None,
    ) -> None:
        """`max_in_flight`: see `UndeliveredRequest.check`. `flush(scheduler, request_id)` writes deferred bookkeeping
        to one request, or all for None; called before their tokens are sent."""
        self._max_in_flight = max_in_flight
        self._end_conditions = end_conditions
        self._flush = flush
        self._requests: dict[int, dict[str, UndeliveredRequest]] = {}
        """By client index and request id."""

    def of_client(self, client: int) -> Mapping[str, UndeliveredRequest]:
        """By request id; without requests that have nothing undelivered or are read during sampling."""
        return self._requests.get(client, _EMPTY)

    def deliver(self, scheduler: Any, client: int, outputs: list[Any], step: StepLogprobs | None) -> list[Any]:
        """Hold back a step's `outputs` and return those to send now: finished requests, requests read
        during sampling, and otherwise one held request: the front end sees tokens come."""
        held = self._requests.setdefault(client, {})
        values = step.values if step is not None else ()
        ready: list[Any] = []
        for output in outputs:
            mine = held.get(output.request_id)
            logprobs = output.new_logprobs
            if mine is None:
                if output.finish_reason is not None or not _may_be_held(scheduler, output):
                    if step is not None and type(logprobs) is int:
                        output.new_logprobs = step.lists.slice_request(logprobs, 1)
                    ready.append(output)
                    continue
                request = scheduler.requests[output.request_id]
                mine = UndeliveredRequest(output, request, *self._end_conditions(scheduler, request))
                held[output.request_id] = mine
            else:
                mine.tokens += output.new_token_ids
            if mine.logprobs is not None and type(logprobs) is int:
                mine.logprobs.append(values[logprobs])
            elif mine.logprobs is not None and logprobs is not None:
                mine.logprobs += logprobs.logprobs[:, 0].tolist()
            if output.finish_reason is not None:
                del held[output.request_id]
                mine.check(self._max_in_flight)
                ready.append(mine.complete(output))
        if len(held) > len(scheduler.requests):  # some were aborted
            self._requests[client] = held = {id_: mine for id_, mine in held.items() if id_ in scheduler.requests}
        if not ready and held:
            request_id = next(iter(held))
            self._flush(scheduler, request_id)
            ready.append(held.pop(request_id).complete())
        return ready

    def drain(self, scheduler: Any) -> dict[int, list[Any]]:
        """Everything undelivered, by client; nothing is left."""
        self._flush(scheduler, None)
        drained = {
            client: [mine.complete() for mine in held.values()] for client, held in self._requests.items() if held
        }
        self._requests = {}
        return drained


def token_counts(core: Any) -> dict[str, int]:
    """Sampled tokens of each request of an engine core, after a flush."""
    return {id_: len(request._output_token_ids) for id_, request in core.scheduler.requests.items()}


class ReceivedTokens:
    """Compares the tokens received by vLLM's output processor with those sampled by the engine core, for
    the processor's requests at construction; no step may be made meanwhile."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._ids = set(processor.request_states)

    def missing(self, counts: Mapping[str, int]) -> str:
        """The first difference to `counts`, the engine core's tokens of all requests still running; empty: none."""
        states: Mapping[str, Any] = self._processor.request_states
        for id_ in self._ids & states.keys():
            if id_ not in counts:
                return f"{id_} has ended"
            known = states[id_].detokenizer.num_output_tokens()
            if known != counts[id_]:
                return f"{id_} has {counts[id_]}, and {known} are known"
        return ""


def sampled_logprobs(logprobs: Any, token_ids: Sequence[int]) -> list[float]:
    """One log-probability for each token of a finished vLLM output. Raises ValueError when vLLM gave another number."""
    from vllm.logprobs import FlatLogprobs

    flat: Any = FlatLogprobs
    if isinstance(logprobs, flat) and logprobs.token_ids == list(token_ids):
        return list(logprobs.logprobs)
    return [entry[token].logprob for entry, token in zip(logprobs or [], token_ids, strict=True)]


def _may_be_held(scheduler: Any, output: Any) -> bool:
    """Whether nobody reads this request's tokens before its end."""
    from vllm.sampling_params import RequestOutputKind

    request = scheduler.requests.get(output.request_id)
    params = request.sampling_params if request is not None else None
    return (
        params is not None
        and params.output_kind == RequestOutputKind.FINAL_ONLY
        and not params.detokenize
        and not params.logprobs
        and params.prompt_logprobs is None
        and not getattr(request, "resumable", False)
        and not scheduler.log_stats
        and output.routed_experts is None
        and getattr(scheduler, "aux_output_connector", None) is None  # it returns a part of them with every token
        and getattr(output, "new_sampling_mask", None) is None
    )
