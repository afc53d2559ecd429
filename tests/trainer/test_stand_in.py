"""What is compiled for a stand-in serves the model that it stands for; `tests/launch/test_build.py` has it compiled."""

import itertools

import pytest
import torch
import transformers
from tests.trainer.steps import learner_of
from torch._dynamo.utils import counters

from slipstream.errors import ConfigError
from slipstream.records import Sequence
from slipstream.trainer.loss import SFTObjective
from slipstream.trainer.model.compilation import compile_layers, row_lengths
from slipstream.trainer.model.layers import decoder_layers
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.model.stand_in import save_stand_in
from slipstream.trainer.packing import StepBatch

SLIDING = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("kind", "changes", "num_layers"),
    [
        ("Qwen3", {"head_dim": 8, "num_hidden_layers": 4}, 1),
        ("Gemma3Text", {"head_dim": 8, "num_hidden_layers": 4, "sliding_window": 16, **SLIDING}, 3),
        (
            "Qwen3Moe",
            {
                "head_dim": 8,
                "num_hidden_layers": 4,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "mlp_only_layers": [0, 2],
            },
            2,
        ),
    ],
)
def test_it_has_a_layer_of_each_kind(kind, changes, num_layers, save_model, tmp_path):
    whole = save_model(tmp_path / "whole", kind, **changes, **({"moe_intermediate_size": 16} if "Moe" in kind else {}))
    save_stand_in(whole, tmp_path / "small", "bfloat16")
    small, own = PolicyModel.load(tmp_path / "small", "bfloat16"), PolicyModel.load(whole, "bfloat16")
    found = [[(name, each.shape) for name, each in layer.named_parameters()] for layer in decoder_layers(small.network)]
    meant = [[(name, each.shape) for name, each in layer.named_parameters()] for layer in decoder_layers(own.network)]
    assert found == meant[:num_layers]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_first_step_needs_none_either(save_model, tmp_path):
    """Inductor fuses otherwise for rows beyond some length: such a row was tried."""
    torch._dynamo.reset()
    shape = {"head_dim": 64, "num_hidden_layers": 2, "hidden_size": 512, "vocab_size": 256}
    whole = save_model(tmp_path / "whole", "Qwen3", max_position_embeddings=16384, **shape)
    save_stand_in(whole, tmp_path / "small", "bfloat16")
    assert compile_layers(PolicyModel.load(tmp_path / "small", "bfloat16", "cuda"), row_tokens=16384) == ""
    model = PolicyModel.load(whole, "bfloat16", "cuda")
    assert compile_layers(model) == ""
    before = counters["stats"]["unique_graphs"]
    learner = learner_of(model, 16384)
    long = [Sequence([7] * 1500, [False] * 700 + [True] * 800) for _ in range(8)]
    for number in (8, 5, 2, 1):
        learner.forward_backward(StepBatch(long[:number]), SFTObjective())
    assert counters["stats"]["unique_graphs"] == before


def test_long_rows_are_tried_too(save_model, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda forward, **_: forward)
    seen = []
    folder = save_model(tmp_path / "whole", "Qwen3", head_dim=8, num_hidden_layers=1)
    model = PolicyModel.load(folder, max_model_len=64)
    logits = model.logits
    monkeypatch.setattr(model, "logits", lambda row: (seen.append(len(row.token_ids_T)), logits(row))[1])
    assert compile_layers(model, row_tokens=200) == ""
    assert seen == [2 * 63, 2 * 63, 2 * 39, 2 * 39, *[4 * 49] * 2], "a sequence is read but for its last token"
    assert all(parameter.grad is None for parameter in model.network.parameters())


def test_on_a_gpu_no_range_of_lengths_between_bounds_is_left_out():
    lengths = row_lengths(16384, torch.device("cuda"))
    assert lengths[0] == 16384
    assert any(3413 < length < 4096 for length in lengths)
    assert all(1 < longer / shorter < 1.2 for longer, shorter in itertools.pairwise(lengths))
    assert lengths[-1] < 1.2 * 128


def test_a_model_of_images_has_none(tmp_path):
    transformers.Qwen3VLConfig().save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="no stand-in"):
        save_stand_in(tmp_path / "model", tmp_path / "small", "float32")
