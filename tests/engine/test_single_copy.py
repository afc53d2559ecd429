"""One copy of the weights: the trainer's parameters are the engine's tensors."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from benchmarks.bridges import create_bridge

from slipstream.errors import EngineError, WeightsError
from slipstream.orchestrator.versions import Versions
from slipstream.records import GenerateRequest, SamplingParams, Ticket, Version
from slipstream.trainer.model.loading import SharedTensors
from slipstream.trainer.model.policy import PolicyModel
from slipstream.weights.bridges.single_copy import check_loaded, open_weights
from slipstream.weights.model_files import stored_parameters

from . import test_in_flight
from .conftest import LiveEngine, start

pytestmark = pytest.mark.engine
SAMPLING = SamplingParams(max_tokens=24)


class Pair:
    """An engine, and a policy in its memory."""

    def __init__(self, live: LiveEngine) -> None:
        self.live = live
        self.dtype = live.engine.process.settings.dtype
        (shared,) = live.call(live.engine.share(stored_parameters(live.model, self.dtype), 60))
        self.tensors = open_weights(shared)
        check_loaded(self.tensors, live.model)
        self.policy = PolicyModel.load(live.model, self.dtype, shared=SharedTensors(self.tensors, shared.refused))
        self.goes_on = True
        self.bridge = create_bridge(
            "single_copy", folder=live.model, source=live.model, engine=live.engine, go_on=self.go_on
        )
        self.versions = Versions(self.bridge.receiver, apply_timeout_s=60, fence=self.bridge.fence)

    def go_on(self, version: Version) -> None:
        if self.goes_on:
            self.live.call(self.live.engine.go_on(version, 60))

    @torch.no_grad()
    def write(self, seed: int, pause_s: float = 0.0) -> None:
        """Change every parameter, as an optimizer would; the same twice for the same seed and start."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.policy.network.parameters():
            parameter.add_((0.02 * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype))
            time.sleep(pause_s)

    def copied(self) -> dict[str, torch.Tensor]:
        return {name: weight.clone() for name, weight in self.policy.named_weights()}

    def update(self, step: int) -> Ticket:
        self.live.call(self.versions.fence())
        self.write(step)
        return self.publish(step)

    def publish(self, step: int) -> Ticket:
        under_way = []

        def announce(ticket: Ticket) -> None:
            under_way.append(self.live.thread.submit(self.versions.apply(ticket)))

        ticket = self.bridge.publisher.publish(self.policy.named_weights(), step, 0, announce)
        under_way[0].result(60)
        return ticket


@pytest.fixture(scope="module")
def pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with start(tiny_model, tmp_path_factory.mktemp("shared"), max_restarts=3) as live:
        yield Pair(live)


def test_both_processes_map_the_same_memory_and_a_write_is_read_by_the_engine(pair: Pair):
    """The mapping has one inode in both, and its resident pages are counted once between them."""
    process = pair.live.engine.process.process
    ours, theirs = (_mappings(pid) for pid in ("self", process.pid))
    num_bytes = sum(p.nbytes for p in pair.policy.network.parameters())
    (inode,) = {inode for inode, _, _ in theirs}
    ours = [mapping for mapping in ours if mapping[0] == inode]
    assert ours
    assert sum(size for _, size, _ in ours) >= num_bytes
    proportional = sum(pss for _, _, pss in ours + theirs)
    assert proportional <= sum(size for _, size, _ in ours)
    before = {p.data_ptr() for p in pair.policy.network.parameters()}
    ticket = pair.update(3)
    assert {p.data_ptr() for p in pair.policy.network.parameters()} == before
    assert not pair.live.call(pair.live.engine.verify(ticket, 60)).mismatched
    with torch.no_grad():
        pair.tensors["model.layers.1.self_attn.k_proj.weight"].view(torch.int32).view(-1)[17] ^= 1
    report = pair.live.call(pair.live.engine.verify(ticket, 60))
    names = [name for name in report.mismatched if "packed" not in name]
    assert names == ["model.layers.1.self_attn.k_proj.weight"]
    assert any("qkv_proj (packed copy)" in name for name in report.mismatched)


def _mappings(pid: int | str) -> list[tuple[str, int, int]]:
    """(inode, size, proportional share) of every mapping of shared weights, in bytes."""
    text = Path(f"/proc/{pid}/smaps").read_text()
    found = []
    for block in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text):
        head = block.split("\n", 1)[0]
        if "memfd:slipstream-weights" in head:
            size, pss = (int(re.search(rf"^{key}: +(\d+) kB", block, re.MULTILINE)[1]) << 10 for key in ("Size", "Pss"))
            found.append((head.split()[4], size, pss))
    return found


