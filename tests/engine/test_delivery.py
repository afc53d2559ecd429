"""What the engine core keeps until a request ends, without an engine: vLLM's own records of outputs go through it."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from slipstream.inference.plugin.arguments import engine_arguments
from slipstream.inference.plugin.patches import delivery, undelivered
from slipstream.inference.settings import EngineSettings

QUIET = SamplingParams(logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)


class Steps:
    """A scheduler's end of it: makes a token for every running request, with a log-probability that tells which."""

    def __init__(self, requests: dict[str, SamplingParams]) -> None:
        made = {id_: SimpleNamespace(request_id=id_, sampling_params=p) for id_, p in requests.items()}
        for request in made.values():
            request._output_token_ids, request.num_output_placeholders = [], 0
            request.status = RequestStatus.RUNNING
        self.scheduler: Any = SimpleNamespace(log_stats=False, requests=made)
        self.held = undelivered.Undelivered(1)
        self.made: dict[str, tuple[list[int], list[float]]] = {id_: ([], []) for id_ in requests}
        self.number = 0

    def step(self, *ending: str, is_shipped: bool = False) -> list[EngineCoreOutput]:
        """With `is_shipped` the outputs have vLLM's own lists, which begin with the sampled token's."""
        ids = list(self.scheduler.requests)
        values = np.float32([[-0.1 - self.number - 100 * i] for i in range(len(ids))])
        tokens = [1000 * i + self.number for i in range(len(ids))]
        lists = LogprobsLists(np.int32(tokens)[:, None], values, np.ones(len(ids), np.int32))
        step: Any = undelivered.StepLogprobs(lists)
        if is_shipped:
            step = LogprobsLists(np.int32([[t, t + 1] for t in tokens]), np.hstack([values, values + 7]), lists[2])
        outputs = []
        for i, id_ in enumerate(ids):
            reason = FinishReason.STOP if id_ in ending else None
            outputs.append(EngineCoreOutput(id_, [tokens[i]], step.slice_request(i, 1), finish_reason=reason))
            self.scheduler.requests[id_]._output_token_ids.append(tokens[i])
            self.made[id_][0].append(tokens[i])
            self.made[id_][1].append(float(values[i, 0]))
        for id_ in ending:
            del self.scheduler.requests[id_]
        self.number += 1
        return self.held.deliver(self.scheduler, 0, outputs, None if is_shipped else step)


def received(batches: list[list[EngineCoreOutput]], id_: str) -> tuple[list[int], list[float]]:
    outputs = [output for batch in batches for output in batch if output.request_id == id_]
    tokens = [token for output in outputs for token in output.new_token_ids]
    return tokens, [value for output in outputs for value in output.new_logprobs.logprobs[:, 0].tolist()]


def test_steps_with_vllms_own_lists_come_between_others():
    steps = Steps({f"r{i}": QUIET for i in range(3)})
    batches = [steps.step(is_shipped=number % 2 == 1) for number in range(6)]
    batches += [steps.step("r0", "r1", "r2", is_shipped=True)]
    for id_, made in steps.made.items():
        assert received(batches, id_) == made


def test_every_step_says_that_tokens_come_and_little_more():
    steps = Steps({f"r{i}": QUIET for i in range(50)})
    batches = [steps.step() for _ in range(20)]
    assert [len(batch) for batch in batches] == [1] * 20
    assert all(output.new_token_ids for batch in batches for output in batch)
    assert len({batch[0].request_id for batch in batches}) == 20, "each in its turn"


@pytest.mark.parametrize(
    "changes",
    [{"output_kind": RequestOutputKind.DELTA}, {"detokenize": True}, {"logprobs": 2}, {"prompt_logprobs": 0}],
    ids=str,
)
def test_what_somebody_reads_goes_on_as_shipped(changes: dict[str, Any]):
    params = {"logprobs": 0, "detokenize": False, "output_kind": RequestOutputKind.FINAL_ONLY, **changes}
    steps = Steps({"read": SamplingParams(**params), "quiet": QUIET})
    batches = [steps.step() for _ in range(4)]
    assert [[output.request_id for output in batch] for batch in batches] == [["read"]] * 4
    assert received(batches, "read") == steps.made["read"]


