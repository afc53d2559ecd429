"""Tokens and log-probabilities leave the engine core when their request ends, not one by one.

As shipped vLLM makes an object for every sequence and token, slices three arrays for its log-probability, packs them
into MessagePack, unpacks them in the other process and makes a dict of it: at some hundred sequences the engine waits
for this, not for the model. Nobody reads a rollout before its end, so here the core keeps what a request has made and
sends it with the last token. What this changes for whom:

- Requests with stop strings are looked at as text after every token, and those that stream are read: they go on as
  shipped.
- Every step still sends the tokens of one request, so that the other side sees that tokens come (`clock`).
- Who stops the engine to change the weights calls `flush` first: whose tokens they are is counted on the other side.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np

from slipstream.inference.plugin.patches import decoding
from slipstream.inference.plugin.patches.decoding import PlainTokens
from slipstream.inference.plugin.patches.patch_table import Absent, NotNeeded

FLUSH = "slipstream_flush"
"""The engine core's method, as vLLM's utility calls name it."""


def deliver_at_the_end() -> None:
    """Patch the scheduler: what a request makes is told when it ends, or at a flush."""
    from vllm.v1.core.sched.scheduler import Scheduler

    scheduler = _patchable(Scheduler)
    if not hasattr(scheduler, "update_from_output"):
        raise Absent("Scheduler.update_from_output")
    _deliver_at_the_end(scheduler)


def add_flush() -> None:
    """Patch the engine core: it can be asked for all that it has not told yet, and for each request's tokens."""
    from vllm.v1.engine.core import EngineCore

    setattr(_patchable(EngineCore), FLUSH, _flush_core)


def check_tokens() -> None:
    """Patch the scheduler: a step that brings a token which is none of the vocabulary ends the engine."""
    from vllm.v1.core.sched.scheduler import Scheduler

    if not hasattr(Scheduler, "update_from_output"):
        raise Absent("Scheduler.update_from_output")
    _check_tokens(_patchable(Scheduler))


def take_arrays() -> None:
    """Patch the front end: log-probabilities that come in one array are kept at once."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.logprobs import LogprobsProcessor

    if "flat_logprobs" not in SamplingParams.__struct_fields__:
        raise Absent("SamplingParams.flat_logprobs")
    processor = _patchable(LogprobsProcessor)
    if not hasattr(processor, "_update_sample_logprobs"):
        raise Absent("LogprobsProcessor._update_sample_logprobs")
    _take_arrays(processor)


def send_copies() -> None:
    """Patch the packer of messages, where vLLM does not keep those that are being sent."""
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.serial_utils import MsgpackEncoder

    if hasattr(EngineCoreProc, "_send_msg_tracking_payload"):
        raise NotNeeded("vLLM writes over no message that is being sent")
    _send_copies(_patchable(MsgpackEncoder))


def _patchable(of: Any) -> Any:
    """Something of vLLM's, as what may be patched."""
    return of


class StepLogprobs:
    """The log-probabilities of one step's sampled tokens: one array for all requests, in the place of vLLM's
    `LogprobsLists`."""

    __slots__ = ("lists", "values")

    def __init__(self, lists: Any) -> None:
        self.lists = lists
        self.values: list[float] = lists.logprobs[:, 0].tolist()

    def slice_request(self, index: int, num_positions: int) -> Any:
        """The index itself where one token was sampled, which is what costs nothing; vLLM's slice otherwise."""
        return index if num_positions == 1 else self.lists.slice_request(index, num_positions)


class Kept:
    """A request's tokens that nobody was told of yet."""

    __slots__ = ("logprobs", "most", "num_told", "output", "request", "stops", "tokens")

    def __init__(self, output: Any, request: Any, stops: frozenset[int], most: int) -> None:
        self.output = output
        """vLLM's record of the first of them."""
        self.tokens: list[int] = list(output.new_token_ids)
        self.request = request
        """vLLM's own."""
        self.num_told = len(request._output_token_ids) - len(self.tokens)
        """Of its tokens, those that were told before."""
        self.logprobs: list[float] | None = None if output.new_logprobs is None else []
        self.stops, self.most = stops, most
        """See `decoding.ends`."""

    def check(self, most_to_come: int) -> None:
        """Compare the tokens of a request that has ended with vLLM's own. Raises RuntimeError when they differ, or when
        more tokens are still to come than steps can be under way."""
        own, to_come = self.request._output_token_ids[self.num_told :], self.request.num_output_placeholders
        problem = "" if own == self.tokens else f"{len(self.tokens)} tokens, where vLLM has {len(own)} or others"
        if not problem and not 0 <= to_come <= most_to_come:
            problem = f"{to_come} tokens still to come"
        if problem:
            raise RuntimeError(
                f"request {self.request.request_id} ended with {problem}: what is kept for the requests is wrong; use "
                'inference.patches = "required", and please report it with the version of vLLM'
            )

    def complete(self, last: Any = None) -> Any:
        """A record of all, the `last` one's or its own, with log-probabilities as vLLM carries them between
        processes; the ranks were not counted."""
        from vllm.v1.outputs import LogprobsLists

        output: Any = self.output if last is None else last
        output.new_token_ids = self.tokens
        output.prefill_stats = output.prefill_stats or self.output.prefill_stats
        if self.logprobs is not None:
            ids = np.array(self.tokens, np.int32)[:, None]
            values = np.array(self.logprobs, np.float32)[:, None]
            output.new_logprobs = LogprobsLists(ids, values, np.zeros(len(values), np.int32))
        return output


