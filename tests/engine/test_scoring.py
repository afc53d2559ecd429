"""Given tokens, scored by a real engine: at the temperature that each request names, as the trainer scores them."""

import msgspec
import pytest
import torch

from slipstream.inference.plugin import scoring
from slipstream.records import GenerateRequest, SamplingParams, Sequence
from slipstream.trainer.learner import score
from slipstream.trainer.model import PolicyModel
from slipstream.weights import create_bridge

from .conftest import PROMPTS

pytestmark = pytest.mark.engine


def request(tag, tokens, temperature):
    return GenerateRequest(tag, tokens, SamplingParams(max_tokens=1, temperature=temperature), scores_prompt=True)


def test_each_request_is_scored_at_its_own_temperature(live, tmp_path):
    weights = PolicyModel.load(live.model, "float32").named_weights()
    bridge = create_bridge("disk", folder=tmp_path, source=live.model, engine=live.engine)
    live.call(bridge.receiver.apply(bridge.publisher.publish(weights, 1, 0, lambda _: None), 60))
    jobs = [(tokens, (0.5, 1.0, 2.0)[place % 3]) for place, tokens in enumerate(PROMPTS * 3)]
    answers = live.generate(*(request(f"s{n}", tokens, by) for n, (tokens, by) in enumerate(jobs)))
    model = PolicyModel.load(live.model, "float32")
    for (tokens, temperature), answer in zip(jobs, answers, strict=True):
        sequence = Sequence(tokens, [False] + [True] * (len(tokens) - 1))
        sampling = SamplingParams(max_tokens=1, temperature=temperature)
        exact = score(model, [sequence], sampling, micro_batch_tokens=512).logprobs[0]
        assert answer.prompt_logprobs[0] == 0.0
        torch.testing.assert_close(torch.tensor(answer.prompt_logprobs[1:]), exact, atol=1e-4, rtol=0)


def test_the_same_prompt_is_scored_again_although_it_is_in_the_cache(live):
    first, second = (live.generate(request(f"again-{n}", PROMPTS[-1] * 3, 0.7))[0] for n in range(2))
    assert first.prompt_logprobs == second.prompt_logprobs
    assert min(first.prompt_logprobs[1:]) < 0.0


def test_sampling_is_not_touched_by_scoring(live):
    sampling = SamplingParams(max_tokens=12, temperature=0.7)
    plain = live.sample("plain", sampling)
    both = live.generate(
        *(GenerateRequest(f"beside-{n}", tokens, sampling, seed=n) for n, tokens in enumerate(PROMPTS)),
        *(request(f"scored-{n}", tokens, 2.0) for n, tokens in enumerate(PROMPTS)),
    )
    for one, other in zip(plain, both, strict=False):
        assert one.token_ids == other.token_ids
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-4, rtol=0)


def test_what_cannot_be_scored_is_refused_in_one_sentence(live):
    (answer,) = live.generate(request("cold", PROMPTS[0], 0.0))
    assert answer.finish_reason == "abort"
    assert "score at one above 0" in answer.error
    (answer,) = live.generate(request("foreign", [1, 10**6], 1.0))
    assert answer.finish_reason == "abort"
    (answer,) = live.generate(msgspec.structs.replace(request("image", PROMPTS[0], 1.0), images=(b"",)))
    assert "a prompt with images cannot be scored" in answer.error


def test_what_is_no_image_is_refused_in_one_sentence(live):
    asked = GenerateRequest("torn", PROMPTS[0], SamplingParams(max_tokens=4), images=(b"\x89PNG\r\n\x1a\n",))
    (answer,) = live.generate(asked)
    assert answer.finish_reason == "abort"
    assert "an image cannot be read" in answer.error
    assert "send it as PNG or JPEG" in answer.error


def test_another_temperature_than_1_needs_the_patch():
    scoring.check(request("a", [1, 2], 1.0), ())
    with pytest.raises(ValueError, match="temperature 1 only"):
        scoring.check(request("a", [1, 2], 0.7), ())