def test_what_an_aborted_request_had_is_forgotten():
    steps = Steps({f"r{i}": QUIET for i in range(4)})
    steps.step()
    for id_ in ("r0", "r1", "r2"):
        steps.scheduler.requests.pop(id_)
    steps.step()
    assert not {output.request_id for output in steps.held.drain(steps.scheduler).get(0, [])} - {"r3"}


def test_a_request_that_ends_with_other_tokens_than_vllms_is_not_answered():
    steps = Steps({f"r{i}": QUIET for i in range(4)})
    for _ in range(3):
        steps.step()
    steps.scheduler.requests["r3"]._output_token_ids[-1] += 1
    with pytest.raises(RuntimeError, match=r"request r3 ended with .* tokens, where vLLM has"):
        steps.step("r3")


def test_a_request_that_ends_while_too_many_of_its_tokens_are_to_come_is_not_answered():
    steps = Steps({f"r{i}": QUIET for i in range(4)})
    for _ in range(3):
        steps.step()
    steps.scheduler.requests["r2"].num_output_placeholders = 1
    steps.step("r2")
    steps.scheduler.requests["r3"].num_output_placeholders = 2
    with pytest.raises(RuntimeError, match="request r3 ended with 2 tokens still to come"):
        steps.step("r3")


@pytest.mark.parametrize(("token", "is_one"), [(0, True), (99, True), (100, False), (-1, False)])
def test_a_token_that_is_none_of_the_vocabulary_ends_the_engine(token: int, is_one: bool):
    class Updated:
        vllm_config = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: 100))

        def update_from_output(self, scheduled: Any, result: Any) -> str:
            return "taken"

    delivery._check_tokens(Updated)
    result = SimpleNamespace(sampled_token_ids=[[5], [], [token]])
    if is_one:
        assert Updated().update_from_output(None, result) == "taken"
        return
    with pytest.raises(RuntimeError, match=f"made the token {token}, and there are 0 to 99"):
        Updated().update_from_output(None, result)


def test_it_is_known_what_the_front_end_was_not_told_yet():
    def state(tokens: int) -> Any:
        return SimpleNamespace(detokenizer=SimpleNamespace(num_output_tokens=lambda: tokens))

    processor = SimpleNamespace(request_states={"a": state(3), "b": state(4)})
    told = undelivered.ReceivedTokens(processor)
    assert told.missing({"a": 3, "b": 4, "of another process": 7}) == ""
    assert told.missing({"a": 3, "b": 5}) == "b has 5, and 4 are known"
    assert told.missing({"a": 3}) == "b has ended"
    processor.request_states["late"] = state(0)
    assert told.missing({"a": 3, "b": 4}) == "", "what comes meanwhile has no tokens"
    del processor.request_states["b"]
    assert told.missing({"a": 3}) == ""


def test_numbers_that_come_in_one_array_are_kept_as_those_that_come_one_by_one():
    delivery._take_arrays(patched := type("Patched", (LogprobsProcessor,), {}))
    request: Any = SimpleNamespace(sampling_params=SamplingParams(logprobs=0, flat_logprobs=True, detokenize=False))
    ours, theirs = (kind.from_new_request(None, request) for kind in (patched, LogprobsProcessor))
    ids, values = np.int32([[5], [7], [5]]), np.float32([[-0.25], [-3.0], [-1e-7]])
    for processor in (ours, theirs):
        processor._update_sample_logprobs(LogprobsLists(ids, values, np.zeros(3, np.int32)))
        processor._update_sample_logprobs(LogprobsLists(ids[:1], values[:1], np.zeros(1, np.int32)))
    assert isinstance(ours.logprobs, FlatLogprobs)
    assert ours.logprobs == theirs.logprobs
    assert undelivered.sampled_logprobs(ours.logprobs, [5, 7, 5, 5]) == values[[0, 1, 2, 0], 0].tolist()
    with pytest.raises(ValueError, match="zip"):
        undelivered.sampled_logprobs(ours.logprobs, [5, 7])


