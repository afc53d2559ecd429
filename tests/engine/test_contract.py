"""What every bridge owes on every architecture: after a version is applied, the engine answers bit for bit as one that
was started on it.

A row of `BRIDGES` or `ADAPTER_BRIDGES` is a bridge, one of `ARCHITECTURES` a model. For each model there is one engine
that all bridges update in turn, and one that was started on the last version; the same again for adapters.
"""

from __future__ import annotations

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from benchmarks.bridges import Bridge, create_adapter_bridge, create_bridge
from safetensors.torch import load_file, save_file

from slipstream.commands.export import export
from slipstream.errors import EngineError, WeightsError
from slipstream.records import ApplyReport, GenerateRequest, SamplingParams, Ticket
from slipstream.trainer.model.loading import SharedTensors, load_network
from slipstream.trainer.model.policy import PolicyModel
from slipstream.weights import check_report
from slipstream.weights.adapter_folder import AdapterConfig, write_adapter_folder
from slipstream.weights.bridges.single_copy import SharedWeights, check_loaded, open_weights
from slipstream.weights.fingerprint import describe, digest
from slipstream.weights.model_files import read_model_folder, stored_parameters

from .architectures import ARCHITECTURES, DIVIDED, GRID, Architecture, image_prompt, pixels
from .conftest import PROMPTS, LiveEngine, create, mean_difference, perturbed, sparsely, stop
from .workers import TOWER_VARIABLE

pytestmark = pytest.mark.engine
BRIDGES = {
    "disk": ("disk", False),
    "broadcast": ("broadcast", False),
    "deltas over disk": ("disk", True),
    "deltas over broadcast": ("broadcast", True),
    "single_copy": ("single_copy", False),
}
"""Bridge, and whether it sends deltas. `single_copy` is last: from then on the engine's memory is shared."""
ADAPTER_BRIDGES = ("lora", "lora beside single_copy")
SAMPLING = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
FIRST, BETWEEN, LAST = 1, 2, 3
"""Versions. With an image tower, `BETWEEN` is `LAST` but for the tower, which is that of `FIRST`."""
RANK, ALPHA = 4, 6.8
ONE_BY_ONE = [[prompt] for prompt in PROMPTS]
AT_ONCE = ONE_BY_ONE if torch.cuda.is_available() else [PROMPTS]
"""On a GPU, and beside adapters anywhere, the last bits of an answer depend on what else the same steps compute."""
START_S = 400
TOLERANCE = {"float32": 0.001, "bfloat16": 0.03}
"""Of the mean difference to the trainer; in bfloat16 an adapter of this size on the tied model is off by 0.020 on a CPU
and by 0.022 on an H200."""


