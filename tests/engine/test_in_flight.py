"""New versions while requests run: nothing lost, every token with the version and log-probability of its maker."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time

import psutil
import pytest
import torch
from benchmarks.bridges import create_bridge
from safetensors.torch import load_file

from slipstream import records
from slipstream.records import GenerateRequest, SamplingParams
from slipstream.trainer.learner import score
from slipstream.trainer.model.policy import PolicyModel
from slipstream.weights import check_report

from .conftest import PROMPTS, LiveEngine, perturbed, sequence_of, sparsely, start

pytestmark = pytest.mark.engine
# So many requests run at once, one after another, until so many versions came: whatever the machine's speed.
NUM_RUNNING, LENGTH, NUM_UPDATES = 64, 100, 6


@pytest.mark.parametrize(
    ("name", "sampling", "delta"),
    [
        ("disk", {}, False),
        pytest.param("broadcast", {"temperature": 0.7, "top_p": 0.9}, False, marks=pytest.mark.full),
        pytest.param("disk", {}, True, marks=pytest.mark.full),
        pytest.param("broadcast", {}, True, marks=pytest.mark.full),
    ],
    ids=["disk", "broadcast, processed", "disk, deltas", "broadcast, deltas"],
)
def test_updates_under_long_generations(live: LiveEngine, tmp_path, name, sampling, delta):
    completions = check_updates_under_long_generations(live, tmp_path, name, sampling, delta=delta)
    assert num_crossings(completions) > NUM_RUNNING


@pytest.mark.full
def test_the_same_with_the_engine_in_a_process_of_its_own(tiny_model, tmp_path):
    """As on GPUs, with tokens counted by us."""
    with start(tiny_model, tmp_path, own_process=True) as live:
        assert num_crossings(check_updates_under_long_generations(live, tmp_path, "broadcast", {})) > NUM_RUNNING


@pytest.mark.full
@pytest.mark.parametrize("own_process", [False, True])
def test_kept_context_is_the_requests_own(tiny_model, tmp_path, own_process):
    """Under `keep` tokens after an update are off by what their context is old; requests that begin later are not."""
    with start(tiny_model, tmp_path, in_flight="keep", own_process=own_process) as live:
        check_that_no_block_is_older_than_its_request(live, tmp_path)
        completions = check_updates_under_long_generations(live, tmp_path, "disk", {}, keeps_context=True)
        assert num_crossings(completions) > NUM_RUNNING
        if own_process:  # which is the engine that costs most to start, and the only one that is one of several
            check_that_it_ends_when_its_core_is_killed(live)


def check_that_it_ends_when_its_core_is_killed(live: LiveEngine):
    process = live.engine.process.process
    children = psutil.Process(process.pid).children()
    (core,) = (each for each in children if "resource_tracker" not in " ".join(each.cmdline()))
    core.kill()
    assert process.wait(60), "nobody has asked it anything, and it has failed"


def check_that_no_block_is_older_than_its_request(live: LiveEngine, tmp_path):
    """The same long prompt under two versions, each twice: the second time vLLM has blocks of it in its cache."""
    original = load_file(live.model / "model.safetensors")
    bridge = create_bridge("disk", folder=tmp_path / "long", source=live.model, engine=live.engine)
    prompt = [(5 * i) % 90 + 1 for i in range(150)]
    policy = PolicyModel.load(live.model)
    for step in (1, 2):
        weights = perturbed(original, 50 + step)
        live.update(bridge, weights.items(), step, 7)
        policy.network.load_state_dict(weights, strict=False)
        for again in range(2):
            (completion,) = live.sample(f"long-{step}-{again}", SamplingParams(max_tokens=16), [prompt])
            (ours,) = score(policy, [sequence_of(prompt, completion)], micro_batch_tokens=1024).logprobs
            assert (ours - torch.tensor(completion.logprobs)).abs().max() < 1e-3


@pytest.mark.full
def test_a_drained_engine_updates_between_requests(tiny_model, tmp_path):
    with start(tiny_model, tmp_path, in_flight="drain") as live:
        completions = check_updates_under_long_generations(live, tmp_path, "disk", {})
    assert {len(c.versions) for c in completions} == {1}
    assert len({c.versions[0].version for c in completions}) > 2


def check_updates_under_long_generations(live: LiveEngine, tmp_path, name, sampling, delta=False, keeps_context=False):
    original = load_file(live.model / "model.safetensors")
    held = (lambda: live.call(live.engine.held())) if delta else None
    how = {"source": live.model, "engine": live.engine, "timeout_s": 60, "held": held}
    bridge = create_bridge(name, folder=tmp_path / "weights", **how)
    params = SamplingParams(max_tokens=LENGTH, **sampling)
    versions: dict[str, dict[str, torch.Tensor]] = {}
    stalls: list[float] = []

    def update(step: int) -> None:
        is_delta = delta and step > 0
        weights = sparsely(versions[f"9.{step - 1}"], step) if is_delta else perturbed(original, step)
        versions[f"9.{step}"] = weights
        ticket, report = live.bring(bridge, weights.items(), step, 9)
        check_report(report, ticket)
        assert (ticket.delta is not None) == is_delta
        stalls.append(report.stall_s)

    update(0)
    load = Load(live, f"{name}-{sampling}", params)
    for step in range(1, NUM_UPDATES + 1):
        live.until_running()
        update(step)
        if step == NUM_UPDATES // 2:
            load.wait_for(NUM_RUNNING)  # then some begin under a later version
    completions = load.end()
    bridge.publisher.close()
    assert stalls[0] == 0.0, "nothing was running yet"
    # The first may come before any token, and under `drain` any may come between two requests.
    assert sum(stall > 0.0 for stall in stalls) >= NUM_UPDATES // 2
    check(live, f"{name}-{sampling}", params, completions, versions, keeps_context=keeps_context)
    return completions


def num_crossings(completions: list[records.Completion]) -> int:
    """How often a version came between two tokens of a completion."""
    return sum(len(completion.versions) - 1 for completion in completions)


class Load:
    """Long generations, `NUM_RUNNING` at once and each followed by another until it is enough."""

    def __init__(self, live: LiveEngine, tag: str, params: SamplingParams):
        self._live, self._tag, self._params = live, tag, params
        self._enough = threading.Event()
        self._completions: dict[int, records.Completion] = {}
        self._numbers = itertools.count()
        self._done = live.thread.submit(self._generate_all())

    async def _generate_all(self) -> None:
        await asyncio.gather(*(self._one_after_another() for _ in range(NUM_RUNNING)))

    async def _one_after_another(self) -> None:
        while not self._enough.is_set():
            i = next(self._numbers)
            request = GenerateRequest(f"{self._tag}-{i}", PROMPTS[i % len(PROMPTS)], self._params, seed=i)
            self._completions[i] = await self._live.engine.generate(request)

    def wait_for(self, num_completions: int) -> None:
        """Until so many are complete, while others go on."""
        deadline = time.monotonic() + 120
        while len(self._completions) < num_completions:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def end(self) -> list[records.Completion]:
        """All of them, once the last has ended."""
        self._enough.set()
        self._done.result(120)
        return [self._completions[i] for i in range(len(self._completions))]


def check(live: LiveEngine, tag: str, params: SamplingParams, completions, versions, *, keeps_context: bool = False):
    """Every request is answered, and every token has the log-probability that its version gives it; of kept contexts
    only those of the version that the request began with."""
    assert [c.id for c in completions] == [f"{tag}-{i}" for i in range(len(completions))]
    assert {c.finish_reason for c in completions} <= {"length", "stop"}
    differences, gaps = [], []
    models = {}
    for version, weights in versions.items():
        models[version] = model = PolicyModel.load(live.model)
        model.network.load_state_dict(weights, strict=False)
    sequences = [sequence_of(PROMPTS[i % 8], c) for i, c in enumerate(completions)]
    scores = {v: score(model, sequences, params, micro_batch_tokens=8192).logprobs for v, model in models.items()}
    for i, completion in enumerate(completions):
        starts = [span.start for span in completion.versions]
        assert starts[0] == 0
        assert starts == sorted(set(starts))
        numbers = [int(span.version.split(".")[1]) for span in completion.versions]
        assert numbers == sorted(set(numbers))
        for span, end in zip(completion.versions, [*starts[1:], len(completion.token_ids)], strict=True):
            ours = scores[span.version][i][span.start : end]
            theirs = torch.tensor(completion.logprobs[span.start : end])
            (gaps if keeps_context and span.start else differences).append((ours - theirs).abs())
    difference = torch.cat(differences)
    print(
        f"{tag}: {len(versions)} versions, {num_crossings(completions)} crossings, {len(difference)} tokens, "
        f"mean {difference.mean():.1e}, largest {difference.max():.1e}"
    )
    assert difference.mean() < 1e-4
    # The cut of the nucleus may fall between two tokens of nearly the same probability.
    assert (difference > 1e-3).float().mean() < 1e-3
    if keeps_context:
        gap = torch.cat(gaps)
        print(f"on kept contexts: {len(gap)} tokens, mean {gap.mean():.1e}, largest {gap.max():.1e}")
        assert gap.mean() > 1e-3
