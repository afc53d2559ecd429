"""However decoder layers compute, gradients are the same; what they keep is what the plan counts."""

import gc
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from tests.refusals import refuses
from tests.trainer.steps import learner_of
from torch.profiler import ProfilerActivity, profile
from transformers.modeling_layers import GradientCheckpointingLayer

from slipstream.config import RunConfig
from slipstream.plan.measure import adapter_config, measure_adapter, read_model
from slipstream.plan.memory.sizes import activation_bytes_per_token
from slipstream.trainer.learner import Learner
from slipstream.trainer.loss import SFTObjective
from slipstream.trainer.model import layers
from slipstream.trainer.model.compilation import compile_layers
from slipstream.trainer.model.layers import LayerOptions, Offloader, configure_layers
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.optim.base import MasterAdamW
from slipstream.trainer.packing import micro_batches
from slipstream.weights.adapter_folder import AdapterConfig

pytestmark = pytest.mark.usefixtures("fresh_compiler")  # see the module's benchmark for the compiler that runs take


def gradients(model, batch):
    learner = learner_of(model, 300)
    metrics = learner.forward_backward(batch, SFTObjective())
    return metrics["loss"], {name: master.grad.clone() for name, master in learner.optimizer.masters().items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("packing", [True, False])
def test_what_is_computed_again_has_the_same_bits(dtype, packing, model_folder, make_batch):
    batch = make_batch(advantages=False)
    plain_loss, plain = gradients(PolicyModel.load(model_folder, dtype, packing=packing), batch)
    for checkpointing in (True, "selective"):
        model = PolicyModel.load(model_folder, dtype, packing=packing, checkpointing=checkpointing)
        loss, found = gradients(model, batch)
        assert loss == plain_loss
        torch.testing.assert_close(found, plain, atol=0, rtol=0)


def test_inputs_that_wait_elsewhere_have_the_same_bits(monkeypatch, model_folder, make_batch):
    """On a CPU there is no elsewhere: here they are copied within its memory, by the same code."""
    batch = make_batch(advantages=False)
    moved, back = [], []

    class Copies(Offloader):
        def __init__(self):
            super().__init__(lambda tensor: tensor.numel() > 48)

        def _pack(self, tensor):
            away = super()._pack(tensor)
            moved.append(not isinstance(away, torch.Tensor))
            return away

        def _unpack(self, kept):
            back.append(kept)
            return super()._unpack(kept)

    _, plain = gradients(PolicyModel.load(model_folder), batch)
    monkeypatch.setattr(layers, "Offloader", Copies)
    model = PolicyModel.load(model_folder, checkpointing=True, offload=True)
    _, found = gradients(model, batch)
    torch.testing.assert_close(found, plain, atol=0, rtol=0)
    num_rows = len(list(micro_batches(batch, 300)))
    assert sum(moved) == num_rows * model.config.num_hidden_layers, "each layer's input, and nothing else"
    assert len(back) == len(moved)
    assert all(kept.before is None for kept in back if not isinstance(kept, torch.Tensor)), "nothing is held on to"


@pytest.mark.full
def test_compiled_layers_give_the_same_gradients_for_rows_of_any_length(model_folder, make_batch):
    batches = [make_batch(num, seed, advantages=False) for seed, num in enumerate((9, 2, 5))]
    plain, model = PolicyModel.load(model_folder), PolicyModel.load(model_folder, checkpointing="selective")
    assert compile_layers(model) == ""
    assert all(parameter.grad is None for parameter in model.network.parameters())
    learners = [Learner(each, MasterAdamW(each.network.named_parameters())) for each in (plain, model)]
    torch._dynamo.utils.counters.clear()
    for batch in batches:
        losses, grads = [], []
        for learner in learners:
            learner.optimizer.discard_gradients()
            losses.append(learner.forward_backward(batch, SFTObjective())["loss"])
            grads.append({name: master.grad for name, master in learner.optimizer.masters().items()})
        assert losses[1] == pytest.approx(losses[0], abs=1e-6)
        torch.testing.assert_close(grads[1], grads[0], atol=2e-6, rtol=2e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 1, "the trial's graphs do for other lengths"


@pytest.mark.full
@pytest.mark.parametrize("checkpointing", [True, False])
def test_compiled_layers_can_be_computed_again(checkpointing, model_folder, make_batch):
    """Selectively the compiler does it, for rows of any length above."""
    batch = make_batch(advantages=False)
    _, plain = gradients(PolicyModel.load(model_folder), batch)
    model = PolicyModel.load(model_folder, checkpointing=checkpointing)
    assert compile_layers(model) == ""
    _, found = gradients(model, batch)
    torch.testing.assert_close(found, plain, atol=2e-6, rtol=2e-5)


@pytest.mark.full
def test_layers_below_the_first_adapter_want_no_gradient(model_folder):
    model = PolicyModel.load(model_folder)
    layers = range(model.config.num_hidden_layers)
    model.add_adapter(AdapterConfig(4, 8.0, (f"{layers[-1]}.self_attn.q_proj",), base=""))
    assert compile_layers(model) == ""


def test_a_compiler_that_fails_is_said_and_left_out(monkeypatch, model_folder, make_batch):
    def broken(*_):
        raise RuntimeError("no C++ compiler\nhere")

    batch = make_batch(advantages=False)
    _, plain = gradients(PolicyModel.load(model_folder, checkpointing=True), batch)
    model = PolicyModel.load(model_folder, checkpointing=True)
    monkeypatch.setattr(layers, "COMPILER", broken)
    problem = compile_layers(model)
    assert "no C++ compiler here" in problem
    assert "\n" not in problem
    assert model.layers == LayerOptions(True)
    _, found = gradients(model, batch)
    assert all(torch.equal(found[name], gradient) for name, gradient in plain.items())


def kept_bytes(model, row):
    """What is allocated more after a forward pass than before it, as torch's own allocator counts."""
    gc.collect()  # what earlier tests left would be freed inside, and counted
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        output = model.logits(row)
    kept = sum(event.self_cpu_memory_usage for event in profiler.events())
    return kept, output


@pytest.mark.parametrize(
    ("dtype", "adapter"), [("float32", None), ("bfloat16", None), ("bfloat16", "lora"), ("bfloat16", "dora")]
)
@pytest.mark.parametrize("way", [False, "selective", True])
def test_the_plan_counts_what_layers_keep(way, dtype, adapter, save_model, make_batch, tmp_path):
    """The difference that two more layers make for a token; the plan may count more, but not much."""
    sizes, planned = {}, {}
    for depth in (2, 4):
        folder = save_model(tmp_path / f"{dtype}-{depth}", "Qwen2", num_hidden_layers=depth, vocab_size=128)
        model = PolicyModel.load(folder, dtype, checkpointing=way)
        section = {}
        if adapter is not None:
            section = {"lora": {"rank": 4, "dora": adapter == "dora"}}
        config = RunConfig.model_validate(
            {
                "model": {"path": str(folder), "dtype": dtype},
                "data": {"path": "none"},
                "algorithm": {"kind": "sft"},
                "training": {"steps": 1},
                **section,
            }
        )
        outputs = 0
        if (facts := measure_adapter(config)) is not None:
            model.add_adapter(adapter_config(config))
            outputs = facts.num_outputs
        planned[depth] = activation_bytes_per_token(
            read_model(str(folder)), dtype, checkpointing=way, adapter_outputs=outputs, dora=adapter == "dora"
        )
        (row,) = micro_batches(make_batch(num=1, longest=90, advantages=False), 10_000)
        model.logits(row)  # layouts and tables are made
        sizes[depth], _output = kept_bytes(model, row)
    found = (sizes[4] - sizes[2]) / len(row.token_ids_T)
    expected = planned[4] - planned[2]
    assert 0.75 * expected <= found <= 1.1 * expected


def test_dressing_again_replaces_what_was_there(model_folder):
    model = PolicyModel.load(model_folder, checkpointing=True)
    layer = layers.decoder_layers(model.network)[0]
    first = layer.forward
    configure_layers(model.network, LayerOptions(checkpointing="selective"))
    assert layer.forward is not first
    configure_layers(model.network, LayerOptions())
    assert layer.forward == type(layer).forward.__get__(layer)


class Block(GradientCheckpointingLayer):
    def forward(self, states):
        return states + 1.0


def test_only_the_language_models_layers_are_compiled(monkeypatch):
    network, asked = torch.nn.ModuleDict({"tower": Block(), "text": Block()}), []
    monkeypatch.setattr(layers, "text_parts", lambda network: [network["text"]])
    monkeypatch.setattr(
        torch, "compile", lambda forward, **options: asked.append(options) or (lambda states: "compiled")
    )
    assert layers.text_layers(network) == [network["text"]]
    configure_layers(network, LayerOptions())
    assert "forward" not in network["text"].__dict__
    configure_layers(network, LayerOptions("selective", compiled=True))
    assert asked == [{"dynamic": True, "backend": layers.COMPILER}]
    assert network["text"](torch.ones(1)) == "compiled"
    assert network["tower"](torch.ones(1)).item() == 2.0
    configure_layers(network, LayerOptions(True))
    assert len(asked) == 1
    with refuses("training.gradient_checkpointing"):
        layers.decoder_layers(torch.nn.ModuleDict())


def test_large_tensors_of_a_gpu_are_moved_and_nothing_on_a_cpu():
    moves = Offloader()._moves
    for is_cuda, size, moved in ((True, 1 << 20, True), (True, (1 << 20) - 1, False), (False, 1 << 22, False)):
        assert moves(SimpleNamespace(is_cuda=is_cuda, nbytes=size)) is moved


def test_the_tensor_before_is_fetched_ahead_once():
    offloader = Offloader(lambda tensor: True)
    tensors = [torch.full((3,), float(value)) for value in range(3)]
    first, second, third = (offloader._pack(tensor) for tensor in tensors)
    for tensor in tensors:
        tensor.zero_()
    assert offloader._unpack(third).tolist() == [2.0] * 3
    assert first.back is None
    ahead = second.back
    assert ahead.tolist() == [1.0] * 3
    assert offloader._unpack(second) is ahead
    assert offloader._unpack(first).tolist() == [0.0] * 3
    assert [each.back for each in (first, second, third)] == [None] * 3
    last = offloader._pack(tensors[0])
    assert last.before is None, "what came back is not held on to"
    kept = Offloader(lambda tensor: False)._pack(tensors[0])
    assert kept is tensors[0]


def test_copies_wait_for_what_is_computed_and_what_is_computed_for_copies(monkeypatch):
    heard = []
    compute, copying = (
        SimpleNamespace(name=name, wait_stream=lambda other, name=name: heard.append(f"{name} waits for {other.name}"))
        for name in ("computing", "copying")
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: heard.append(f"used by {stream.name}"))
    offloader = Offloader(lambda tensor: True)
    monkeypatch.setattr(offloader, "_on_copy_stream", lambda device: nullcontext(copying))
    kept = offloader._pack(torch.ones(3))
    assert heard == ["copying waits for computing", "used by copying"]
    heard.clear()
    assert offloader._unpack(kept).tolist() == [1.0] * 3
    assert heard == ["computing waits for copying", "used by computing"]


def test_a_gpu_has_one_stream_of_copies_and_a_cpu_none(monkeypatch):
    made = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(device) or f"stream {len(made)}")
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    offloader, gpu = Offloader(), torch.device("cuda")
    found = []
    for device in (torch.device("cpu"), gpu, gpu):
        with offloader._on_copy_stream(device) as stream:
            found.append(stream)
    assert found == [None, "stream 1", "stream 1"]
    assert made == [gpu]