class Case(ABC):
    """One architecture: a trainer's network, a running engine, and its oracle, which was started on `LAST`."""

    def __init__(self, architecture: Architecture, folder: Path) -> None:
        self.architecture, self.folder, self.dtype = architecture, folder, architecture.dtype
        self.model = architecture.build(folder / "model", self.dtype)
        self.policy = self.load(self.model)
        state = dict(self.policy.network.named_parameters())
        self.states = {FIRST: perturbed(state, seed=1)}
        # Few elements change, as in training, so that a delta is worth sending.
        self.states[LAST] = sparsely(self.states[FIRST], seed=2)
        tower = {name: weight for name, weight in self.states[FIRST].items() if ".visual." in name}
        self.states[BETWEEN] = self.states[LAST] | tower
        self.steps = (FIRST, BETWEEN, LAST) if tower else (FIRST, LAST)
        assert bool(tower) == architecture.has_images
        self.bridges: dict[str, tuple[PolicyModel, Bridge]] = {}
        self.engines: list[LiveEngine] = []
        self.shared: dict[str, torch.Tensor] = {}

    at_once = AT_ONCE
    live: LiveEngine
    oracle: LiveEngine
    ticket: Ticket

    @abstractmethod
    def start(self) -> None:
        """Launch both engines, so that they start side by side."""

    def load(self, model: Path, shared: SharedTensors | None = None) -> PolicyModel:
        return PolicyModel(load_network(model, self.dtype, shared=shared), model, packing=False)

    def share(self, live: LiveEngine, held: Path) -> PolicyModel:
        """A policy in the memory of `live`, which has the weights in `held` now."""
        (shared,) = live.call(live.engine.share(stored_parameters(self.model, self.dtype), 60))
        self.shared = open_weights(shared)
        check_loaded(self.shared, held)
        policy = self.load(self.model, SharedTensors(self.shared, shared.refused))
        assert _storages(policy.network.parameters()) <= _storages(self.shared.values())
        return policy

    def launch(self, name: str, model: Path | None = None, **changes) -> LiveEngine:
        folder, architecture = self.folder / name, self.architecture
        live = create(
            model or self.model,
            folder,
            self.dtype,
            max_restarts=0,
            start_timeout_s=START_S,
            options={"worker_extension_cls": architecture.worker, "tensor_parallel_size": architecture.num_workers},
            **changes,
        )
        self.engines.append(live)
        path = [*self.architecture.path(), *filter(None, [os.environ.get("PYTHONPATH")])]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join(path))
            if self.architecture.num_workers > 1:
                # With one NUMA node vLLM finds no cores for a second worker.
                patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            patch.setenv(TOWER_VARIABLE, str(self.tower(live)))
            live.engine.launch()
        return live

    def tower(self, live: LiveEngine) -> Path:
        return live.engine.process.log_path.parent / "tower.safetensors"

    def wait(self) -> None:
        for live in self.engines:
            live.call(live.engine.wait_ready(), START_S + 10)

    def publish(self, policy: PolicyModel, bridge: Bridge, step: int) -> tuple[Ticket, ApplyReport]:
        """Write the version into the trainer's weights as an optimizer would, and bring it to the engine."""
        if bridge.fence is not None:
            self.live.call(bridge.fence(60))
        self.write(policy, step)
        return self.live.bring(bridge, self.weights(policy), step)

    def answers(self, live: LiveEngine, tag: str, step: int = LAST):
        """Tokens and their log-probabilities, sampled and greedy; those of an image come last."""
        completions = [
            completion
            for sampling in (SAMPLING, GREEDY)
            for number, prompts in enumerate(self.at_once)
            for completion in live.sample(f"{tag} {sampling.temperature} {number}", sampling, prompts)
        ]
        if self.architecture.has_images:
            tokens, image = image_prompt(self.model)
            for sampling in (SAMPLING, GREEDY):
                request = GenerateRequest(f"{tag} image {sampling}", tokens, sampling, seed=0, images=(image,))
                completions += live.generate(request)
        assert [c.error for c in completions] == [""] * len(completions)
        assert {span.version for c in completions for span in c.versions} == {f"0.{step}"}
        return [(c.token_ids, c.logprobs) for c in completions]

    @torch.no_grad()
    def check(self, name: str, policy: PolicyModel, bridge: Bridge) -> None:
        """Bring versions, and compare the last with the oracle."""
        for step in self.steps:
            ticket, report = self.publish(policy, bridge, step)
            check_report(report, ticket)
            if step == BETWEEN:
                before = self.answers(self.live, f"{name} between", step)
        assert (ticket.delta is not None) == name.startswith("deltas")
        assert (ticket.version.digest, ticket.parameters) == (self.ticket.version.digest, self.ticket.parameters)
        assert self.answers(self.live, name) == self.oracle_answers
        if BETWEEN in self.steps:
            # Only the tower has changed since then: vLLM may not have kept what the old one made of the image.
            assert before[:-2] == self.oracle_answers[:-2]
            assert all(one != other for one, other in zip(before[-2:], self.oracle_answers[-2:], strict=True))
        if self.architecture.has_images:
            ours, theirs = (load_file(self.tower(live))["features"] for live in (self.live, self.oracle))
            assert torch.equal(ours, theirs)
            seen = policy.network.get_image_features(pixels(), torch.tensor([GRID]))
            parts = [
                torch.cat(part) if isinstance(part, tuple) else part
                for part in (seen.pooler_output, *seen.deepstack_features)
            ]
            assert (ours - torch.cat(parts, dim=-1)).abs().max() < 1e-4 * ours.std()
        assert mean_difference(self.live, policy, SAMPLING) < TOLERANCE[self.dtype]

    def ask_the_oracle(self) -> None:
        """Once: it ends with its answers."""
        self.oracle_answers = self.answers(self.oracle, "oracle")
        self.engines.remove(self.oracle)
        stop(self.oracle)

    def stop(self) -> None:
        for live in self.engines:
            live.engine.kill()
            stop(live)


