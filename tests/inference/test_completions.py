"""What a completion is made of, and the clock that sees its tokens come; with plain objects in the place of vLLM's."""

from types import SimpleNamespace

import numpy as np
import pytest

from slipstream.inference.plugin.completions import completion, expert_choices, refusals
from slipstream.records import ExpertChoices, GenerateRequest, SamplingParams

from .fakes import put


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    put(monkeypatch, logprobs={"FlatLogprobs": tuple}, exceptions={})


def ask(**fields):
    return GenerateRequest("a", [1, 2], SamplingParams(4), **fields)


def output(reason="stop", prompt_ids=(1, 2), **fields):
    logprobs = [{5: SimpleNamespace(logprob=-0.5)}, {6: SimpleNamespace(logprob=-1.5)}]
    out = {"token_ids": (5, 6), "logprobs": logprobs, "finish_reason": reason}
    return SimpleNamespace(outputs=[SimpleNamespace(**out | fields)], prompt_token_ids=prompt_ids, prompt_logprobs=None)


@pytest.mark.parametrize(
    ("theirs", "ours"), [("stop", "stop"), ("length", "length"), ("abort", "abort"), (None, "abort")]
)
def test_what_vllm_drops_was_aborted_and_has_no_experts(theirs, ours):
    rows = np.zeros((3, 2, 1), np.uint8)
    made = completion(ask(), output(theirs, routed_experts=rows), [])
    assert (made.finish_reason, made.cause) == (ours, "aborted" if ours == "abort" else "")
    assert (made.experts is None) == (ours == "abort")


@pytest.mark.parametrize(("kind", "width"), [(np.uint8, 1), (np.uint16, 2), (np.int32, 2), (np.int64, 2)])
def test_experts_are_sent_in_one_or_two_bytes(kind, width):
    rows = np.arange(12).reshape(3, 2, 2).astype(kind)
    found = expert_choices(rows, 4)
    assert found == ExpertChoices(np.arange(12, dtype=f"<u{width}").tobytes(), 2, 2, width)
    assert len(found) == 3
    for number in (3, 5):
        with pytest.raises(ValueError, match=rf"experts of shape \(3, 2, 2\) for {number} tokens"):
            expert_choices(rows, number)
    with pytest.raises(ValueError, match=r"experts of shape \(6, 2\)"):
        expert_choices(rows.reshape(6, 2), 7)


def test_what_vllm_raises_for_a_request_that_it_refuses(monkeypatch):
    assert set(refusals()) == {ValueError, NotImplementedError}
    put(monkeypatch, exceptions={"VLLMClientError": EOFError})
    assert set(refusals()) == {ValueError, NotImplementedError, EOFError}
