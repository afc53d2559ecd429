"""The sampler with our patch: the same tokens and bits as vLLM's own, and draws that follow the distribution they name.

vLLM's sampler is called by itself, on logits of ours. The reference is written anew in float64.
"""

from __future__ import annotations

import itertools
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from slipstream.inference.plugin.patches import sampled_logprobs

VOCABULARY = 211
SETTINGS = {
    "plain": {},
    "warm": {"temperature": 1.7},
    "top_p": {"temperature": 0.7, "top_p": 0.85},
    "top_k": {"top_k": 7},
    "all": {"temperature": 1.3, "top_p": 0.9, "top_k": 20, "min_p": 0.05},
}


@pytest.fixture(autouse=True)
def where_an_engine_samples():
    """vLLM's kernels of a GPU read no tensor of the CPU."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield


def generator(seed: int) -> torch.Generator:
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


class MinP:
    """As vLLM's own processor, which needs a whole configuration: tokens less likely than a part of the likeliest."""

    def __init__(self, min_p: float) -> None:
        self.min_p = min_p

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        probabilities = logits.softmax(-1)
        return logits.masked_fill_(probabilities < self.min_p * probabilities.amax(-1, keepdim=True), -float("inf"))


def metadata(rows: int, seeds: bool, temperature=1.0, top_p=None, top_k=None, min_p=0.0) -> SamplingMetadata:
    nothing, processors = torch.zeros(rows), LogitsProcessors([MinP(min_p)] if min_p else [])
    given = {"all_greedy": False, "all_random": True, "max_num_logprobs": 0, "no_penalties": True}
    given |= {"prompt_token_ids": None, "allowed_token_ids_mask": None, "bad_words_token_ids": {}}
    given |= dict.fromkeys(("frequency_penalties", "presence_penalties", "repetition_penalties"), nothing)
    return SamplingMetadata(
        temperature=torch.full((rows,), temperature),
        top_p=None if top_p is None else torch.full((rows,), top_p),
        top_k=None if top_k is None else torch.full((rows,), top_k, dtype=torch.int32),
        generators={i: generator(i) for i in range(rows)} if seeds else {},
        output_token_ids=[[] for _ in range(rows)],
        logitsprocs=processors,
        **given,
    )


def samplers() -> tuple[Sampler, Sampler]:
    """vLLM's, and one with our patch."""
    patched: Any = type("Patched", (Sampler,), {"gather_logprobs": staticmethod(Sampler.gather_logprobs)})
    sampled_logprobs._without_ranks(patched)
    return Sampler("processed_logprobs"), patched("processed_logprobs")


def drawn(sampler: Sampler, logits: torch.Tensor, params: SamplingMetadata) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(5)
    output = sampler(logits.clone(), params)
    assert output.logprobs_tensors is not None
    assert torch.equal(output.logprobs_tensors.logprob_token_ids, output.sampled_token_ids)
    return output.sampled_token_ids[:, 0], output.logprobs_tensors.logprobs[:, 0]


def reference(logits: torch.Tensor, temperature=1.0, top_p=None, top_k=None, min_p=0.0) -> torch.Tensor:
    """Probabilities of one row, in float64, in vLLM's order: temperature, min_p, top_k, top_p."""
    p = (logits.double() / temperature).softmax(-1)
    p = torch.where(p < min_p * p.max(), 0.0, p)
    values, order = p.sort(descending=True)
    kept = torch.ones_like(values, dtype=torch.bool)
    if top_k is not None:
        kept &= torch.arange(len(values)) < top_k
    if top_p is not None:
        values = torch.where(kept, values, 0.0)
        values = values / values.sum()
        kept &= values.cumsum(0) - values < top_p
    p = torch.zeros_like(p).scatter(0, order, torch.where(kept, p[order], 0.0))
    return p / p.sum()


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("seeds", [False, True])
def test_tokens_and_numbers_are_vllms_own_to_the_bit(name: str, seeds: bool):
    logits = 3 * torch.randn(64, VOCABULARY, generator=generator(1))
    theirs, ours = (drawn(s, logits, metadata(64, seeds, **SETTINGS[name])) for s in samplers())
    assert torch.equal(theirs[0], ours[0])
    assert torch.equal(theirs[1].view(torch.int32), ours[1].view(torch.int32))


@pytest.mark.parametrize("name", SETTINGS)
def test_draws_follow_the_distribution_that_their_numbers_name(name: str):
    """Chi-square over 60,000 draws; the numbers against the reference."""
    row = 2 * torch.randn(VOCABULARY, generator=generator(2))
    expected = reference(row, **SETTINGS[name])
    rows, rounds = 4000, 15
    _, ours = samplers()
    counts = torch.zeros(VOCABULARY, dtype=torch.float64)
    torch.manual_seed(11)
    for _ in itertools.repeat(None, rounds):
        output = ours(row.repeat(rows, 1), metadata(rows, False, **SETTINGS[name]))
        tokens = output.sampled_token_ids[:, 0].long()
        counts += torch.bincount(tokens, minlength=VOCABULARY)
        assert output.logprobs_tensors is not None
        said = output.logprobs_tensors.logprobs[:, 0]
        torch.testing.assert_close(said.double(), expected[tokens].log(), rtol=0, atol=2e-5)
    assert counts[expected == 0].sum() == 0
    wanted = expected * rows * rounds
    common = wanted >= 5
    rare = ~common & (expected > 0)
    observed = torch.cat([counts[common], counts[rare].sum().reshape(1)])
    wanted = torch.cat([wanted[common], wanted[rare].sum().reshape(1)])
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    chi_square = ((observed - wanted) ** 2 / wanted).sum().item()
    # Wilson and Hilferty: this cube root is close to a normal draw; five standard deviations.
    deviation = ((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert abs(deviation) < 5


def test_the_second_sampler_gathers_only_where_nothing_else_is_asked_for():
    module = SimpleNamespace(compute_topk_scores=lambda *given, **options: "vLLM's")
    sampled_logprobs._second_without_ranks(module, lambda logits, ids: logits.gather(-1, ids))
    logprobs, ids = torch.arange(6.0).reshape(2, 3), torch.tensor([2, 0])
    tokens, values, ranks, counts = module.compute_topk_scores(logprobs, 0, ids, [1, 1])[:4]
    assert [each.tolist() for each in (tokens, values, ranks)] == [[[2], [0]], [[2.0], [3.0]], [0, 0]]
    assert counts == [1, 1]
    for number, options in ((1, {}), (0, {"logits_mode": True}), (0, {"max_per_req_token_ids": 2})):
        assert module.compute_topk_scores(logprobs, number, ids, [1], **options) == "vLLM's"
