"""The loop under `single_copy`: the weights change only while the engine stands still."""

import asyncio

import pytest
import torch
from safetensors.torch import load_file

from slipstream import records
from slipstream.trainer.learner import score
from slipstream.trainer.model.loading import SharedTensors
from slipstream.trainer.model.policy import PolicyModel
from slipstream.weights.bridges.single_copy import Exporter, open_weights
from slipstream.weights.fingerprint import describe, digest


class Sharing:
    """Gives a scripted engine weights of its own, and notes what is in them at each fence and each apply."""

    def __init__(self, engine, model):
        self.engine = engine
        self.model = model
        self.seen = []
        self.num_waiting = 0
        """Requests that came while it stood still."""
        self.policy = None
        self._apply, self._generate = engine.apply, engine.generate
        self._computes = asyncio.Event()
        engine._logprobs = self.logprobs
        engine.share, engine.fence, engine.apply, engine.generate = self.share, self.fence, self.apply, self.generate

    async def share(self, parameters, timeout_s):
        weights = {name: torch.nn.Parameter(w) for name, w in load_file(self.model / "model.safetensors").items()}
        self.exporter = Exporter(weights.values())
        shared = self.exporter.describe({name: w.data for name, w in weights.items()}, {})
        self.policy = PolicyModel.load(self.model, shared=SharedTensors(open_weights(shared), {}))
        return (shared,)

    def _note(self, what):
        self.seen.append((what, digest(describe(self.policy.named_weights()))))

    async def fence(self, timeout_s):
        self._note("fence")
        self._computes.clear()

    async def apply(self, ticket, timeout_s):
        self._note("apply")
        assert self.seen[-1][1] == ticket.version.digest
        report = await self._apply(ticket, timeout_s)
        self._computes.set()
        return report

    async def generate(self, request):
        self.num_waiting += not self._computes.is_set()
        await self._computes.wait()
        return await self._generate(request)

    def logprobs(self, location, request, tokens):
        given = request.prompt_ids
        sequence = records.Sequence([*given, *tokens], [False] * len(given) + [True] * len(tokens))
        scores = score(self.policy, [sequence], request.sampling, micro_batch_tokens=256)
        return scores.logprobs[0].tolist()


@pytest.mark.parametrize("staleness", ["0", "1"])
def test_they_change_only_between_a_fence_and_the_next_apply(scripted, model, staleness):
    sharing = []
    options = ("--weights.bridge", "single_copy", "--evaluation", "false")
    options += ("--training.updates_per_batch", "2", "--training.staleness", staleness)
    report = scripted.run(*options, change=lambda engine: sharing.append(Sharing(engine, model)))
    assert report.status == "finished", report.message
    seen = sharing[0].seen
    assert [what for what, _ in seen] == ["apply", *["fence", "apply"] * 3]
    digests = [value for _, value in seen]
    for before, at_fence in zip(digests[::2], digests[1::2], strict=False):
        assert at_fence == before, "written before the fence"
    assert len(set(digests)) == 4
    assert (sharing[0].num_waiting > 0) == (staleness == "0"), "the next batch is there when its version comes"


def test_a_base_that_is_shared_needs_no_fence(scripted, model):
    sharing = []
    options = ("--weights.bridge", "single_copy", "--lora.rank", "4", "--training.learning_rate", "1e-2")
    options += ("--weights.probe_stop", "100", "--evaluation", "false")
    report = scripted.run(*options, change=lambda engine: sharing.append(AdapterSharing(engine, model)))
    assert report.status == "finished", report.message
    assert {what for what, _ in sharing[0].seen} == {"apply"}
    assert len({value for _, value in sharing[0].seen}) == 1


class AdapterSharing(Sharing):
    """The ticket is an adapter's; its base must be what both have."""

    async def apply(self, ticket, timeout_s):
        self._note("apply")
        assert self.seen[-1][1] == digest(ticket.base)
        self._computes.set()
        return await self._apply(ticket, timeout_s)
