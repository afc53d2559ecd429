"""Patches vLLM: a request's tokens leave the engine core when it ends, not one by one.

As shipped `Scheduler.update_from_output` makes an object for every sequence and token, slices three arrays for its
log-probability and packs them into MessagePack. The front end unpacks them and makes a dict of each: with some hundred
sequences the engine waits for this Python code, not for the GPU. Nobody reads a rollout before its end, so here the
engine core holds a request's tokens back (`undelivered`) and sends them with the last one. Consequences:

- Requests with stop strings (detokenized after every token) and streaming requests go on as shipped.
- Every step still sends the tokens of one request: the front end sees tokens come (`token_clock`).
- A pause of vLLM to change the weights needs `flush` first: the front end counts the tokens of each version.

Changed: `Scheduler.update_from_output`, `LogprobsProcessor._update_sample_logprobs`, `MsgpackEncoder.encode_into`;
`EngineCore` gets a utility method.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import chain
from typing import Any

from slipstream.inference.plugin.patches import decoding
from slipstream.inference.plugin.patches.decoding import PlainTokens
from slipstream.inference.plugin.patches.patch_table import Absent, NotNeeded, changeable
from slipstream.inference.plugin.patches.undelivered import StepLogprobs, Undelivered, never_plain, token_counts

FLUSH = "slipstream_flush"
"""Name of the engine core's utility method to send everything undelivered."""


def deliver_at_the_end() -> None:
    """Patch `Scheduler.update_from_output`: hold a request's tokens back until it ends or is flushed."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs

    scheduler = changeable(Scheduler, "update_from_output")
    update = scheduler.update_from_output

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        lists, step = model_runner_output.logprobs, None
        if lists is not None and lists.cu_num_generated_tokens is None:
            model_runner_output.logprobs = step = StepLogprobs(lists)
        undelivered, plain = _state(self)
        clients = set[int]()
        if (
            plain is not None
            and (lists is None or step is not None)
            and decoding.is_usual(self, scheduler_output, model_runner_output)
        ):
            scheduled = scheduler_output.num_scheduled_tokens
            rest, clients = plain.collect(self, scheduled, model_runner_output, step, undelivered)
            scheduler_output = copy.copy(scheduler_output)
            scheduler_output.num_scheduled_tokens = rest
        else:
            decoding.flush(self)
        answers = update(self, scheduler_output, model_runner_output)
        for client in clients - answers.keys():
            answers[client] = EngineCoreOutputs(outputs=[])
        for client, answer in answers.items():
            if answer.outputs or client in clients:
                answer.outputs = undelivered.deliver(self, client, answer.outputs, step)
        return answers

    scheduler.update_from_output = update_from_output


def add_flush() -> None:
    """Add a utility method to `EngineCore`: it sends everything undelivered and returns each request's token count."""
    from vllm.v1.engine.core import EngineCore

    setattr(EngineCore, FLUSH, _flush_core)


def check_tokens() -> None:
    """Patch `Scheduler.update_from_output`: a sampled token outside of the vocabulary ends the engine."""
    from vllm.v1.core.sched.scheduler import Scheduler

    _check_tokens(changeable(Scheduler, "update_from_output"))


def take_arrays() -> None:
    """Patch `LogprobsProcessor._update_sample_logprobs` (front end): append whole arrays of log-probabilities."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.logprobs import LogprobsProcessor

    if "flat_logprobs" not in SamplingParams.__struct_fields__:
        raise Absent("SamplingParams.flat_logprobs")
    _take_arrays(changeable(LogprobsProcessor, "_update_sample_logprobs"))


def send_copies() -> None:
    """Patch `MsgpackEncoder.encode_into`, if vLLM may overwrite a message while zmq is sending it."""
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.serial_utils import MsgpackEncoder

    if hasattr(EngineCoreProc, "_send_msg_tracking_payload"):
        raise NotNeeded("vLLM overwrites no message that is being sent")
    _send_copies(MsgpackEncoder)


def flush(core: Any) -> list[Any]:
    """Everything undelivered of an engine core in this process, for its one client."""
    return _drain(core.scheduler).get(0, [])


def _max_in_flight(scheduler: Any) -> int:
    """How many steps may be scheduled and not sampled when a token is taken, and so tokens of one request."""
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


def _state(scheduler: Any) -> tuple[Undelivered, PlainTokens | None]:
    """These patches' state for a scheduler, made at its first step."""
    if not hasattr(scheduler, "_slipstream_delivery"):
        plain = PlainTokens.of(scheduler)
        ends = decoding.end_conditions if plain is not None else never_plain
        # `max_concurrent_batches` once: vLLM may search all installed packages for it, more than ten milliseconds.
        undelivered = Undelivered(_max_in_flight(scheduler), end_conditions=ends, flush=decoding.flush)
        scheduler._slipstream_delivery = undelivered, plain
    return scheduler._slipstream_delivery


def _drain(scheduler: Any) -> dict[int, list[Any]]:
    return _state(scheduler)[0].drain(scheduler) if hasattr(scheduler, "_slipstream_delivery") else {}


def _flush_core(self: Any) -> dict[str, int]:
    """In the engine core: send everything undelivered, before the answer to this call, `token_counts`."""
    from vllm.v1.engine import EngineCoreOutputs

    for client, outputs in _drain(self.scheduler).items():
        self.output_queue.put_nowait((client, EngineCoreOutputs(outputs=outputs)))
    return token_counts(self)


def _send_copies(encoder: Any) -> None:
    """Copy the first part of every message of several parts.

    For vLLM 0.26 (its pull request 50053 mends it): the engine core packs the next message into the same buffer once
    zmq has sent the last part of this one. The last part is a small array, copied by zmq at once; the first, from
    64 KiB on, zmq still reads. The front end then unpacks a mixture of two messages. A flush, or many requests
    ending in one step, make such a message; a copy of it costs little beside packing it.
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

        flat, values = self.logprobs, lists.logprobs
        if self.tokenizer is not None or not isinstance(flat, FlatLogprobs) or values.shape[1] != 1:
            update(self, lists)
            return
        numbers: list[float] = values[:, 0].tolist()
        indices = range(len(flat.logprobs), len(flat.logprobs) + len(numbers))
        flat.start_indices.extend(indices)
        flat.end_indices.extend(index + 1 for index in indices)
        flat.token_ids.extend(lists.logprob_token_ids[:, 0].tolist())
        flat.logprobs.extend(numbers)
        flat.ranks.extend(lists.sampled_token_ranks.tolist())
        flat.decoded_tokens.extend([None] * len(numbers))
        self.cumulative_logprob += sum(numbers)

    processor._update_sample_logprobs = _update_sample_logprobs
