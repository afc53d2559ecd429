"""The weights' way into a running vLLM: exact, verified, and never half done."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.bridges import create_bridge
from safetensors.torch import load_file

from slipstream.errors import EngineError
from slipstream.records import GenerateRequest, SamplingParams, Ticket
from slipstream.trainer.model.policy import PolicyModel
from slipstream.weights import check_report

from .conftest import PROMPTS, LiveEngine, mean_difference, perturbed

pytestmark = pytest.mark.engine
SAMPLING = SamplingParams(max_tokens=24)


def publish(live: LiveEngine, folder: Path, step: int, seed: int):
    """A ticket for new random weights, and the bridge's receiver."""
    weights = load_file(live.model / "model.safetensors")
    both = create_bridge("disk", folder=folder, source=live.model, engine=live.engine)
    announced: list[Ticket] = []
    ticket = both.publisher.publish(perturbed(weights, seed).items(), step, 0, announced.append)
    assert announced == [ticket]
    return ticket, both.receiver


def apply(live: LiveEngine, ticket: Ticket, receiver) -> None:
    check_report(live.call(receiver.apply(ticket, 60)), ticket)


def test_an_apply_that_fails_leaves_the_engine_out_of_service(live, tmp_path):
    ticket, receiver = publish(live, tmp_path, 7, seed=7)
    path = Path(ticket.location) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(EngineError, match="500"):
        live.call(receiver.apply(ticket, 60))
    with pytest.raises(EngineError, match="503"):
        live.sample("refused", SAMPLING)
    apply(live, *publish(live, tmp_path / "good", 8, seed=8))


def test_a_prompt_cached_under_old_weights_is_computed_again(live, tmp_path):
    prompt = [PROMPTS[7] * 4]
    greedy = SamplingParams(max_tokens=16, temperature=0.0)
    apply(live, *publish(live, tmp_path / "one", 11, seed=11))
    before = live.sample("cached", greedy, prompt)
    apply(live, *publish(live, tmp_path / "two", 12, seed=12))
    after = live.sample("fresh", greedy, prompt)
    apply(live, *publish(live, tmp_path / "three", 13, seed=11))
    again = live.sample("again", greedy, prompt)
    assert before[0].logprobs != after[0].logprobs
    assert before[0].logprobs == again[0].logprobs


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=24),
        SamplingParams(max_tokens=24, temperature=0.7, top_p=0.9),
        SamplingParams(max_tokens=24, temperature=1.3, top_k=12, min_p=0.02),
    ],
)
def test_the_trainer_gives_the_sampled_tokens_the_same_logprobs(live, tmp_path, sampling):
    ticket, receiver = publish(live, tmp_path, 20, seed=20)
    apply(live, ticket, receiver)
    assert mean_difference(live, PolicyModel.load(ticket.location), sampling) < 0.001


@pytest.mark.parametrize("step", [71, 72])
def test_an_engine_that_has_left_its_group_goes_on_and_joins_the_next_one(live, tmp_path, step):
    """In the order of a run's end: the engine first, then the trainer, and nobody waits for the other."""
    left = []

    def leave() -> None:
        left.append(live.call(live.engine.leave(20), 30))

    both = create_bridge("broadcast", folder=tmp_path, source=live.model, engine=live.engine, timeout_s=60, leave=leave)
    try:
        live.update(both, perturbed(load_file(live.model / "model.safetensors"), step).items(), step)
    finally:
        both.publisher.close()
    assert left == [None]
    (answer,) = live.generate(GenerateRequest(f"left-{step}", PROMPTS[0], SamplingParams(max_tokens=4), seed=1))
    assert [span.version for span in answer.versions] == [f"0.{step}"]
    live.call(live.engine.leave(20))  # in no group
