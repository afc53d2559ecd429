"""`training.optimizer`: what is built, and that the plan counts what is then held."""

import dataclasses

import pytest
import torch

from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.config import Loaded, LoraConfig, with_values
from slipstream.config.bounds import keyed
from slipstream.config.checks import contradictions
from slipstream.config.schema import OptimizerName
from slipstream.config.traits import BY_BITSANDBYTES
from slipstream.errors import ConfigError
from slipstream.launch.build import build_optimizer
from slipstream.launch.prepare import prepare
from slipstream.plan import DataFacts, Facts, ModelFacts, make_plan
from slipstream.plan.memory.sizes import GIB, optimizer_bytes, training_state_bytes
from slipstream.plan.memory.trainer import training_state
from slipstream.trainer.model.policy import PolicyModel
from slipstream.weights.adapter_folder import AdapterConfig
from tests.plan.test_plan import GRPO, LORA, note, reasons
from tests.trainer.test_vision_towers import save_with_tower

SHAPE = {"hidden_size": 128, "num_layers": 2, "intermediate_size": 256}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return new_model(tmp_path_factory.mktemp("models") / "tiny", **SHAPE, context_length=256)


def facts(network, **changes):
    count = sum(parameter.numel() for parameter in network.parameters())
    vocab, hidden = network.get_input_embeddings().weight.shape
    model = ModelFacts(count, hidden, 256, 2, 4, 2, 32, 256, vocab, "float32", **changes)
    return Facts(2, 24 * GIB, model, DataFacts(1000, 60, 12))


@pytest.mark.parametrize("name", OptimizerName.__args__)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_plan_counts_what_is_held(folder, name, dtype):
    if (name, dtype) == ("adamw_bf16", "float32"):
        pytest.skip("refused in a config")
    network = PolicyModel.load(folder, dtype, packing=False).network
    optimizer = build_optimizer(with_values(GRPO, {"training.optimizer": name}), network)
    for _ in range(2):
        network(input_ids=torch.arange(9)[None], labels=torch.arange(9)[None]).loss.backward()
        held = [holder.grad for holder in optimizer._holders.values()]
        assert all(gradient.dtype == torch.float32 for gradient in held)
        optimizer.prepare(1e-3)
        optimizer.commit()
    kept = {
        key: tensor for key, tensor in optimizer.state().items() if not key.startswith(("weight.", "updates.", "qmap"))
    }
    measured = sum(tensor.nbytes for tensor in [*kept.values(), *held])
    model = facts(network).model
    assert measured == pytest.approx(optimizer_bytes(name, model.num_parameters, model), rel=0.01)


@pytest.mark.parametrize("name", OptimizerName.__args__)
def test_lora_plus_has_b_move_further(folder, name):
    def moved(ratio):
        config = LORA.model_copy(update={"lora": LoraConfig(rank=8, plus_ratio=ratio)})
        model = PolicyModel.load(folder, "bfloat16", packing=False)
        model.add_adapter(AdapterConfig(8, 32.0, ("q_proj",), str(folder)), None)
        live = [(n, p) for n, p in model.network.named_parameters() if p.requires_grad]
        with torch.no_grad():
            for _, parameter in live:
                parameter.zero_()
        optimizer = build_optimizer(with_values(config, {"training.optimizer": name}), model.network)
        sum(parameter.float().sum() for _, parameter in live).backward()
        optimizer.prepare(1e-3)
        optimizer.commit()
        return {n.rpartition(".")[2]: p.detach().float().norm().item() for n, p in live}

    plain, plus = moved(1.0), moved(8.0)
    assert plus == pytest.approx({"lora_A": plain["lora_A"], "lora_B": 8 * plain["lora_B"]}, rel=0.01)


