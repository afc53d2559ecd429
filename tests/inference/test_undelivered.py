"""Tokens that are held back and sent later, with plain objects in the place of vLLM's."""

from types import SimpleNamespace

import numpy as np
import pytest

from slipstream.inference.plugin.patches.undelivered import (
    StepLogprobs,
    Undelivered,
    UndeliveredRequest,
    never_plain,
    sampled_logprobs,
    token_counts,
)

from .fakes import put


class Lists(SimpleNamespace):
    """vLLM's arrays of one step."""

    def slice_request(self, index, number):
        return Lists(logprobs=self.logprobs[index : index + number])


class Flat(list):
    """vLLM's `FlatLogprobs`."""

    def __init__(self, token_ids, logprobs):
        self.token_ids, self.logprobs = token_ids, logprobs


@pytest.fixture(autouse=True)
def scripted(monkeypatch):
    put(
        monkeypatch,
        sampling_params={"RequestOutputKind": SimpleNamespace(FINAL_ONLY="final")},
        v1__outputs={"LogprobsLists": lambda *fields: fields},
        logprobs={"FlatLogprobs": Flat},
    )


def request_of(id_, **fields):
    params = {"output_kind": "final", "detokenize": False, "logprobs": 0, "prompt_logprobs": None}
    own = {name: fields.pop(name) for name in list(fields) if name in params}
    request = SimpleNamespace(
        request_id=id_, _output_token_ids=[], num_output_placeholders=0, sampling_params=SimpleNamespace(**params | own)
    )
    vars(request).update(fields)
    return request


def scheduler_of(*requests, **fields):
    by_id = {request.request_id: request for request in requests}
    return SimpleNamespace(**{"requests": by_id, "log_stats": False, **fields})


def step(scheduler, tokens, ends=(), logprobs=True, number=1.0, **fields):
    """The outputs of a step that makes these tokens, by request, and its log-probabilities."""
    outputs = []
    for place, (id_, made) in enumerate(tokens.items()):
        if id_ in scheduler.requests:
            scheduler.requests[id_]._output_token_ids += made
        output = SimpleNamespace(
            request_id=id_,
            new_token_ids=made,
            new_logprobs=place if logprobs else None,
            finish_reason="stop" if id_ in ends else None,
            prefill_stats=None,
            routed_experts=None,
        )
        vars(output).update(fields)
        outputs.append(output)
    values = np.float32([[-number - place / 8] for place in range(len(tokens))])
    return outputs, StepLogprobs(Lists(logprobs=values))


def shown(outputs):
    return [(output.request_id, output.new_token_ids) for output in outputs]


def deliver(undelivered, scheduler, made, client=0):
    return undelivered.deliver(scheduler, client, *made)


def test_a_request_gets_all_its_tokens_at_its_end_and_another_one_shows_that_some_come():
    scheduler, flushed = scheduler_of(request_of("a"), request_of("b")), []
    held = Undelivered(0, flush=lambda scheduler, id_: flushed.append(id_))
    first = deliver(held, scheduler, step(scheduler, {"a": [1], "b": [2]}))
    assert (shown(first), flushed) == ([("a", [1])], ["a"])
    assert held.of_client(0).keys() == {"b"}
    assert shown(deliver(held, scheduler, step(scheduler, {"a": [3], "b": [4]}, number=2.0))) == [("b", [2, 4])]
    assert held.of_client(0)["a"].num_delivered == 1
    (end,) = deliver(held, scheduler, step(scheduler, {"a": [5], "b": [6]}, ends=["a"], number=3.0))
    assert (end.request_id, end.new_token_ids, end.finish_reason) == ("a", [3, 5], "stop")
    ids, values, ranks = end.new_logprobs
    assert (ids.dtype, values.dtype, ranks.dtype) == (np.int32, np.float32, np.int32)
    assert (ids.tolist(), values.tolist(), ranks.tolist()) == ([[3], [5]], [[-2.0], [-3.0]], [0, 0])
    assert held.of_client(0).keys() == {"b"}
    assert (held.of_client(1), flushed) == ({}, ["a", "b"])


