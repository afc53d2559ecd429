"""The learner is built as the planned config says, and what cannot be done is said."""

import pytest
import torch

from slipstream.config import ModelConfig, RunConfig, SFTConfig, TrainingConfig, with_values
from slipstream.launch.models import build
from slipstream.trainer import layers
from slipstream.trainer.layers import LayerOptions
from slipstream.trainer.new_model import new_model


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = new_model(
        tmp_path_factory.mktemp("models") / "tiny",
        hidden_size=32,
        num_layers=2,
        intermediate_size=48,
        context_length=128,
    )
    training = TrainingConfig(steps=1, micro_batch_tokens=256, gradient_checkpointing="selective", compile=False)
    model = ModelConfig(path=str(folder), dtype="float32")
    return RunConfig(model=model, algorithm=SFTConfig(), training=training, evaluation=None)


@pytest.mark.parametrize("works", [True, False])
def test_layers_as_the_config_says_and_a_compiler_that_fails_is_told(config, works, monkeypatch):
    def compiler(graph, _inputs):
        if not works:
            raise RuntimeError("out of order")
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(layers, "COMPILER", compiler)
    heard = []
    learner = build(with_values(config, {"training.compile": True}), None, heard.append, 123).learner
    assert learner.planned_bytes == 123
    assert learner.model.layers == LayerOptions("selective", compiled=works)
    assert len(heard) == (0 if works else 1)
    assert all("could not be compiled" in text and "out of order" in text for text in heard)
    plain = build(config, None, heard.append, 123).learner
    assert plain.model.layers == LayerOptions("selective")
    torch._dynamo.reset()
