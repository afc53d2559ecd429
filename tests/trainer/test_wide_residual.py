"""The residual stream in float32: nearer to the exact network, and refused where a layer cannot take it."""

import pytest
import torch
import transformers
from tests.trainer.steps import learner_of

from slipstream import records
from slipstream.algo.logprobs import processed_logprobs
from slipstream.commands.small_models.tiny_qwen3 import new_tokenizer
from slipstream.errors import ConfigError
from slipstream.trainer.loss import SFTObjective
from slipstream.trainer.model.layers import LayerOptions, configure_layers
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.packing import StepBatch, micro_batches
from slipstream.weights.adapter_folder import AdapterConfig

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "vocab_size": 100,
}


def saved(folder, kind, **changes):
    """A model whose layers add little to the embeddings, as trained ones do late in the stream: its sums are what
    rounds."""
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig if kind == "Gemma3" else getattr(transformers, f"{kind}Config")
    network = getattr(transformers, f"{kind}ForCausalLM")(config(**SHAPE | changes))
    for name, parameter in network.named_parameters():
        if "norm" not in name:
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            torch.nn.init.normal_(parameter, std=0.02 if adds else 1.0 if "embed" in name else 0.12)
    network.to(torch.bfloat16).save_pretrained(folder)
    new_tokenizer("char").save_pretrained(folder)
    return folder


def sequences():
    torch.manual_seed(1)
    return [
        records.Sequence(own, [False] * 8 + [True] * 40, [0.0] * 48) for own in torch.randint(3, 90, (8, 48)).tolist()
    ]


def logprobs(model):
    """In float64 from float32 logits, so that what is left is the layers' rounding."""
    (row,) = micro_batches(StepBatch(sequences()), 1024)
    with torch.no_grad():
        return processed_logprobs(model.logits(row), row.target_ids_N)[0]


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Gemma3"])
def test_it_is_nearer_to_the_exact_network(tmp_path, kind):
    folder = saved(tmp_path, kind)
    exact = logprobs(PolicyModel.load(folder, "float32"))
    plain, wide = (
        (logprobs(PolicyModel.load(folder, "bfloat16", fp32_head=True, fp32_residual=on)) - exact).abs().mean()
        for on in (False, True)
    )
    assert wide < 0.6 * plain


def test_in_float32_nothing_changes(model_folder):
    plain, wide = (PolicyModel.load(model_folder, "float32", fp32_residual=on) for on in (False, True))
    assert torch.equal(logprobs(plain), logprobs(wide))


def test_its_gradients_are_nearer_too(tmp_path, gradients_of):
    folder = saved(tmp_path, "Qwen3")
    found = []
    for dtype, on in (("float32", False), ("bfloat16", False), ("bfloat16", True)):
        model = PolicyModel.load(folder, dtype, fp32_residual=on, checkpointing=on)
        learner = learner_of(model, 1024)
        learner.forward_backward(StepBatch(sequences()), SFTObjective())
        found.append(torch.cat([gradient.double().flatten() for gradient in gradients_of(learner).values()]))
    exact, plain, wide = found
    assert (wide - exact).norm() < 0.9 * (plain - exact).norm()


def test_it_stays_when_layers_are_compiled_or_not(tmp_path):
    model = PolicyModel.load(saved(tmp_path, "Llama"), "bfloat16", fp32_residual=True)
    seen = []
    model.network.model.layers[3].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    before = logprobs(model)
    configure_layers(model.network, LayerOptions(checkpointing=True))
    assert torch.equal(logprobs(model), before)
    assert seen == [torch.float32] * 2


def test_an_adapter_is_trained_beside_it(tmp_path, gradients_of):
    model = PolicyModel.load(saved(tmp_path, "Llama"), "bfloat16", fp32_head=True, fp32_residual=True)
    before = logprobs(model)
    model.add_adapter(AdapterConfig(4, 8.0, ("q_proj", "down_proj"), str(tmp_path)))
    assert torch.equal(logprobs(model), before)
    learner = learner_of(model, 1024)
    learner.forward_backward(StepBatch(sequences()), SFTObjective())
    assert all(torch.isfinite(gradient).all() for gradient in gradients_of(learner).values())


def test_a_network_that_cannot_take_it_is_refused(tmp_path):
    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(
        **SHAPE | {"num_hidden_layers": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    )
    transformers.GPTNeoXForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    new_tokenizer("char").save_pretrained(tmp_path)
    plain = logprobs(PolicyModel.load(tmp_path, "bfloat16"))
    with pytest.raises(
        ConfigError, match=r"GPTNeoXForCausalLM cannot add up in float32 .*model\.fp32_residual = false"
    ):
        PolicyModel.load(tmp_path, "bfloat16", fp32_residual=True)
    model = PolicyModel.load(tmp_path, "bfloat16")
    with pytest.raises(ConfigError):
        model.use_fp32_residual()
    assert torch.equal(logprobs(model), plain)