class Core:
    """What vLLM's sending thread asks of an engine core; it sends as vLLM 0.26 does."""

    def __init__(self) -> None:
        self.output_queue: queue.Queue[Any] = queue.Queue()

    def _send_msg_tracking_payload(self, socket: Any, parts: Any) -> Any:
        return socket.send_multipart(parts, copy=False, track=True)


def ends_of(requests: int, first: int) -> EngineCoreOutputs:
    """A message in which so many requests end."""
    tokens = np.arange(first, first + 400, dtype=np.int32)[:, None]
    lists = LogprobsLists(tokens, -tokens.astype(np.float32), np.zeros(400, np.int32))
    ends = [EngineCoreOutput(f"{first}.{i}", tokens[:, 0].tolist(), lists) for i in range(requests)]
    return EngineCoreOutputs(outputs=ends)


def arrived(messages: list[EngineCoreOutputs], path: str) -> list[Any]:
    """The tokens of each message on the other side, which listens once all have been packed; None for one that cannot
    be unpacked."""
    core = Core()
    for message in messages:
        core.output_queue.put((0, message))
    core.output_queue.put(EngineCoreProc.ENGINE_CORE_DEAD)
    thread = threading.Thread(target=EngineCoreProc.process_output_sockets, args=(core, [path], None, 0), daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not core.output_queue.empty():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    decoder, found = MsgpackDecoder(EngineCoreOutputs), []
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 30_000)
        socket.bind(path)
        for _ in messages:
            parts = socket.recv_multipart(copy=False)
            try:
                found.append([output.new_token_ids for output in decoder.decode(parts).outputs])
            except msgspec.DecodeError:
                found.append(None)
        thread.join(30)
    return found


def test_a_message_that_is_being_sent_is_not_written_over(monkeypatch, tmp_path):
    messages = [ends_of(requests, 1000 * i) for i, requests in enumerate((100, 1, 120, 90, 2))]
    made = [[output.new_token_ids for output in message.outputs] for message in messages]
    monkeypatch.setattr(MsgpackEncoder, "encode_into", MsgpackEncoder.encode_into)  # to be put back
    assert arrived(messages, f"ipc://{tmp_path}/as-shipped") != made, "vLLM 0.26 does it"
    delivery._send_copies(MsgpackEncoder)
    assert arrived(messages, f"ipc://{tmp_path}/copied") == made


def test_graphs_are_captured_for_all_that_runs_at_once_unless_the_user_says_otherwise():
    def sizes(most: int, eager: bool = False, **options: Any) -> list[int] | None:
        settings = EngineSettings("m", "bfloat16", 64, most, enforce_eager=eager, options=options)
        return engine_arguments(settings).get("cudagraph_capture_sizes")

    assert sizes(1024, eager=True) is None
    assert sizes(1) == [1, 2]
    for most in (3, 100, 256, 512):
        found = sizes(most)
        assert found == sorted(set(found))
        assert most in found
        assert most * 1.25 <= found[-1] <= 2 * most or found[-1] == 512, "a step may have tokens of prompts, too"
        assert all(b - a <= max(8, b // 3) for a, b in itertools.pairwise(found))
    assert sizes(1024, cudagraph_capture_sizes=[8]) == [8]
    assert sizes(1024, compilation_config={"cudagraph_mode": "NONE"}) is None
    for most in (513, 576, 1000, 1024):
        found = sizes(most)
        assert found == sorted(set(found))
        assert found[-1] == most
        assert max(b - a for a, b in itertools.pairwise(found)) <= 64


def test_graphs_with_attention_have_no_request_that_is_longer_than_a_context():
    """vLLM divides the tokens of a graph among at most `max_num_seqs` requests, and gives the last one the rest."""
    plain = EngineSettings("m", "bfloat16", 64, 256, enforce_eager=False)
    short, long = (
        engine_arguments(msgspec.structs.replace(plain, shared_kernels=True, max_model_len=length))
        for length in (64, 257)
    )
    assert short["cudagraph_capture_sizes"][-3:] == [224, 256, 512], "320, 384 and 448 would have 65, 129 and 193"
    assert long["cudagraph_capture_sizes"] == engine_arguments(plain)["cudagraph_capture_sizes"]
