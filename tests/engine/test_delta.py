"""Deltas into a running vLLM: exact, against what it holds and nothing else, and whole again after a failure."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from benchmarks.bridges import create_bridge
from safetensors.torch import load_file, save_file

from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.errors import EngineError, WeightsError
from slipstream.records import ApplyReport, Completion, SamplingParams, Ticket
from slipstream.weights import check_report
from slipstream.weights.bridges.delta import DeltaPublisher

from .conftest import LiveEngine, perturbed, sparsely, start

pytestmark = pytest.mark.engine
SAMPLING = SamplingParams(max_tokens=24)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
CARRIERS = pytest.mark.parametrize("carrier", ["disk", "broadcast"])


class Trainer:
    """Weights that change a little from version to version, and their publisher."""

    def __init__(self, live: LiveEngine, carrier: str, folder: Path, num_workers: int = 1) -> None:
        self.live = live
        self.weights = perturbed(load_file(live.model / "model.safetensors"), seed=0)
        self.step = -1
        how = {"folder": folder / "weights", "source": live.model, "engine": live.engine, "timeout_s": 60}
        bridge = create_bridge(carrier, **how, num_workers=num_workers, held=lambda: live.call(live.engine.held()))
        self.bridge = bridge
        self.publisher, self.receiver = bridge.publisher, bridge.receiver
        assert isinstance(self.publisher, DeltaPublisher)

    def train(self) -> None:
        self.weights = sparsely(self.weights, seed=self.step + 1)
        # One parameter changes everywhere and one nowhere.
        self.weights["model.norm.weight"] += 0.01
        self.weights["model.layers.0.input_layernorm.weight"] -= 0.0

    def publish(self, receive: bool = True) -> tuple[Ticket, ApplyReport | None]:
        """The next version, as the engine reports it; or not announced to it."""
        self.step += 1
        if receive:
            return self.live.bring(self.bridge, self.weights.items(), self.step)
        return self.publisher.publish(self.weights.items(), self.step, 0, lambda ticket: None), None

    def update(self) -> Ticket:
        """Train, publish, and have it proved."""
        self.train()
        ticket, report = self.publish()
        assert report is not None
        check_report(report, ticket)
        if ticket.delta is not None:
            assert report.num_bytes < 0.3 * sum(w.nbytes for w in self.weights.values())
        return ticket

    def answers(self, tag: str) -> list[Completion]:
        return [c for i, s in enumerate((SAMPLING, GREEDY)) for c in self.live.sample(f"{tag}-{i}", s)]


def same_answers(ours: list[Completion], theirs: list[Completion]) -> None:
    assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]
    assert [c.logprobs for c in ours] == [c.logprobs for c in theirs]


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveEngine]:
    folder = tmp_path_factory.mktemp("untied")
    model = new_model(folder / "model", hidden_size=64, num_layers=2, tie_embeddings=False, dtype="bfloat16")
    with start(model, folder, "bfloat16", max_restarts=3) as live:
        yield live


@CARRIERS
def test_a_change_that_was_missed_is_found_and_named_and_the_next_version_travels_whole(live, tmp_path, carrier):
    trainer = Trainer(live, carrier, tmp_path)
    trainer.update()
    trainer.train()
    name = "model.layers.1.self_attn.k_proj.weight"
    # The copy says that nothing changed there.
    trainer.publisher._copy[name].copy_(trainer.weights[name].view(torch.int32).view(-1))
    ticket, report = trainer.publish()
    assert ticket.delta is not None
    assert report is not None
    assert report.mismatched == (name,)
    with pytest.raises(WeightsError, match=name):
        check_report(report, ticket)
    with pytest.raises(EngineError, match="did not verify"):
        live.sample("refused", SAMPLING)
    assert live.call(live.engine.held()) is None
    assert trainer.update().delta is None
    assert live.sample("again", SAMPLING)
    assert trainer.update().delta is not None
    trainer.publisher.close()


def test_one_flipped_bit_in_the_patches_is_found_and_named(live, tmp_path):
    trainer = Trainer(live, "disk", tmp_path)
    trainer.update()
    trainer.train()
    ticket, _ = trainer.publish(receive=False)
    name = "model.layers.0.mlp.down_proj.weight"
    number = next(str(i) for i, patch in enumerate(ticket.delta.patches) if patch.name == name)
    path = Path(ticket.location) / "patches.safetensors"
    payloads = load_file(path)
    payloads[number][-3] ^= 1
    save_file(payloads, path)
    report = live.call(trainer.receiver.apply(ticket, 60))
    assert report.mismatched == (name,)
    assert trainer.update().delta is None


@CARRIERS
def test_a_delta_out_of_order_is_refused_and_nothing_is_changed(live, tmp_path, carrier):
    trainer = Trainer(live, carrier, tmp_path)
    tickets = [trainer.update() for _ in range(3)]
    before = trainer.answers("before")
    for out_of_order in tickets[1:]:
        base = out_of_order.delta.base.name
        with pytest.raises(
            EngineError, match=rf"409: version .* delta against {base} .*and the engine holds version 0\.2 .*publish it"
        ):
            live.call(trainer.receiver.apply(out_of_order, 60))
    same_answers(trainer.answers("after"), before)
    assert not live.call(live.engine.verify(tickets[2], 60)).mismatched
    assert trainer.update().delta.base == tickets[2].version
    trainer.publisher.close()


def test_what_another_publisher_brought_is_no_base(live, tmp_path):
    one, other = (Trainer(live, "disk", tmp_path / name) for name in ("one", "other"))
    one.update()
    other.train()
    other.update()
    assert one.update().delta is None
    assert one.update().delta is not None


@pytest.mark.full
@pytest.mark.real_start
def test_an_engine_that_dies_is_started_on_the_whole_version_and_every_delta_since(untied, tmp_path):
    trainer = Trainer(untied, "disk", tmp_path)
    whole, *_, last = [trainer.update() for _ in range(4)]
    before = trainer.answers("before")
    untied.engine.process.process.kill()
    untied.engine.process.process.wait()
    after = trainer.answers("after")
    same_answers(after, before)
    assert {c.versions[0].version for c in after} == {last.version.name}
    assert untied.engine.num_restarts == 1
    settings = untied.engine.process.settings
    assert settings.model == whole.location
    assert settings.deltas[-1].version == last.version
    next_one = trainer.update()
    assert next_one.delta.base == last.version
    # And while it is being asked: it comes back with what it held, and takes the version.
    trainer.train()
    ticket, _ = trainer.publish(receive=False)
    untied.engine.process.process.kill()
    untied.engine.process.process.wait()
    check_report(untied.call(trainer.receiver.apply(ticket, 60), 200), ticket)
    assert untied.engine.num_restarts == 2
    # Without its files there is no way back but to say so.
    shutil.rmtree(ticket.location)
    untied.engine.process.process.kill()
    untied.engine.process.process.wait()
    with pytest.raises(EngineError, match=r"patches|No such file|did not start|ended"):
        trainer.answers("never")
