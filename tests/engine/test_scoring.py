"""Given tokens, scored by a real engine: at the temperature that each request names, as the trainer scores them."""

from inspect import signature
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
import vllm
from benchmarks.bridges import create_bridge
from transformers import AutoModelForCausalLM
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample import prompt_logprob

from slipstream.inference.plugin.patches import scoring
from slipstream.records import GenerateRequest, SamplingParams, Sequence
from slipstream.trainer.learner import score
from slipstream.trainer.model.policy import PolicyModel

from .conftest import PROMPTS

pytestmark = pytest.mark.engine


def request(tag, tokens, temperature):
    return GenerateRequest(tag, tokens, SamplingParams(max_tokens=1, temperature=temperature), scores_prompt=True)


def test_each_request_is_scored_at_its_own_temperature(live, tmp_path):
    weights = PolicyModel.load(live.model, "float32").named_weights()
    bridge = create_bridge("disk", folder=tmp_path, source=live.model, engine=live.engine)
    live.update(bridge, weights, 1)
    jobs = [(tokens, (0.5, 1.0, 2.0)[place % 3]) for place, tokens in enumerate(PROMPTS * 3)]
    answers = live.generate(*(request(f"s{n}", tokens, by) for n, (tokens, by) in enumerate(jobs)))
    model = PolicyModel.load(live.model, "float32")
    for (tokens, temperature), answer in zip(jobs, answers, strict=True):
        sequence = Sequence(tokens, [False] + [True] * (len(tokens) - 1))
        sampling = SamplingParams(max_tokens=1, temperature=temperature)
        exact = score(model, [sequence], sampling, micro_batch_tokens=512).logprobs[0]
        assert answer.prompt_logprobs[0] == 0.0
        torch.testing.assert_close(torch.tensor(answer.prompt_logprobs[1:]), exact, atol=1e-4, rtol=0)


@pytest.mark.parametrize("k", [1, 5, None])
def test_the_likeliest_tokens_of_each_place(k, live, tmp_path):
    """As the trainer computes them, for each request's number and temperature; None: all tokens."""
    bridge = create_bridge("disk", folder=tmp_path, source=live.model, engine=live.engine)
    live.update(bridge, PolicyModel.load(live.model, "float32").named_weights(), 1)
    model = AutoModelForCausalLM.from_pretrained(live.model, dtype=torch.float32)
    size = model.config.vocab_size
    jobs = [(tokens, (0.5, 1.0)[place % 2]) for place, tokens in enumerate(PROMPTS)]
    asked = [
        msgspec.structs.replace(request(f"top-{n}", tokens, by), num_likeliest=k or size)
        for n, (tokens, by) in enumerate(jobs)
    ]
    answers = live.generate(*asked, request("plain", PROMPTS[0], 1.0))
    assert answers[-1].likeliest is None
    for (tokens, temperature), answer in zip(jobs, answers, strict=False):
        token_ids, logprobs = (
            torch.tensor(stream.tolist()).view(len(tokens), -1)
            for stream in (answer.likeliest.token_ids, answer.likeliest.logprobs)
        )
        assert token_ids.shape == (len(tokens), k or size)
        assert not logprobs[0].any()
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, :-1] / temperature
        exact = logits.log_softmax(-1)
        torch.testing.assert_close(logprobs[1:], exact.gather(-1, token_ids[1:]), atol=1e-4, rtol=0)
        torch.testing.assert_close(logprobs[1:], exact.topk(k or size, -1).values, atol=1e-4, rtol=0)
        chosen = exact.gather(-1, torch.tensor(tokens)[1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(answer.prompt_logprobs[1:]), chosen, atol=1e-4, rtol=0)


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


def test_requests_of_one_step_are_scored_at_their_own_temperatures_on_a_gpu(monkeypatch):
    """vLLM's worker that scores on GPUs, with what its kernels compute written in torch; more than one chunk."""
    temperatures, lengths = {"a": 0.5, "b": 1.0, "c": 2.0}, np.array([900, 700, 5])
    tokens = torch.randint(0, 31, (int(lengths.sum()) + 1,), generator=torch.Generator().manual_seed(0))

    def scores(logits, number, chosen, **options):
        values = logits.double().log_softmax(-1).gather(-1, chosen[:, None])
        return LogprobsTensors(chosen[:, None], values, torch.zeros_like(chosen))

    monkeypatch.setattr(prompt_logprob, "get_prompt_logprobs_token_ids", lambda *args: tokens[1:])
    monkeypatch.setattr(prompt_logprob, "compute_topk_scores", scores)
    takes_device = "device" in signature(prompt_logprob.PromptLogprobsWorker).parameters
    device = {"device": torch.device("cpu")} if takes_device else {}
    worker = prompt_logprob.PromptLogprobsWorker(3, **device)
    scoring.at_request_temperature(SimpleNamespace(prompt_logprobs_worker=worker))
    for place, (name, temperature) in enumerate(temperatures.items()):
        worker.add_request(name, place, vllm.SamplingParams(temperature=temperature, prompt_logprobs=0))
    starts = np.concatenate([[0], lengths.cumsum()])
    batch = SimpleNamespace(
        req_ids=list(temperatures),
        idx_mapping_np=np.arange(3),
        idx_mapping=None,
        query_start_loc=None,
        query_start_loc_np=starts,
        num_computed_prefill_tokens_np=np.zeros(3, int),
        num_scheduled_tokens=lengths,
        num_tokens=int(lengths.sum()),
        prefill_len_np=lengths,
    )
    logits = 3 * torch.randn(batch.num_tokens, 31, generator=torch.Generator().manual_seed(1))
    padded = torch.cat([logits, logits[:7]])
    found = worker.compute_prompt_logprobs(lambda hidden: hidden, padded, batch, None, None, lengths)
    for place, (name, temperature) in enumerate(temperatures.items()):
        mine = slice(starts[place], starts[place + 1] - 1)
        exact = (logits[mine].double() / temperature).log_softmax(-1).gather(-1, tokens[1:][mine, None])
        torch.testing.assert_close(found[name].logprobs, exact, atol=1e-5, rtol=0)
