"""New versions while requests run: nothing lost, every token with the version and log-probability of its maker."""

from __future__ import annotations

import asyncio
import itertools
from concurrent.futures import Future

import pytest
import torch
from safetensors.torch import load_file

from slipstream import records
from slipstream.records import GenerateRequest, SamplingParams, Sequence, Ticket
from slipstream.trainer.learner import score
from slipstream.trainer.model import PolicyModel
from slipstream.weights import check_report, create_bridge

from .conftest import PROMPTS, LiveEngine, perturbed, sparsely, start, stop

pytestmark = pytest.mark.engine
NUM_REQUESTS, LENGTH, MOST_UPDATES = 64, 100, 12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sampling"),
    [("disk", {}), ("broadcast", {"temperature": 0.7, "top_p": 0.9})],
    ids=["disk", "broadcast, processed"],
)
def test_updates_under_long_generations(live: LiveEngine, tmp_path, name, sampling):
    check_updates_under_long_generations(live, tmp_path, name, sampling)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["disk", "broadcast"])
def test_the_same_as_deltas(live: LiveEngine, tmp_path, name):
    check_updates_under_long_generations(live, tmp_path, name, {}, delta=True)


@pytest.mark.slow
def test_the_same_with_the_engine_in_a_process_of_its_own(tiny_model, tmp_path):
    """As on GPUs, with tokens counted by us."""
    live = start(tiny_model, tmp_path, own_process=True)
    try:
        check_updates_under_long_generations(live, tmp_path, "broadcast", {})
    finally:
        stop(live)


def check_updates_under_long_generations(live: LiveEngine, tmp_path, name, sampling, delta=False):
    original = load_file(live.model / "model.safetensors")
    bridge = create_bridge(
        name,
        folder=tmp_path / "weights",
        source=live.model,
        engine=live.engine,
        timeout_s=60,
        held=(lambda: live.call(live.engine.held())) if delta else None,
    )
    params = SamplingParams(max_tokens=LENGTH, **sampling)
    versions: dict[str, dict[str, torch.Tensor]] = {}

    def update(step: int) -> None:
        is_delta = delta and step > 0
        weights = sparsely(versions[f"9.{step - 1}"], step) if is_delta else perturbed(original, step)
        versions[f"9.{step}"] = weights
        under_way = []

        def announce(ticket: Ticket) -> None:
            under_way.append(live.thread.submit(bridge.receiver.apply(ticket, 60)))

        ticket = bridge.publisher.publish(weights.items(), step, 9, announce)
        check_report(under_way[0].result(60), ticket)
        assert (ticket.delta is not None) == is_delta

    update(0)
    running = begin(live, f"{name}-{sampling}", params)
    steps = itertools.count(1)
    while not running.done() and len(versions) <= MOST_UPDATES:
        update(next(steps))
    completions = running.result(60)
    bridge.publisher.close()
    assert len(versions) > 4
    check(live, f"{name}-{sampling}", params, completions, versions)


def begin(live: LiveEngine, tag: str, params: SamplingParams) -> Future[list[records.Completion]]:
    """Many long generations at once, which go on while other things happen."""

    async def generate_all() -> list[records.Completion]:
        requests = [
            GenerateRequest(f"{tag}-{i}", PROMPTS[i % len(PROMPTS)], params, seed=i) for i in range(NUM_REQUESTS)
        ]
        return await asyncio.gather(*(live.engine.generate(request) for request in requests))

    return live.thread.submit(generate_all())


def check(
    live: LiveEngine,
    tag: str,
    params: SamplingParams,
    completions: list[records.Completion],
    versions: dict[str, dict[str, torch.Tensor]],
) -> None:
    """Every request is answered, and every token has the log-probability that its version gives it."""
    assert [c.id for c in completions] == [f"{tag}-{i}" for i in range(NUM_REQUESTS)]
    assert {c.finish_reason for c in completions} <= {"length", "stop"}
    num_spans = 0
    differences = []
    models = {}
    for version, weights in versions.items():
        models[version] = model = PolicyModel.load(live.model)
        model.network.load_state_dict(weights, strict=False)
    sequences = [
        Sequence([*PROMPTS[i % 8], *c.token_ids], [False] * len(PROMPTS[i % 8]) + [True] * len(c.token_ids))
        for i, c in enumerate(completions)
    ]
    scores = {v: score(model, sequences, params, micro_batch_tokens=8192).logprobs for v, model in models.items()}
    for i, completion in enumerate(completions):
        starts = [span.start for span in completion.versions]
        assert starts[0] == 0
        assert starts == sorted(set(starts))
        numbers = [int(span.version.split(".")[1]) for span in completion.versions]
        assert numbers == sorted(set(numbers))
        num_spans += len(numbers)
        for span, end in zip(completion.versions, [*starts[1:], len(completion.token_ids)], strict=True):
            ours = scores[span.version][i][span.start : end]
            theirs = torch.tensor(completion.logprobs[span.start : end])
            differences.append((ours - theirs).abs())
    assert num_spans > 2 * NUM_REQUESTS
    difference = torch.cat(differences)
    print(
        f"{tag}: {len(versions)} versions, {num_spans} spans, {len(difference)} tokens, "
        f"mean {difference.mean():.1e}, largest {difference.max():.1e}"
    )
    assert difference.mean() < 1e-4
    # The cut of the nucleus may fall between two tokens of nearly the same probability.
    assert (difference > 1e-3).float().mean() < 1e-3
