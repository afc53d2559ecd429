"""The weights' way into a running vLLM: exact, verified, and never half done."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from slipstream.errors import EngineError
from slipstream.records import GenerateRequest, SamplingParams, Ticket, Version
from slipstream.trainer.model.policy import PolicyModel
from slipstream.weights import check_report, create_bridge

from .conftest import PROMPTS, LiveEngine, mean_difference, perturbed, start, stop

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


@pytest.mark.full
def test_restart_leaves_a_running_engine_as_disk_does(tiny_model, tmp_path):
    live = start(tiny_model, tmp_path, max_restarts=0)
    try:
        apply(live, *publish(live, tmp_path / "weights", 1, seed=1))
        ticket, receiver = publish(live, tmp_path / "weights", 2, seed=2)
        apply(live, ticket, receiver)
        in_place = live.sample("disk", SAMPLING)
        pid = live.engine.process.process.pid
        restart = create_bridge("restart", folder=tmp_path / "weights", source=tiny_model, engine=live.engine)
        apply(live, ticket, restart.receiver)
        assert live.engine.process.process.pid != pid
        restarted = live.sample("restart", SAMPLING)
        assert [(c.token_ids, c.logprobs) for c in restarted] == [(c.token_ids, c.logprobs) for c in in_place]
        assert all(c.versions[0].version == "0.2" for c in restarted)
    finally:
        stop(live)


def test_an_apply_that_fails_leaves_the_engine_out_of_service(live, tmp_path):
    ticket, receiver = publish(live, tmp_path, 7, seed=7)
    path = Path(ticket.location) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(EngineError, match="500"):
        live.call(receiver.apply(ticket, 60))
    with pytest.raises(EngineError, match="503"):
        live.sample("refused", SAMPLING)
    apply(live, *publish(live, tmp_path / "good", 8, seed=8))


def test_verify_on_demand_finds_that_the_engine_holds_something_else(live, tmp_path):
    ticket, receiver = publish(live, tmp_path / "one", 9, seed=9)
    apply(live, ticket, receiver)
    assert not live.call(live.engine.verify(ticket, 60)).mismatched
    other, _ = publish(live, tmp_path / "two", 10, seed=10)
    assert len(live.call(live.engine.verify(other, 60)).mismatched) == len(other.parameters)


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


def test_published_versions_are_kept_until_nobody_can_need_them(live, tmp_path):
    folder = tmp_path / "weights"
    publisher = create_bridge("disk", folder=folder, source=live.model, engine=live.engine).publisher
    weights = load_file(live.model / "model.safetensors")
    for step in range(4):
        publisher.publish(weights.items(), step, 0, lambda ticket: None)
    assert sorted(path.name for path in folder.iterdir()) == ["0.2", "0.3"]
    assert Version(0, 3).name == "0.3"


@pytest.mark.parametrize("step", [71, 72])
def test_an_engine_that_has_left_its_group_goes_on_and_joins_the_next_one(live, tmp_path, step):
    """In the order of a run's end: the engine first, then the trainer, and nobody waits for the other."""
    left, under_way = [], []

    def leave() -> None:
        left.append(live.call(live.engine.leave(20), 30))

    both = create_bridge("broadcast", folder=tmp_path, source=live.model, engine=live.engine, timeout_s=60, leave=leave)
    try:
        weights = perturbed(load_file(live.model / "model.safetensors"), step)
        ticket = both.publisher.publish(
            weights.items(), step, 0, lambda it: under_way.append(live.thread.submit(both.receiver.apply(it, 60)))
        )
        check_report(under_way[0].result(60), ticket)
    finally:
        both.publisher.close()
    assert left == [None]
    (answer,) = live.generate(GenerateRequest(f"left-{step}", PROMPTS[0], SamplingParams(max_tokens=4), seed=1))
    assert [span.version for span in answer.versions] == [f"0.{step}"]
    live.call(live.engine.leave(20))  # in no group
