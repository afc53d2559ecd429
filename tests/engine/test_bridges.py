"""The weights' way into a running vLLM: exact, verified, and never half done."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.errors import EngineError, WeightsError
from slipstream.records import SamplingParams, Sequence, Ticket, Version
from slipstream.trainer.learner import score
from slipstream.trainer.model import PolicyModel
from slipstream.trainer.new_model import new_model
from slipstream.weights import check_report, create_bridge

from .conftest import PROMPTS, LiveEngine, perturbed, start, stop

pytestmark = pytest.mark.engine
SAMPLING = SamplingParams(max_tokens=24)


def publish(live: LiveEngine, folder: Path, step: int, seed: int, bridge: str = "disk", dtype=torch.float32):
    """A ticket for new random weights, and the bridge's receiver."""
    weights = {name: w.to(dtype) for name, w in load_file(live.model / "model.safetensors").items()}
    both = create_bridge(bridge, folder=folder, source=live.model, engine=live.engine)
    announced: list[Ticket] = []
    ticket = both.publisher.publish(perturbed(weights, seed).items(), step, 0, announced.append)
    assert announced == [ticket]
    return ticket, both.receiver


def apply(live: LiveEngine, ticket: Ticket, receiver) -> None:
    check_report(live.call(receiver.apply(ticket, 60)), ticket)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_disk_and_restart_answer_bit_for_bit_the_same(tiny_model, tmp_path, dtype):
    live = start(tiny_model, tmp_path, str(dtype).removeprefix("torch."), max_restarts=0)
    try:
        for tag, step in (("first", 1), ("second", 2)):
            ticket, receiver = publish(live, tmp_path / "weights", step, seed=step, dtype=dtype)
            apply(live, ticket, receiver)
            in_place = live.sample(f"disk-{tag}", SAMPLING)
        pid = live.engine.process.process.pid
        restart = create_bridge("restart", folder=tmp_path / "weights", source=tiny_model, engine=live.engine)
        apply(live, ticket, restart.receiver)
        assert live.engine.process.process.pid != pid
        restarted = live.sample("restart", SAMPLING)
        assert [c.token_ids for c in restarted] == [c.token_ids for c in in_place]
        assert [c.logprobs for c in restarted] == [c.logprobs for c in in_place]
        assert all(c.versions[0].version == "0.2" for c in restarted)
    finally:
        stop(live)


@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]
)
def test_one_flipped_bit_is_found_and_named_and_takes_the_engine_out_of_service(live, tmp_path, name):
    ticket, receiver = publish(live, tmp_path, 5, seed=5)
    path = Path(ticket.location) / "model.safetensors"
    weights = load_file(path)
    weights[name].view(torch.int32).view(-1)[17] ^= 1
    save_file(weights, path)
    report = live.call(receiver.apply(ticket, 60))
    assert report.mismatched[0] == name
    with pytest.raises(WeightsError, match=name):
        check_report(report, ticket)
    with pytest.raises(EngineError, match="did not verify"):
        live.sample("refused", SAMPLING)
    health = live.call(live.engine.process.client.health())
    assert health.status == "out_of_service"
    assert name in health.reason
    good, receiver = publish(live, tmp_path / "good", 6, seed=6)
    apply(live, good, receiver)
    assert live.sample("again", SAMPLING)


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


@pytest.mark.slow
def test_the_same_in_bfloat16_with_untied_embeddings(tmp_path):
    model = new_model(tmp_path / "untied", hidden_size=64, num_layers=2, tie_embeddings=False, dtype="bfloat16")
    live = start(model, tmp_path, "bfloat16")
    try:
        ticket, receiver = publish(live, tmp_path / "weights", 1, seed=1, dtype=torch.bfloat16)
        assert "lm_head.weight" in {p.name for p in ticket.parameters}
        apply(live, ticket, receiver)
        policy = PolicyModel.load(ticket.location, "bfloat16")
        for sampling in (SAMPLING, SamplingParams(max_tokens=24, temperature=0.7, top_p=0.9)):
            assert mean_difference(live, policy, sampling) < 0.02
    finally:
        stop(live)


def mean_difference(live: LiveEngine, policy: PolicyModel, sampling: SamplingParams) -> float:
    completions = live.sample(f"probe-{os.urandom(4).hex()}", sampling)
    sequences = [
        Sequence(prompt + c.token_ids, [False] * len(prompt) + [True] * len(c.token_ids))
        for prompt, c in zip(PROMPTS, completions, strict=True)
    ]
    ours = torch.cat(score(policy, sequences, sampling, micro_batch_tokens=1024).logprobs)
    theirs = torch.tensor([value for c in completions for value in c.logprobs])
    return (ours - theirs).abs().mean().item()


def test_published_versions_are_kept_until_nobody_can_need_them(live, tmp_path):
    folder = tmp_path / "weights"
    publisher = create_bridge("disk", folder=folder, source=live.model, engine=live.engine).publisher
    weights = load_file(live.model / "model.safetensors")
    for step in range(4):
        publisher.publish(weights.items(), step, 0, lambda ticket: None)
    assert sorted(path.name for path in folder.iterdir()) == ["0.2", "0.3"]
    assert Version(0, 3).name == "0.3"
