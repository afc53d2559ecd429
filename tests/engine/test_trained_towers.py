"""What every bridge owes when the vision tower is trained: after an update the engine's weights, tower and projector
included, are the trainer's bit for bit, and it answers prompts with images as one that was started on the version.

`test_contract.py` writes versions by hand; here training makes them, through images, and the same start gives the same
versions whatever brings them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from benchmarks.bridges import Bridge, create_bridge
from safetensors.torch import load_file

from slipstream.data.chat_template import ChatTokenizer
from slipstream.records import GenerateRequest, Message, SamplingParams, Ticket
from slipstream.records import Sequence as Tokens
from slipstream.trainer.learner import Learner, score
from slipstream.trainer.loss import SFTObjective
from slipstream.trainer.model.loading import SharedTensors
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.optim.base import MasterAdamW
from slipstream.trainer.packing import StepBatch
from slipstream.weights.bridges.single_copy import check_loaded, open_weights
from slipstream.weights.model_files import stored_parameters

from ..fork_server import take_for_usual
from .architectures import ARCHITECTURES
from .conftest import LiveEngine, create, stop
from .test_contract import BRIDGES
from .test_image_agreement import picture, save
from .workers import TOWER_VARIABLE

pytestmark = [
    pytest.mark.engine,
    pytest.mark.full,
    pytest.mark.real_start,
]  # the path of its engines is not that of a fork server
DTYPE = "bfloat16"
"""In which small steps change few elements, so that deltas are worth sending."""
LEARNING_RATE = 2e-5
STEPS = (1, 2, 3)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=12)
TOLERANCE = 0.03
"""Of the mean difference of log-probabilities to the trainer, as in `test_contract.py`."""


class Trained:
    """A model that three optimizer steps through images train, and an engine that was started on the last of them."""

    def __init__(self, folder: Path, family: str) -> None:
        self.folder = folder
        self.model = save(folder / "model", family)
        self.tokenizer = ChatTokenizer(self.model)
        wide, tall = picture(64, 32, 0), picture(37, 91, 1)
        self.talks = [
            [Message("user", "<image>What?", (wide,))],
            [Message("user", "First <image> then <image>: which?", (tall, wide))],
            [Message("user", "no picture")],
        ]
        self.versions: list[dict[str, torch.Tensor]] = []
        learner = self.learner(self.load())
        publisher = create_bridge("restart", folder=folder / "started", source=self.model, engine=None).publisher
        for step in STEPS:
            self.train(learner)
            self.ticket = publisher.publish(learner.named_weights(), step, 0, lambda ticket: None)
            self.versions.append({name: weight.clone() for name, weight in learner.named_weights()})
        self.scored = learner.model
        self.live = self.start()

    def load(self, shared: SharedTensors | None = None) -> PolicyModel:
        return PolicyModel.load(self.model, DTYPE, shared=shared, train_tower=True)

    def learner(self, policy: PolicyModel) -> Learner:
        return Learner(policy, MasterAdamW(policy.network.named_parameters()), micro_batch_tokens=512)

    def train(self, learner: Learner) -> None:
        learner.forward_backward(StepBatch(self.rows()), SFTObjective())
        learner.optim_prepare(LEARNING_RATE)
        learner.optim_commit()

    def prompts(self):
        for talk in self.talks:
            ids = self.tokenizer.render(talk)
            yield ids, self.tokenizer.place_images(talk, ids)

    def rows(self) -> list[Tokens]:
        said = self.tokenizer.plain_tokens("seven red boxes")
        return [
            Tokens(ids + said, [False] * len(ids) + [True] * len(said), media=list(media))
            for ids, media in self.prompts()
        ]

    def start(self) -> LiveEngine:
        architecture = ARCHITECTURES["vision"]
        live = create(
            Path(self.ticket.location),
            self.folder / "live",
            DTYPE,
            max_restarts=0,
            start_timeout_s=400,
            version=self.ticket.version,
            parameters=self.ticket.parameters,
            options={"worker_extension_cls": architecture.worker},
        )
        live.engine.launch()
        try:
            live.call(live.engine.wait_ready(), 410)
            self.live = live
            self.oracle = self.answers("oracle")
            self.features = self.tower()
        except BaseException:
            live.engine.kill()
            stop(live)
            raise
        return live

    def tower(self) -> torch.Tensor:
        """What the engine's tower made of an image when its weights were last fingerprinted."""
        return load_file(self.folder / "tower.safetensors")["features"].clone()

    def answers(self, tag: str):
        """Tokens and log-probabilities, a prompt at a time."""
        found = []
        for number, (ids, media) in enumerate(self.prompts()):
            asked, images = self.tokenizer.request(ids, media)
            for sampling in (GREEDY, SAMPLED):
                id_ = f"{tag}-{number}-{sampling.temperature}"
                (one,) = self.live.generate(GenerateRequest(id_, asked, sampling, seed=number, images=images))
                assert one.error == ""
                found.append((one.token_ids, one.logprobs))
        return found

    def publish(self, bridge: Bridge, learner: Learner, step: int) -> Ticket:
        """Bring the learner's weights to the engine, which proves them."""
        return self.live.update(bridge, learner.named_weights(), step)

    def back(self) -> None:
        """The engine on the weights before training, by another bridge, and with answers of its own."""
        learner = self.learner(self.load())
        disk = create_bridge("disk", folder=self.folder / "back", source=self.model, engine=self.live.engine)
        self.publish(disk, learner, 0)
        assert not self.tower().equal(self.features)
        for before, after in zip(self.answers("back"), self.oracle, strict=True):
            assert before[1] != after[1]

    def attach(self, name: str, folder: Path) -> tuple[Learner, Bridge]:
        kind, deltas = BRIDGES.get(name, (name, False))
        shared = None
        if kind == "single_copy":
            (places,) = self.live.call(self.live.engine.share(stored_parameters(self.model, DTYPE), 60))
            tensors = open_weights(places)
            check_loaded(tensors, self.model)
            shared = SharedTensors(tensors, places.refused)
        engine = self.live.engine
        how = {"folder": folder / name, "source": self.model, "engine": engine, "timeout_s": 60}
        held = (lambda: self.live.call(engine.held())) if deltas else None
        bridge = create_bridge(kind, **how, held=held, go_on=lambda version: self.live.call(engine.go_on(version, 60)))
        return self.learner(self.load(shared)), bridge