_NOTHING: Mapping[str, Kept] = MappingProxyType({})


class Held:
    """What a scheduler's running requests have made and nobody was told of yet."""

    def __init__(self, most_to_come: int, plain: PlainTokens | None = None) -> None:
        """`most_to_come`: see `Kept.check`."""
        self._most_to_come = most_to_come
        self.plain = plain
        self._kept: dict[int, dict[str, Kept]] = {}
        """By client and request."""

    def of_client(self, client: int) -> Mapping[str, Kept]:
        """By request, without those that have told all or are read as they go."""
        return self._kept.get(client, _NOTHING)

    def deliver(self, scheduler: Any, client: int, outputs: list[Any], step: StepLogprobs | None) -> list[Any]:
        """Of a step's `outputs`, and of what was kept before, what is to be sent now."""
        held = self._kept.setdefault(client, {})
        values = step.values if step is not None else ()
        ready: list[Any] = []
        for output in outputs:
            kept = held.get(output.request_id)
            logprobs = output.new_logprobs
            if kept is None:
                if output.finish_reason is not None or not _may_wait(scheduler, output):
                    if step is not None and type(logprobs) is int:
                        output.new_logprobs = step.lists.slice_request(logprobs, 1)
                    ready.append(output)
                    continue
                ends = (frozenset[int](), 0)
                request = scheduler.requests[output.request_id]
                if self.plain is not None:
                    ends = decoding.ends(scheduler, request)
                held[output.request_id] = kept = Kept(output, request, *ends)
            else:
                kept.tokens += output.new_token_ids
            if kept.logprobs is not None and type(logprobs) is int:
                kept.logprobs.append(values[logprobs])
            elif kept.logprobs is not None and logprobs is not None:
                kept.logprobs += logprobs.logprobs[:, 0].tolist()
            if output.finish_reason is not None:
                del held[output.request_id]
                kept.check(self._most_to_come)
                ready.append(kept.complete(output))
        if len(held) > len(scheduler.requests):  # some were aborted
            self._kept[client] = held = {id_: kept for id_, kept in held.items() if id_ in scheduler.requests}
        if not ready and held:
            request_id = next(iter(held))
            decoding.settle(scheduler, request_id)
            ready.append(held.pop(request_id).complete())
        return ready

    def take(self, scheduler: Any) -> dict[int, list[Any]]:
        """Everything, by client."""
        decoding.settle(scheduler)
        taken = {client: [kept.complete() for kept in held.values()] for client, held in self._kept.items() if held}
        self._kept = {}
        return taken


def flush(core: Any) -> list[Any]:
    """What an engine core in this process keeps, for its one client."""
    return _take(core.scheduler).get(0, [])


def counts(core: Any) -> dict[str, int]:
    """Of each request of an engine core how many tokens it has; nothing is kept from it (`flush`)."""
    return {id_: len(request._output_token_ids) for id_, request in core.scheduler.requests.items()}


class Told:
    """What vLLM's output processor still has to be told of the requests that it has at first, while no step is made."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._ids = set(processor.request_states)

    def missing(self, counts: Mapping[str, int]) -> str:
        """What is missing when `counts` are the tokens of all requests that go on; empty when nothing is."""
        states: Mapping[str, Any] = self._processor.request_states
        for id_ in self._ids & states.keys():
            if id_ not in counts:
                return f"{id_} has ended"
            known = states[id_].detokenizer.num_output_tokens()
            if known != counts[id_]:
                return f"{id_} has {counts[id_]}, and {known} are known"
        return ""


def _may_wait(scheduler: Any, output: Any) -> bool:
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
        and getattr(output, "new_sampling_mask", None) is None
    )


def _deliver_at_the_end(scheduler: Any) -> None:
    from vllm.v1.engine import EngineCoreOutputs

    update = scheduler.update_from_output

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        lists, step = model_runner_output.logprobs, None
        if lists is not None and lists.cu_num_generated_tokens is None:
            model_runner_output.logprobs = step = StepLogprobs(lists)
        held, clients = _held(self), set[int]()
        if (
            held.plain is not None
            and (lists is None or step is not None)
            and decoding.is_usual(self, scheduler_output, model_runner_output)
        ):
            scheduled = scheduler_output.num_scheduled_tokens
            rest, clients = held.plain.take(self, scheduled, model_runner_output, step, held)
            scheduler_output = copy.copy(scheduler_output)
            scheduler_output.num_scheduled_tokens = rest
        else:
            decoding.settle(self)
        answers = update(self, scheduler_output, model_runner_output)
        for client in clients - answers.keys():
            answers[client] = EngineCoreOutputs(outputs=[])
        for client, answer in answers.items():
            if answer.outputs or client in clients:
                answer.outputs = held.deliver(self, client, answer.outputs, step)
        return answers

    scheduler.update_from_output = update_from_output


def _most_to_come(scheduler: Any) -> int:
    """Of a request's tokens, when one is taken: one for each step that may be under way then."""
    return scheduler.vllm_config.max_concurrent_batches - 1