class WholeCase(Case):
    """All of the weights change."""

    def start(self) -> None:
        self.live = self.launch("live")
        restart = create_bridge("restart", folder=self.folder / "oracle", source=self.model, engine=self.live.engine)
        self.write(self.policy, LAST)
        self.ticket = restart.publisher.publish(self.weights(self.policy), LAST, 0, lambda ticket: None)
        self.oracle = self.launch(
            "started", Path(self.ticket.location), version=self.ticket.version, parameters=self.ticket.parameters
        )
        self.held = self.model
        self.wait()
        self.ask_the_oracle()

    def weights(self, policy: PolicyModel):
        return policy.named_weights()

    @torch.no_grad()
    def write(self, policy: PolicyModel, step: int) -> None:
        for name, parameter in policy.network.named_parameters():
            parameter.copy_(self.states[step][name])

    def attach(self, name: str) -> tuple[PolicyModel, Bridge]:
        if name not in self.bridges:
            kind, deltas = BRIDGES[name]
            policy = self.share(self.live, self.held) if kind == "single_copy" else self.policy
            bridge = create_bridge(
                kind,
                folder=self.folder / name,
                source=self.model,
                engine=self.live.engine,
                timeout_s=60,
                num_workers=self.architecture.num_workers,
                held=(lambda: self.live.call(self.live.engine.held())) if deltas else None,
                go_on=lambda version: self.live.call(self.live.engine.go_on(version, 60)),
            )
            self.bridges[name] = policy, bridge
        return self.bridges[name]


class AdapterCase(Case):
    """Only an adapter changes."""

    at_once = ONE_BY_ONE

    def start(self) -> None:
        self.steps = (FIRST, LAST)
        self.adapter = self.with_adapter(self.policy)
        room = {"lora_rank": RANK, "lora_target_modules": self.adapter.target_modules}
        self.live = self.launch("live", **room)
        self.write(self.policy, LAST)
        bridge = self.bridge("oracle", self.policy)
        self.ticket = bridge.publisher.publish(self.weights(self.policy), LAST, 0, lambda ticket: None)
        self.oracle = self.launch("started", adapter=self.ticket, **room)
        self.wait()
        self.oracle_answers = self.answers(self.oracle, "oracle")

    def with_adapter(self, policy: PolicyModel) -> AdapterConfig:
        config = AdapterConfig(RANK, ALPHA, self.architecture.lora_targets, str(self.model))
        return policy.add_adapter(config).config

    def weights(self, policy: PolicyModel):
        return policy.adapter.named_weights()

    @torch.no_grad()
    def write(self, policy: PolicyModel, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for _, tensor in policy.adapter.named_weights():
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))

    def bridge(self, name: str, policy: PolicyModel) -> Bridge:
        return create_adapter_bridge(
            folder=self.folder / name,
            engine=self.live.engine,
            adapter=self.adapter,
            base_weights=policy.base_weights(),
        )

    def attach(self, name: str) -> tuple[PolicyModel, Bridge]:
        if name not in self.bridges:
            policy = self.policy
            if name == "lora beside single_copy":
                policy = self.share(self.live, self.model)
                self.with_adapter(policy)
            self.bridges[name] = policy, self.bridge(name, policy)
        return self.bridges[name]


