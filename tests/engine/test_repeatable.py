"""On a CPU a completion is the same to the last bit, whatever other requests the engine has."""

import pytest
import torch

from slipstream.inference.plugin.arguments import engine_arguments
from slipstream.records import GenerateRequest, SamplingParams

from .conftest import settings_for, start

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels of a GPU depend on a step's other requests"),
]
SAMPLING = SamplingParams(max_tokens=12, temperature=1.0)


def requests(wave):
    """Four groups of eight, with a beginning in common, on the border of some blocks of the KV cache."""
    common = [10 + place % 7 for place in range(40)]
    prompts = [[*common, *([20 + group] * (20 + 41 * group))] for group in range(4)]
    places = [(group, number) for group in range(4) for number in range(8)]
    return [
        GenerateRequest(f"{wave}-{group}-{n}", prompts[group], SAMPLING, seed=100 * group + n, group_id=str(group))
        for group, n in places
    ]


@pytest.fixture
def of_two_threads(tiny_model, tmp_path):
    """Of one's own: with one thread no context is divided whatever the engine's environment says."""
    with start(tiny_model, tmp_path, threads=2) as live:
        yield live


@pytest.mark.full
def test_a_completion_does_not_depend_on_the_requests_beside_it(of_two_threads):
    live = of_two_threads
    together = live.generate(*requests("together"))
    backward = live.generate(*reversed(requests("backward")))[::-1]
    alone = [live.generate(request)[0] for request in requests("alone")]
    for one, other, third in zip(together, backward, alone, strict=True):
        assert one.token_ids == other.token_ids == third.token_ids
        assert one.logprobs == other.logprobs == third.logprobs


def test_short_prompts_fill_blocks_unless_the_user_says_otherwise(tmp_path):
    """Only whole blocks are shared."""
    assert engine_arguments(settings_for(tmp_path))["block_size"] == 32
    assert engine_arguments(settings_for(tmp_path, options={"block_size": 64}))["block_size"] == 64
