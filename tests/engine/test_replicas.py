"""Two real engines as one: versions for both, one that is killed while it generates or takes a version."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time

import pytest
import torch
from benchmarks.bridges import create_bridge
from benchmarks.weight_sync.process_memory import pids_of
from safetensors.torch import load_file

from slipstream.errors import SlipstreamError
from slipstream.inference.engine import ends_soon
from slipstream.inference.replicas import EngineReplicas
from slipstream.records import GenerateRequest, SamplingParams
from slipstream.trainer.learner import score
from slipstream.trainer.model.policy import PolicyModel
from slipstream.weights import check_report

from ..waiting import ends, until
from .conftest import PROMPTS, LiveEngine, create_replicas, perturbed, sequence_of, stop

pytestmark = pytest.mark.engine
GROUP_TIMEOUT_S = 20.0


class Several(LiveEngine):
    """Two engines that may die as often as a test asks for, and a trainer of versions that follow from their number."""

    engine: EngineReplicas

    def __init__(self, *parts):
        super().__init__(*parts)
        self.original = load_file(self.model / "model.safetensors")
        self.policy = PolicyModel.load(self.model)
        self.step = 0
        self.bridges = {}

    def bridge(self, name):
        if name not in self.bridges:
            how = {"source": self.model, "engine": self.engine, "timeout_s": GROUP_TIMEOUT_S, "num_workers": 2}
            how["joined"] = lambda: self.call(self.engine.joined())
            self.bridges[name] = create_bridge(name, folder=self.model.parent / "replica-weights", **how)
        return self.bridges[name]

    def publish(self, name, on_announced=lambda: None):
        self.step += 1
        under_way = []

        def announce(ticket):
            on_announced()
            under_way.append(self.thread.submit(self.bridge(name).receiver.apply(ticket, 120)))
            return under_way[0].done

        weights = perturbed(self.original, self.step)
        ticket = self.bridge(name).publisher.publish(weights.items(), self.step, 0, announce)
        report = under_way[0].result(180)
        check_report(report, ticket)
        return report

    def ask(self, tag, number=16, length=24):
        sampling = SamplingParams(max_tokens=length)
        requests = [
            GenerateRequest(f"{tag}-{n}", PROMPTS[n % 8], sampling, seed=n, timeout_s=150, group_id=f"{tag}.{n % 8}")
            for n in range(number)
        ]

        async def all_of_them():
            return await asyncio.gather(*map(self.engine.generate, requests))

        return self.thread.submit(all_of_them())

    def run_on(self, place, tag):
        """Long requests, some of which have tokens of the replica at `place`; asked for again where that was seen too
        late."""
        for attempt in range(20):
            asked = self.ask(f"{tag}-{attempt}", number=64, length=200)
            self.until_running(engine=self.replica(place), ended=lambda asked=asked: int(asked.done()))
            short = GenerateRequest(f"{tag}-{attempt}-short", PROMPTS[0], SamplingParams(max_tokens=2))
            self.call(self.replica(place).generate(short))  # those that came before it have tokens when it has
            if not asked.done():
                return asked
            asked.result()
        raise AssertionError(f"replica {place} was not seen running")

    def replica(self, place):
        return self.engine.each[place]

    def check(self, completions):
        """Every token is what the version that it names gives."""
        for completion in completions:
            prompt = PROMPTS[int(completion.id.rpartition("-")[2]) % 8]
            (span,) = completion.versions
            self.policy.network.load_state_dict(perturbed(self.original, int(span.version.split(".")[1])), strict=False)
            (ours,) = score(self.policy, [sequence_of(prompt, completion)], micro_batch_tokens=1024).logprobs
            assert (ours - torch.tensor(completion.logprobs)).abs().max() < 1e-3

    def pid(self, number):
        return pids_of(self.engine)[number]

    def check_both(self, tag):
        """Both answer by the version that came last, each a half."""
        self.engine.take_metrics()
        completions = self.ask(tag).result(60)
        self.check(completions)
        assert {span.version for c in completions for span in c.versions} == {f"0.{self.step}"}
        metrics = self.engine.take_metrics()
        assert [metrics[f"replica_{number}/requests"] for number in range(2)] == [8, 8]

    def kinds(self):
        kinds = [kind for kind, _ in self.events]
        self.events.clear()
        return kinds


@pytest.fixture(scope="module")
def several(tiny_model, tmp_path_factory):
    several = create_replicas(tiny_model, tmp_path_factory.mktemp("replicas"), max_restarts=10, kind=Several)
    several.engine.launch()
    several.call(several.engine.wait_ready(), 320)
    yield several
    for bridge in several.bridges.values():
        bridge.publisher.close()
    stop(several)


def killer_of(pid):
    return subprocess.Popen(["sh", "-c", f"sleep 1; kill -9 {pid}"])


def test_both_prove_a_version_and_share_the_work(several):
    assert several.publish("disk").num_bytes > 0
    several.check_both("shared")


def test_which_one_answers_makes_no_difference(several):
    async def ask_each():
        sampling = SamplingParams(max_tokens=24)
        return [
            await asyncio.gather(
                *(engine.generate(GenerateRequest(f"each-{place}-{n}", PROMPTS[n], sampling, seed=n)) for n in range(8))
            )
            for place, engine in enumerate(several.engine.each)
        ]

    first, second = several.call(ask_each())
    assert [(c.token_ids, c.logprobs) for c in first] == [(c.token_ids, c.logprobs) for c in second]


def test_one_is_killed_while_it_generates(several):
    asked = several.run_on(0, "killed")
    engine = several.replica(0)
    os.kill(several.pid(0), signal.SIGKILL)
    completions = asked.result(200)
    until(lambda: engine.num_restarts or not engine.is_up)
    assert sorted(int(c.id.rpartition("-")[2]) for c in completions) == list(range(64))
    several.check(completions)
    assert several.call(several.engine.joined(), 200) == 1
    assert several.kinds() == ["replica_lost", "engine_restart"]
    several.check_both("back")


@pytest.mark.real_start
@pytest.mark.full
def test_one_is_killed_while_it_takes_a_version(several):
    pid = several.pid(1)
    killer = subprocess.Popen(["sh", "-c", f"sleep 0.02; kill -9 {pid}"])
    several.publish("disk")
    killer.wait()
    assert ends(pid)
    deadline, held = time.monotonic() + 200, None
    while held is None:
        assert time.monotonic() < deadline
        held = several.call(several.engine.held(), 200)
    assert held.name == f"0.{several.step}"
    several.check_both("taken")


@pytest.mark.full
@pytest.mark.real_start
def test_without_files_the_other_goes_on_alone_until_the_next_version(several):
    for _ in range(2):
        several.publish("broadcast")
    several.check(several.ask("sent").result(60))
    several.engine.take_metrics()
    asked = several.run_on(1, "alone")
    os.kill(several.pid(1), signal.SIGKILL)
    several.check(asked.result(200))
    several.check(several.ask("still alone").result(60))
    for _ in range(2):  # the first makes a new group, to which all belong
        several.publish("broadcast")
    several.check_both("again")


@pytest.mark.full
@pytest.mark.real_start
def test_one_is_killed_in_the_middle_of_a_collective(several):
    several.publish("broadcast")
    pid = several.pid(1)
    os.kill(pid, signal.SIGSTOP)
    killers = []
    began = time.monotonic()
    with pytest.raises(SlipstreamError):
        several.publish("broadcast", lambda: killers.append(killer_of(pid)))
    assert time.monotonic() - began < GROUP_TIMEOUT_S + 120
    killers[0].wait()
    assert ends_soon(several.engine), "as the run asks before it repeats an update"
    waiting = several.ask("waits for the version that is published again")
    several.publish("broadcast")
    completions = waiting.result(60)
    several.check(completions)
    assert {span.version for c in completions for span in c.versions} == {f"0.{several.step}"}