def _storages(tensors) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _started(kind: type[Case], architecture: Architecture, folder: Path) -> Iterator[Case]:
    if missing := architecture.missing():
        pytest.skip(missing)
    case = kind(architecture, folder)
    try:
        case.start()
        yield case
    finally:
        case.stop()


@pytest.fixture(scope="module", params=ARCHITECTURES)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeCase]:
    yield from _started(WholeCase, ARCHITECTURES[request.param], tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterCase]:
    architecture = ARCHITECTURES[request.param]
    if torch.cuda.is_available():  # vLLM's LoRA kernels of GPUs have no other
        architecture = dataclasses.replace(architecture, dtype="bfloat16")
    yield from _started(AdapterCase, architecture, tmp_path_factory.mktemp("adapted"))


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeCase]:
    yield from _started(WholeCase, DIVIDED, tmp_path_factory.mktemp("divided"))


# In every architecture weights lie otherwise; that each bridge brings all of them, one shows.
@pytest.mark.quick("untied-*")
@pytest.mark.parametrize("name", BRIDGES)
def test_the_engine_answers_as_one_started_on_the_version(whole: WholeCase, name: str):
    whole.check(name, *whole.attach(name))
    whole.held = Path(whole.ticket.location)


@pytest.mark.full
@pytest.mark.parametrize("name", ADAPTER_BRIDGES)
def test_the_engine_answers_as_one_started_with_the_adapter(adapted: AdapterCase, name: str):
    adapted.check(name, *adapted.attach(name))


@pytest.mark.quick("untied-*")
@pytest.mark.parametrize("name", ["disk", "broadcast"])
@torch.no_grad()
def test_an_adapter_that_is_published_merged_is_the_model_that_an_export_makes_of_it(
    whole: WholeCase, name: str, tmp_path: Path
):
    """That the engine then answers as one that was started on these weights is what every bridge owes."""
    policy, engine = whole.load(whole.model), whole.live.engine
    # A bridge of its own: an engine has one group for broadcasts, the last.
    bridge = create_bridge(name, folder=tmp_path / name, source=whole.model, engine=engine, timeout_s=60)
    adapter = policy.add_adapter(AdapterConfig(RANK, ALPHA, whole.architecture.lora_targets, str(whole.model)))
    generator = torch.Generator().manual_seed(5)
    for _, tensor in adapter.named_weights():
        tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    write_adapter_folder(tmp_path / "adapter", adapter.named_weights(), adapter.config)
    exported = export(tmp_path / "adapter", tmp_path / "merged", merged=True)
    ticket = whole.live.update(bridge, policy.named_weights(), LAST)
    assert ticket.version.digest == digest(describe(read_model_folder(exported)))
    assert mean_difference(whole.live, policy, SAMPLING) < TOLERANCE[whole.dtype]


@pytest.mark.quick("untied")
def test_one_flipped_bit_is_found_and_named_and_takes_the_engine_out_of_service(whole: WholeCase):
    check_flipped_bits(whole)


def check_flipped_bits(whole: WholeCase) -> None:
    policy, bridge = whole.attach("disk")
    whole.write(policy, FIRST)
    ticket = bridge.publisher.publish(whole.weights(policy), FIRST, 0, lambda ticket: None)
    path = Path(ticket.location) / "model.safetensors"
    for name in whole.architecture.flipped:
        weights = load_file(path)
        bits = weights[name].view(_bits(weights[name])).view(-1)
        bits[17] ^= 1
        save_file(weights, path)
        report = whole.live.call(bridge.receiver.apply(ticket, 60))
        assert report.mismatched == (name,)
        with pytest.raises(WeightsError, match=name):
            check_report(report, ticket)
        with pytest.raises(EngineError, match="did not verify"):
            whole.live.sample("refused", SAMPLING)
        health = whole.live.call(whole.live.engine.process.client.health())
        assert health.status == "out_of_service"
        assert name in health.reason
        bits[17] ^= 1
        save_file(weights, path)
    check_report(whole.live.call(bridge.receiver.apply(ticket, 60)), ticket)
    assert whole.live.sample("again", SAMPLING)