@pytest.mark.parametrize(("own", "told"), [(None, "first"), ("own", "own")])
def test_an_output_keeps_what_came_with_its_first_token(own, told):
    scheduler = scheduler_of(request_of("a"), request_of("b"))
    held = Undelivered(0)
    deliver(held, scheduler, step(scheduler, {"a": [1], "b": [2]}, prefill_stats="first"))
    (end,) = deliver(held, scheduler, step(scheduler, {"b": [3]}, ends=["b"], prefill_stats=own))
    assert (end.prefill_stats, end.new_token_ids) == (told, [2, 3])


def test_without_log_probabilities_there_are_none_and_several_tokens_have_theirs():
    scheduler = scheduler_of(request_of("a"), request_of("b"))
    held = Undelivered(0)
    made = step(scheduler, {"b": [8], "a": [1]}, logprobs=False)
    assert shown(deliver(held, scheduler, (made[0], None))) == [("b", [8])]
    (outputs, _) = step(scheduler, {"a": [2]}, ends=["a"], logprobs=False)
    (end,) = held.deliver(scheduler, 0, outputs, None)
    assert (end.new_token_ids, end.new_logprobs) == ([1, 2], None)
    deliver(held, scheduler, step(scheduler, {"b": [3]}))
    scheduler.requests["a"]._output_token_ids = []
    deliver(held, scheduler, step(scheduler, {"b": [3], "a": [1]}))
    outputs, of_step = step(scheduler, {"a": [4, 5]}, ends=["a"])
    outputs[0].new_logprobs = Lists(logprobs=np.float32([[-7.0, 0.0], [-8.0, 0.0]]))
    (end,) = held.deliver(scheduler, 0, outputs, of_step)
    assert (end.new_token_ids, end.new_logprobs[1].tolist()) == ([1, 4, 5], [[-1.125], [-7.0], [-8.0]])


@pytest.mark.parametrize(
    ("request_fields", "scheduler_fields", "output_fields"),
    [
        ({"output_kind": "delta"}, {}, {}),
        ({"detokenize": True}, {}, {}),
        ({"logprobs": 3}, {}, {}),
        ({"prompt_logprobs": 0}, {}, {}),
        ({"resumable": True}, {}, {}),
        ({"sampling_params": None}, {}, {}),
        ({}, {"log_stats": True}, {}),
        ({}, {"aux_output_connector": "one"}, {}),
        ({}, {}, {"routed_experts": "some"}),
        ({}, {}, {"new_sampling_mask": "some"}),
        ({}, {"requests": {}}, {}),
    ],
)
def test_what_somebody_reads_token_by_token_is_sent_at_once(request_fields, scheduler_fields, output_fields):
    scheduler = scheduler_of(request_of("a", **request_fields), **scheduler_fields)
    held = Undelivered(0)
    for _ in range(2):
        outputs, of_step = step(scheduler, {"x": [0], "a": [1]}, **output_fields)
        ready = held.deliver(scheduler, 0, outputs[1:], of_step)
        assert shown(ready) == [("a", [1])]
        assert ready[0].new_logprobs.logprobs.tolist() == [[-1.125]]
    assert not held.of_client(0)


def test_a_request_that_ends_with_its_first_token_is_sent_as_it_is():
    scheduler = scheduler_of(request_of("a"))
    outputs, of_step = step(scheduler, {"a": [1]}, ends=["a"])
    held = Undelivered(0)
    assert held.deliver(scheduler, 0, outputs, of_step) == outputs
    assert outputs[0].new_logprobs.logprobs.tolist() == [[-1.0]]
    outputs, _ = step(scheduler, {"a": [1]}, ends=["a"])
    outputs[0].new_logprobs = "theirs"
    for each in (None, of_step):
        assert held.deliver(scheduler, 0, outputs, each)[0].new_logprobs == "theirs"


def test_aborted_requests_are_forgotten():
    scheduler = scheduler_of(*(request_of(id_) for id_ in "abc"))
    held = Undelivered(0)
    deliver(held, scheduler, step(scheduler, {"a": [1], "b": [2], "c": [3]}))
    del scheduler.requests["b"], scheduler.requests["a"]
    assert shown(deliver(held, scheduler, step(scheduler, {"c": [4]}))) == [("c", [3, 4])]
    assert not held.of_client(0)