def test_what_is_written_after_the_version_was_described_is_found_and_named(pair: Pair):
    pair.live.call(pair.versions.fence())
    pair.write(4)
    ticket = pair.bridge.publisher.publish(pair.policy.named_weights(), 4, 0, lambda ticket: None)
    with torch.no_grad():
        pair.tensors["model.norm.weight"].view(torch.int32)[3] ^= 1
    with pytest.raises(WeightsError, match=r"model\.norm\.weight"):
        pair.live.call(pair.versions.apply(ticket))
    with pytest.raises(EngineError, match="did not verify"):
        pair.live.sample("refused", SAMPLING)
    with torch.no_grad():
        pair.tensors["model.norm.weight"].view(torch.int32)[3] ^= 1
    pair.publish(4)
    assert pair.live.sample("again", SAMPLING)


def test_what_runs_with_a_version_that_is_wrong_is_never_answered(pair: Pair):
    """It computes with it before the proof, is held back meanwhile, and given up after."""
    wrong = pair.tensors["model.norm.weight"].view(torch.int32)
    for name, num_tokens in (("ends before the proof", 100), ("runs on", 200)):
        pair.update(5)
        params, load = SamplingParams(max_tokens=num_tokens), []
        for attempt in range(20):  # until the fence has stopped all of them: a busy machine comes too late
            requests = [GenerateRequest(f"{name} {attempt} {n}", [5, 6, 7, n], params, seed=n) for n in range(3)]
            load = [pair.live.thread.submit(pair.live.engine.generate(each)) for each in requests]
            pair.live.until_running(3, ended=lambda load=load: sum(future.done() for future in load))
            pair.live.call(pair.versions.fence())
            # Not by what has come here: an answer may be on its way.
            if pair.live.call(pair.live.engine.process.client.health()).num_running == len(load):
                break
            pair.publish(5)
            assert all(future.result(60).finish_reason in ("length", "stop") for future in load)
        pair.write(6)
        ticket = pair.bridge.publisher.publish(pair.policy.named_weights(), 6, 0, lambda ticket: None)
        time.sleep(1.0)
        assert not any(future.done() for future in load)
        with torch.no_grad():
            wrong[3] ^= 1
        with pytest.raises(WeightsError, match=r"model\.norm\.weight"):
            pair.live.call(pair.versions.apply(ticket))
        with torch.no_grad():
            wrong[3] ^= 1
        pair.publish(6)
        completions = [future.result(60) for future in load]
        assert {c.finish_reason for c in completions} == {"abort"}
        assert all("ran with a version that had no proof" in c.error for c in completions)
        assert pair.live.sample(f"after {name}", SAMPLING)


def test_requests_at_a_fence_enter_vllm_and_get_all_tokens_from_the_next_version(pair: Pair):
    pair.update(7)
    pair.live.call(pair.versions.begin(8))
    params = SamplingParams(max_tokens=20)
    early = [GenerateRequest(f"early {n}", [5, 6, 7, n], params, seed=n) for n in range(40)]
    load = [pair.live.thread.submit(pair.live.engine.generate(each)) for each in early]
    pair.live.until_running(len(early))
    time.sleep(0.3)
    assert not any(future.done() for future in load)
    pair.write(8)
    pair.publish(8)
    completions = [future.result(60) for future in load]
    assert {span.version for each in completions for span in each.versions} == {"0.8"}
    later = [msgspec.structs.replace(each, id=f"later {n}") for n, each in enumerate(early)]
    again = [pair.live.thread.submit(pair.live.engine.generate(each)) for each in later]
    assert [each.token_ids for each in completions] == [future.result(60).token_ids for future in again]


def test_many_updates_leave_equal_fingerprints(pair: Pair):
    for step in range(10, 40):
        ticket = pair.update(step)
    report = pair.live.call(pair.live.engine.verify(ticket, 60))
    assert not report.mismatched
    assert not report.unverified
    assert len(ticket.parameters) == len(pair.tensors)


def test_no_token_is_made_by_a_half_written_version(pair: Pair):
    """The trainer writes one parameter after the other, with pauses, while requests are in flight."""
    params = SamplingParams(max_tokens=200)
    versions = {pair.publish(200).version.name: pair.copied()}
    load = test_in_flight.Load(pair.live, "torn", params)
    for step in range(201, 201 + test_in_flight.NUM_UPDATES):
        pair.live.call(pair.versions.fence())
        pair.write(step, pause_s=0.004)
        versions[f"0.{step}"] = pair.copied()
        pair.publish(step)
    completions = load.end()
    test_in_flight.check(pair.live, "torn", params, completions, versions)
    assert test_in_flight.num_crossings(completions) > test_in_flight.NUM_RUNNING