@pytest.mark.quick("untied")
def test_one_flipped_bit_in_shared_memory_is_found_and_named(whole: WholeCase):
    policy, bridge = whole.attach("single_copy")
    ticket, report = whole.publish(policy, bridge, FIRST)
    check_report(report, ticket)
    for name in whole.architecture.flipped:
        bits = whole.shared[name].view(_bits(whole.shared[name]))
        bits[(0,) * bits.ndim] ^= 1
        found = whole.live.call(whole.live.engine.verify(ticket, 60)).mismatched
        assert [other for other in found if "packed" not in other] == [name]
        # vLLM's kernels of a CPU still have what they packed before.
        assert any("packed" in other for other in found) == (is_packed(whole.shared[name]) or ".experts." in name)
        bits[(0,) * bits.ndim] ^= 1
    check_report(whole.live.call(whole.live.engine.verify(ticket, 60)), ticket)


def is_packed(weight: torch.Tensor) -> bool:
    """Whether oneDNN, which vLLM multiplies with, reads a packed copy of a weight: without AVX-512 it has no bfloat16
    products, and vLLM reads the weight itself. Experts are packed by vLLM, on every CPU."""
    if weight.ndim < 2 or not weight.is_cpu:
        return False
    from vllm import _custom_ops as ops

    try:
        ops.create_onednn_mm(torch.ones_like(weight).reshape(-1, weight.shape[-1]).t(), 32)
    except RuntimeError:
        return False
    return True


@pytest.mark.full
def test_the_same_with_the_weights_divided_over_two_workers(divided: WholeCase):
    for name in [name for name in BRIDGES if name != "single_copy"]:
        divided.check(name, *divided.attach(name))
    check_flipped_bits(divided)
    workers = divided.live.call(divided.live.engine.share(stored_parameters(divided.model, divided.dtype), 60))
    check_parts(dict(divided.weights(divided.policy)), workers)


def check_parts(state: dict[str, torch.Tensor], workers: tuple[SharedWeights, ...]) -> None:
    """What each worker has of every parameter is as it says, and together they have all of it."""
    opened = [open_weights(worker) for worker in workers]
    assert len(opened) == 2
    assert opened[0].keys() == opened[1].keys()
    assert opened[0].keys() | workers[0].refused.keys() == state.keys()
    for name in opened[0]:
        seen = torch.zeros_like(state[name], dtype=torch.bool)
        for worker, tensors in zip(workers, opened, strict=True):
            place, part = worker.tensors[name], tensors[name]
            assert torch.equal(part, state[name].narrow(place.dim, place.start, part.shape[place.dim])), name
            seen.narrow(place.dim, place.start, part.shape[place.dim]).fill_(True)
        assert seen.all(), name


@pytest.mark.full
@pytest.mark.parametrize("whole", ["vision"], indirect=True)
@pytest.mark.parametrize("in_flight", ["recompute", "keep"])
def test_prompts_with_an_image_that_run_when_versions_come(whole: WholeCase, in_flight: str):
    live = whole.live
    if in_flight == "keep":
        # With the engine in a process of its own, as on GPUs.
        live = whole.launch("kept", in_flight="keep", own_process=True)
        whole.wait()
    tokens, image = image_prompt(whole.model)
    bridge = create_bridge("disk", folder=whole.folder / in_flight, source=whole.model, engine=live.engine)
    with live.under_load(in_flight, [tokens] * 8, (image,)):
        for step in (FIRST, BETWEEN, LAST):
            whole.write(whole.policy, step)
            live.update(bridge, whole.weights(whole.policy), step)
    assert whole.answers(live, in_flight) == whole.oracle_answers


def _bits(tensor: torch.Tensor) -> torch.dtype:
    return {2: torch.int16, 4: torch.int32}[tensor.element_size()]