def test_everything_held_is_sent_to_its_client_on_demand():
    scheduler, flushed = scheduler_of(*(request_of(id_) for id_ in "abcd")), []
    held = Undelivered(0, flush=lambda scheduler, id_: flushed.append(id_))
    deliver(held, scheduler, step(scheduler, {"a": [1], "b": [2]}), client=0)
    deliver(held, scheduler, step(scheduler, {"c": [3], "d": [4]}), client=1)
    held.deliver(scheduler, 2, [], None)
    drained = held.drain(scheduler)
    assert {client: shown(outputs) for client, outputs in drained.items()} == {0: [("b", [2])], 1: [("d", [4])]}
    assert flushed == ["a", "c", None]
    assert held.drain(scheduler) == {}
    assert token_counts(SimpleNamespace(scheduler=scheduler)) == dict.fromkeys("abcd", 1)


@pytest.mark.parametrize(
    ("own", "in_flight", "problem"),
    [
        ([9, 1, 2], 2, ""),
        ([9, 1, 2], 0, ""),
        ([9, 1], 0, "2 tokens, where vLLM has 1 or others"),
        ([9, 1, 3], 0, "2 tokens, where vLLM has 2 or others"),
        ([9, 1, 2], 3, "3 tokens still to come"),
        ([9, 1, 2], -1, "-1 tokens still to come"),
        ([9, 1], 3, "2 tokens, where vLLM has 1 or others"),
    ],
)
def test_what_is_kept_for_a_request_that_ends_is_compared_with_vllms_own(own, in_flight, problem):
    request = request_of("a", _output_token_ids=[9, 1, 2])
    held = UndeliveredRequest(SimpleNamespace(new_token_ids=[1, 2], new_logprobs=None), request, frozenset({7}), 30)
    assert (held.num_delivered, held.logprobs, held.stop_ids, held.max_tokens) == (1, None, {7}, 30)
    request._output_token_ids, request.num_output_placeholders = own, in_flight
    if not problem:
        held.check(2)
        return
    with pytest.raises(RuntimeError, match=rf"request a ended with {problem}: .*inference.patches = \"required\""):
        held.check(2)


def test_end_conditions_are_asked_for_once():
    scheduler, asked = scheduler_of(request_of("a"), request_of("b")), []
    held = Undelivered(0, end_conditions=lambda *given: asked.append(given) or (frozenset({5}), 9))
    for _ in range(2):
        deliver(held, scheduler, step(scheduler, {"a": [1], "b": [2]}))
        kept = held.of_client(0)
    assert {(each.max_tokens, *each.stop_ids) for each in kept.values()} == {(9, 5)}
    assert asked[:2] == [(scheduler, scheduler.requests["a"]), (scheduler, scheduler.requests["b"])]
    assert never_plain(scheduler, None) == (frozenset(), 0)


def test_one_token_of_a_step_is_named_by_its_index():
    _, of_step = step(scheduler_of(), {"a": [1], "b": [2], "c": [3]})
    assert of_step.values == [-1.0, -1.125, -1.25]
    assert of_step.slice_request(1, 1) == 1
    assert of_step.slice_request(1, 2).logprobs.tolist() == [[-1.125], [-1.25]]


def test_each_token_has_its_own_log_probability():
    entries = [{5: SimpleNamespace(logprob=-0.5), 6: SimpleNamespace(logprob=-9.0)}, {6: SimpleNamespace(logprob=-1.5)}]
    assert sampled_logprobs(entries, (5, 6)) == [-0.5, -1.5]
    assert sampled_logprobs(Flat([5, 6], (-0.5, -1.5)), (5, 6)) == [-0.5, -1.5]
    assert sampled_logprobs(None, []) == []
    for wrong in (entries[:1], None, Flat([5], [-0.5])):
        with pytest.raises(ValueError, match="zip"):
            sampled_logprobs(wrong, [5, 6])
    with pytest.raises(KeyError):
        sampled_logprobs(entries, [5, 7])