def _check_tokens(scheduler: Any) -> None:
    update = scheduler.update_from_output

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        tokens = list(chain.from_iterable(model_runner_output.sampled_token_ids))
        if tokens:
            size: int = self.vllm_config.model_config.get_vocab_size()
            lowest, highest = min(tokens), max(tokens)
            if lowest < 0 or highest >= size:
                raise RuntimeError(
                    f"vLLM's model runner made the token {lowest if lowest < 0 else highest}, and there are 0 to "
                    f"{size - 1}: nothing of this step can be trusted; please report it with the version of vLLM"
                )
        return update(self, scheduler_output, model_runner_output)

    scheduler.update_from_output = update_from_output


def _held(scheduler: Any) -> Held:
    if not hasattr(scheduler, "_slipstream_held"):
        # Asked for once: vLLM may look through all installed packages for it, more than ten milliseconds each time.
        scheduler._slipstream_held = Held(_most_to_come(scheduler), decoding.PlainTokens.of(scheduler))
    return scheduler._slipstream_held


def _take(scheduler: Any) -> dict[int, list[Any]]:
    held: Held | None = getattr(scheduler, "_slipstream_held", None)
    return held.take(scheduler) if held is not None else {}


def _flush_core(self: Any) -> dict[str, int]:
    """In the engine core: send all that is kept, before the answer to this call, which is `counts`."""
    from vllm.v1.engine import EngineCoreOutputs

    for client, outputs in _take(self.scheduler).items():
        self.output_queue.put_nowait((client, EngineCoreOutputs(outputs=outputs)))
    return counts(self)


def _send_copies(encoder: Any) -> None:
    """Let no message be written over while it is being sent.

    For vLLM 0.26 (its pull request 50053 mends it): the core packs the next message into the same buffer once the last
    part of this one has left. The last part is a small array, which zmq copies at once; the first, from 64 KiB on, it
    still reads. The other side then unpacks a mixture of two messages. What many requests' ends, or a `flush`, make is
    such a message; copying it is nothing beside packing it.
    """
    pack = encoder.encode_into

    def encode_into(self: Any, message: Any, buffer: bytearray) -> Sequence[Any]:
        parts = pack(self, message, buffer)
        return parts if len(parts) == 1 else [bytes(parts[0]), *parts[1:]]

    encoder.encode_into = encode_into


def _take_arrays(processor: Any) -> None:
    update = processor._update_sample_logprobs

    def _update_sample_logprobs(self: Any, lists: Any) -> None:
        from vllm.logprobs import FlatLogprobs

        kept, values = self.logprobs, lists.logprobs
        if self.tokenizer is not None or not isinstance(kept, FlatLogprobs) or values.shape[1] != 1:
            update(self, lists)
            return
        numbers: list[float] = values[:, 0].tolist()
        places = range(len(kept.logprobs), len(kept.logprobs) + len(numbers))
        kept.start_indices.extend(places)
        kept.end_indices.extend(place + 1 for place in places)
        kept.token_ids.extend(lists.logprob_token_ids[:, 0].tolist())
        kept.logprobs.extend(numbers)
        kept.ranks.extend(lists.sampled_token_ranks.tolist())
        kept.decoded_tokens.extend([None] * len(numbers))
        self.cumulative_logprob += sum(numbers)

    processor._update_sample_logprobs = _update_sample_logprobs


def sampled_logprobs(logprobs: Any, token_ids: Sequence[int]) -> list[float]:
    """Of a finished output: one number for each token; raises ValueError when that is not what vLLM gave."""
    from vllm.logprobs import FlatLogprobs

    flat: Any = FlatLogprobs
    if isinstance(logprobs, flat) and logprobs.token_ids == list(token_ids):
        return list(logprobs.logprobs)
    return [entry[token].logprob for entry, token in zip(logprobs or [], token_ids, strict=True)]