@pytest.mark.parametrize("name", OptimizerName.__args__)
@pytest.mark.parametrize("family", ["qwen3-vl", "gemma3"])
def test_a_tower_moves_at_a_rate_of_its_own(name, family, tmp_path):
    folder = save_with_tower(tmp_path, family)

    def moved(rate):
        model = PolicyModel.load(folder, "bfloat16", train_tower=True)
        live = dict(model.network.named_parameters())
        with torch.no_grad():
            for parameter in live.values():
                parameter.zero_()
        values = {"training.optimizer": name, "training.learning_rate": 1e-3, "training.tower_learning_rate": rate}
        optimizer = build_optimizer(with_values(GRPO, values), model.network)
        sum(parameter.float().sum() for parameter in live.values()).backward()
        optimizer.prepare(1e-3)
        optimizer.commit()
        return {n: parameter.detach().float().norm().item() for n, parameter in live.items()}

    plain, apart = moved(None), moved(1e-4)
    of_tower = {n for n in plain if "visual" in n or "vision_tower" in n or "projector" in n}
    assert 0 < len(of_tower) < len(plain)
    assert apart == pytest.approx({n: plain[n] * (0.1 if n in of_tower else 1.0) for n in plain}, rel=0.01)


def test_a_plan_shows_what_is_saved(folder):
    network = PolicyModel.load(folder).network
    known = facts(network)
    count = known.model.num_parameters
    words = known.model.vocab_size * known.model.hidden_size
    passing = 2 * ((count - words) // 2)  # gradients of one of two layers, in bfloat16
    for name, each in (("adamw", 18), ("adamw_bf16", 14)):
        found = training_state_bytes(known.model, "bfloat16", with_reference=False, optimizer=name, on_gpu=True)
        assert found == count * each + passing
    adapter = {"with_reference": False, "num_adapter_parameters": 1000, "optimizer": "adamw_bf16"}
    assert training_state_bytes(known.model, "bfloat16", **adapter) == 2 * count + 1000 * 16
    made = make_plan(with_values(GRPO, {"training.optimizer": "adamw_bf16"}), known)
    assert made.config.model.dtype == "bfloat16"
    assert reasons(made)["model.dtype"] == "the type that training.optimizer rounds to"
    assert note(made, "memory of the trainer").how.startswith("weights, moments and gradients ")


def test_moments_that_may_leave_a_gpu_are_not_planned_there(folder):
    known = facts(PolicyModel.load(folder).network)
    on_gpu = dataclasses.replace(known, num_gpus=1, gpu_memory_bytes=80 * GIB)
    plain, paged = (with_values(GRPO, {"training.optimizer": name}) for name in ("adamw", "adamw_paged"))
    for config in (plain, paged):
        assert training_state(config, "float32", known) == training_state(plain, "float32", known)
    small, both = (with_values(GRPO, {"training.optimizer": name}) for name in ("adamw_8bit", "adamw_paged_8bit"))
    assert training_state(both, "float32", known) == training_state(small, "float32", known)
    two_bytes = training_state(small, "float32", on_gpu) - training_state(both, "float32", on_gpu)
    assert two_bytes == 2 * known.model.num_parameters
    moments = 8 * known.model.num_parameters
    assert training_state(plain, "float32", on_gpu) - training_state(paged, "float32", on_gpu) == moments
    how = note(make_plan(paged, on_gpu), "memory of the trainer").how
    assert "are in the CPU's memory as far as the GPU has no room" in how


@pytest.mark.parametrize("name", sorted(BY_BITSANDBYTES))
def test_some_need_a_library(monkeypatch, name):
    config = with_values(GRPO, {"training.optimizer": name})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"{name}\" needs bitsandbytes.*pip install 'slipstream\[8bit\]'"):
        prepare(Loaded(config, {}))


def test_weights_in_float32_are_not_rounded():
    config = with_values(GRPO, {"training.optimizer": "adamw_bf16", "model.dtype": "float32"})
    assert [key for key, _ in keyed(contradictions(config))] == ["training.optimizer"]