@pytest.fixture(scope="module", params=["Qwen2_VL", "Qwen2_5_VL", "Qwen3_VL"])
def trained(request, tmp_path_factory) -> Iterator[Trained]:
    architecture = ARCHITECTURES["vision"]
    if missing := architecture.missing():
        pytest.skip(missing)
    folder = tmp_path_factory.mktemp("trained")
    take_for_usual(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([*architecture.path(), os.environ.get("PYTHONPATH", "")]))
        patch.setenv(TOWER_VARIABLE, str(folder / "tower.safetensors"))
        found = Trained(folder, request.param)
        yield found
        found.live.engine.kill()
        stop(found.live)


def test_each_step_moves_tower_projector_and_decoder(trained: Trained):
    start = dict(trained.load().named_weights())
    for before, after in zip([start, *trained.versions], trained.versions, strict=False):
        moved = {name for name, weight in after.items() if weight.ndim > 1 and not weight.equal(before[name])}
        assert moved == {name for name, weight in after.items() if weight.ndim > 1}
        for part in ("visual.patch_embed", "visual.blocks.1", "visual.merger"):
            assert any(part in name for name in moved), part


# How a bridge brings the weights of other families, test_contract.py shows.
@pytest.mark.parametrize("name", [*BRIDGES, "restart"])
def test_the_engine_has_and_answers_what_was_trained(trained: Trained, name: str, tmp_path: Path):
    trained.back()
    learner, bridge = trained.attach(name, tmp_path)
    for step in STEPS:
        if bridge.fence is not None:
            trained.live.call(bridge.fence(60))
        trained.train(learner)
        # A restart takes seconds: the last one shows it.
        if name != "restart" or step == STEPS[-1]:
            ticket = trained.publish(bridge, learner, step)
    assert (ticket.delta is not None) == name.startswith("deltas")
    for parameter, weight in learner.named_weights():
        assert weight.equal(trained.versions[-1][parameter]), parameter
    # The engine has computed these fingerprints where its own weights lie.
    assert (ticket.version.digest, ticket.parameters) == (trained.ticket.version.digest, trained.ticket.parameters)
    assert trained.tower().equal(trained.features)
    assert trained.answers(name) == trained.oracle


def test_the_trainer_gives_the_same_logprobs(trained: Trained):
    sequences, theirs = [], []
    for (ids, media), answers in zip(trained.prompts(), trained.oracle[1::2], strict=True):
        said, logprobs = answers
        sequences.append(Tokens(ids + said, [False] * len(ids) + [True] * len(said), media=list(media)))
        theirs += logprobs
    ours = torch.cat(score(trained.scored, sequences, micro_batch_tokens=512).logprobs)
    assert (ours - torch.tensor(theirs)).abs().mean() < TOLERANCE
