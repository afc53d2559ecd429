"""What a model is by default, and the parts of it that ranks call."""

import pytest
import torch
from tests.refusals import refuses

from slipstream.errors import ConfigError, TrainingError
from slipstream.trainer.model import policy
from slipstream.trainer.model.layers import LayerOptions
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.packing import micro_batches


def test_by_default_a_model_computes_as_transformers_does(model_folder):
    model = PolicyModel.load(model_folder)
    assert (model.packing, model.layers, model.max_model_len) == (True, LayerOptions(), None)
    assert (model.dtype, model.device, model.roots) == (torch.float32, torch.device("cpu"), [model.network])
    assert (model.images, model.replay, model.adapter, model.has_lazy_logits) == (None, None, None, False)
    assert not model.network.training
    assert all(parameter.requires_grad for parameter in model.network.parameters())
    assert PolicyModel(model.network, model_folder).packing
    options = LayerOptions("selective", offload=True)
    other = PolicyModel.load(model_folder, checkpointing="selective", offload=True, max_model_len=64, checked=False)
    assert (other.layers, other.max_model_len) == (options, 64)


@pytest.mark.parametrize(
    ("settings", "heard"),
    [
        ({}, ["packing"]),
        ({"packing": False}, []),
        ({"checked": False}, []),
        ({"dtype": "float16"}, ["float16", "packing"]),
        ({"dtype": "float16", "packing": False}, ["float16"]),
        ({"dtype": "float16", "checked": False}, []),
    ],
)
def test_what_is_checked_when_a_model_is_loaded(settings, heard, model_folder, monkeypatch):
    found = []
    monkeypatch.setattr(policy, "check_float16", lambda model: found.append("float16"))
    monkeypatch.setattr(policy, "check_isolation", lambda model: found.append("packing"))
    PolicyModel.load(model_folder, **settings)
    assert found == heard


def test_work_is_done_within_a_call_of_the_network(model_folder, make_batch):
    model, calls = PolicyModel.load(model_folder, checked=False), []
    (row,) = micro_batches(make_batch(num=1), 1000)
    expected = model.logits(row)
    assert model.within(lambda: torch.ones(2)).tolist() == [1.0, 1.0]
    model.network.register_forward_hook(lambda _module, _inputs, output: calls.append(output))
    model.take_work()
    work = torch.ones(3)
    assert model.within(lambda: work) is work
    assert calls == [work]
    assert torch.equal(model.logits(row), expected)
    assert len(calls) == 2


def test_a_row_with_images_is_refused_where_nothing_sees_them(model_folder, make_batch):
    model = PolicyModel.load(model_folder, checked=False)
    (row,) = micro_batches(make_batch(num=1), 1000)
    assert torch.equal(model.embed(row).embeds_TD, model.token_embeddings(row.token_ids_T))
    row.images = [object()]
    with pytest.raises(TrainingError, match="Qwen3ForCausalLM has no vision tower, and a row has images: remove them"):
        model.embed(row)


def test_a_head_that_is_refused_computes_on_as_before(model_folder, make_batch):
    model = PolicyModel.load(model_folder, checked=False)
    (row,) = micro_batches(make_batch(num=1), 1000)
    model.network.register_forward_hook(lambda _module, _inputs, output: setattr(output, "logits", output.logits * 0.5))
    before = model.logits(row)
    with pytest.raises(ConfigError, match="changes its logits after the output head"):
        model.use_fp32_head()
    assert not model.has_lazy_logits
    assert torch.equal(model.logits(row), before)


def test_what_cannot_be_widened_has_no_hooks_afterwards(model_folder, monkeypatch):
    model = PolicyModel.load(model_folder, checked=False)

    def hooks(network):
        return [module.register_forward_hook(lambda *_: 1 / 0) for module in (network.model, network.lm_head)]

    def refuse(row):
        raise RuntimeError("expected mat1 and mat2\nto have the same dtype")

    monkeypatch.setattr(policy, "widen_residual", hooks)
    monkeypatch.setattr(model, "logits", refuse)
    with refuses("model.fp32_residual"):
        model.use_fp32_residual()
    assert not any(module._forward_hooks for module in (model.network.model, model.network.lm_head))
    model.use_fp32_residual(checked=False)
    monkeypatch.setattr(policy, "widen_residual", lambda network: [])
    model.use_fp32_residual()
