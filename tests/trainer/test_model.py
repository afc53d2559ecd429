"""Which models are taken, that foreign architectures pack right, and which are refused with a reason."""

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.refusals import refuses
from tests.trainer.plain import loss_and_gradients, plain
from tests.trainer.steps import learner_of

from slipstream import records
from slipstream.errors import ConfigError
from slipstream.trainer.loss import SFTObjective
from slipstream.trainer.model.loading import SharedTensors
from slipstream.trainer.model.packing_check import check_isolation
from slipstream.trainer.model.policy import PolicyModel, shares_memory
from slipstream.trainer.packing import StepBatch, micro_batches

WINDOW = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}

MODELS = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "max_window_layers": 0, **WINDOW}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral-window": ("Mistral", {"sliding_window": 5}),
    "gemma": ("Gemma", {"head_dim": 8}),
    "gemma2-no-cap": ("Gemma2", {"head_dim": 8, "attn_logit_softcapping": None, **WINDOW}),
    "gemma3-window": ("Gemma3Text", {"head_dim": 8, **WINDOW}),
    "phi3": ("Phi3", {}),
    "olmo2": ("Olmo2", {}),
    "granite": ("Granite", {"logits_scaling": 4.0}),
    "qwen3-moe": (
        "Qwen3Moe",
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_packed_logits_equal_the_plain_model(name, save_model, tmp_path):
    kind, changes = MODELS[name]
    save_model(tmp_path, kind, **changes)
    theirs = plain(tmp_path, attention="eager")
    model = PolicyModel.load(tmp_path)
    lengths = [40, 3, 17, 39, 5]
    sequences = [
        records.Sequence([(7 * i + 3 * j) % 64 for j in range(n)], [j > 0 for j in range(n)])
        for i, n in enumerate(lengths)
    ]
    (micro,) = micro_batches(StepBatch(sequences), 1000)
    with torch.no_grad():
        packed = model.logits(micro).split(micro.counts)
        for index, logits in zip(micro.sequences, packed, strict=True):
            expected = theirs(input_ids=torch.tensor([sequences[index].token_ids])).logits[0, :-1]
            torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)


ALONE = {
    "soft-capping": ("Gemma2", {"head_dim": 8, "attn_logit_softcapping": 1.0, **WINDOW}),
    "sinks": (
        "GptOss",
        {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, **WINDOW, "rope_parameters": None},
    ),
    "plain": ("Qwen3", {"head_dim": 8}),
}
"""Attention that packing refuses, and one that it does not."""


@pytest.mark.parametrize("name", ALONE)
def test_unpacked_logits_equal_the_plain_model(name, save_model, tmp_path):
    """With all that its attention does: transformers' SDPA leaves some of it out."""
    kind, changes = ALONE[name]
    save_model(tmp_path, kind, **changes)
    theirs = plain(tmp_path, attention="eager")
    if name != "plain":
        with refuses("training.packing"):
            PolicyModel.load(tmp_path)
    model = PolicyModel.load(tmp_path, packing=False)
    sequence = records.Sequence([(7 * j) % 64 for j in range(40)], [j > 0 for j in range(40)])
    (micro,) = micro_batches(StepBatch([sequence]), 1000, packing=False)
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([sequence.token_ids])).logits[0, :-1]
        torch.testing.assert_close(model.logits(micro), expected, atol=2e-5, rtol=1e-4)


def test_named_weights_of_fused_experts_are_those_of_the_file(save_model, tmp_path):
    kind, changes = MODELS["qwen3-moe"]
    save_model(tmp_path, kind, **changes)
    saved = load_file(tmp_path / "model.safetensors")
    weights = dict(PolicyModel.load(tmp_path).named_weights())
    assert weights.keys() == saved.keys()
    assert all(torch.equal(weights[name], saved[name]) for name in saved)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_that_lie_in_one_storage_are_named_as_they_lie(save_model, tmp_path, tied):
    save_model(tmp_path, "Qwen2", tie_word_embeddings=tied)
    model = PolicyModel.load(tmp_path)
    expected = {name: weight.clone() for name, weight in model.named_weights()}
    parameters = list(model.network.parameters())
    arena, start = torch.empty(sum(parameter.numel() for parameter in parameters)), 0
    for parameter in parameters:
        place = arena[start : start + parameter.numel()].view(parameter.shape)
        parameter.data, start = place.copy_(parameter.data), start + parameter.numel()
    for _ in range(2):
        weights = dict(model.named_weights())
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())
        # Not copies: nothing of the size of the model is made for each version.
        assert {weight.untyped_storage().data_ptr() for weight in weights.values()} == {arena.data_ptr()}
        assert len(model._stored) == len(weights)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3-moe"])
def test_named_weights_are_those_of_now(save_model, tmp_path, kind):
    """After a write in place and in the place of a parameter, also where what is stored is made of several."""
    name, changes = MODELS[kind]
    save_model(tmp_path, name, **changes)
    model = PolicyModel.load(tmp_path)
    before = {name: weight.clone() for name, weight in model.named_weights()}
    with torch.no_grad():
        for parameter in model.network.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(weight, before[name] + 1.0) for name, weight in model.named_weights())
    for parameter in model.network.parameters():
        parameter.data = parameter.detach() + 1.0
    assert all(torch.equal(weight, before[name] + 1.0 + 1.0) for name, weight in model.named_weights())


def test_what_is_stored_of_several_parameters_is_refused_where_each_is_taken_by_itself(save_model, tmp_path):
    name, changes = MODELS["qwen3-moe"]
    save_model(tmp_path, name, **changes)
    PolicyModel.load(tmp_path).check_parts()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    with torch.device("meta"):
        fused = transformers.HrmTextForCausalLM(transformers.HrmTextConfig(num_hidden_layers=1, vocab_size=50, **sizes))
    with refuses("training.ranks"):
        PolicyModel(fused, tmp_path).check_parts()


NEXT = transformers.Qwen3NextConfig(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])


@pytest.mark.parametrize(
    ("config", "architecture", "said"),
    [
        (NEXT, "Qwen3NextForCausalLM", "layers of kind linear_attention"),
        (transformers.BertConfig(vocab_size=64, hidden_size=32), "BertForMaskedLM", "BertForMaskedLM, not a causal"),
    ],
)
def test_recurrent_layers_that_are_packed_and_other_kinds_of_model_are_refused(config, architecture, said, tmp_path):
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=said):
        PolicyModel.load(tmp_path)


def test_recurrent_layers_are_trained_when_not_packed(make_batch, tmp_path):
    """Losses and gradients of sequences a row each are transformers' own of each sequence by itself."""
    torch.manual_seed(0)
    config = transformers.Qwen3NextConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32,
    )  # fmt: skip
    transformers.Qwen3NextForCausalLM(config).save_pretrained(tmp_path)
    model = PolicyModel.load(tmp_path, packing=False)
    batch = make_batch(num=3, longest=20, advantages=False)
    learner = learner_of(model, 300)
    loss = learner.forward_backward(batch, SFTObjective())["loss"]
    expected, gradients = loss_and_gradients(plain(tmp_path), batch.sequences)
    assert loss == pytest.approx(expected, rel=1e-5)
    for name, master in learner.optimizer.masters().items():
        torch.testing.assert_close(master.grad, gradients[name], atol=2e-6, rtol=1e-4)


def test_a_leak_that_no_configuration_declares_is_found(model_folder):
    """One layer whose output also depends on earlier positions of the row, whatever sequence they are of."""
    model = PolicyModel.load(model_folder)
    check_isolation(model)
    model.network.model.layers[0].register_forward_hook(lambda _module, _args, out: out + 0.1 * out.cumsum(1))
    with pytest.raises(ConfigError, match="packed sequences see one another in Qwen3ForCausalLM"):
        check_isolation(model)


def test_attention_that_never_gets_the_layout_is_refused(model_folder):
    model = PolicyModel.load(model_folder)
    with pytest.raises(ConfigError, match="does not pass keyword arguments on to its attention"):
        model.network(input_ids=torch.tensor([[1, 2]]))


def test_a_path_that_is_no_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not a folder"):
        PolicyModel.load(tmp_path / "absent")
    with pytest.raises(ConfigError, match="no usable configuration"):
        PolicyModel.load(tmp_path)


def test_experts_that_are_kept_apart_cannot_be_shared(save_model, tmp_path):
    kind, changes = MODELS["qwen3-moe"]
    weights = load_file(save_model(tmp_path, kind, **changes) / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"one copy of .*experts.* \(transformers converts it, and the engine stores it"
    ):
        PolicyModel.load(tmp_path, shared=SharedTensors(weights, {}))


def in_engine_order(weights, num_experts, order="gate, up"):
    """The engine's memory as vLLM has it: gate and up in one tensor of all experts, down in another."""
    fused = {}
    for name in [name for name in weights if ".experts.0." in name]:
        parts = [weights[name.replace(".experts.0.", f".experts.{e}.")] for e in range(num_experts)]
        fused[name] = torch.stack(parts)
    for layer in {name.split(".experts.")[0] for name in fused}:
        names = [f"{layer}.experts.0.{half}_proj.weight" for half in order.split(", ")]
        size = fused[names[0]].shape[1]
        both = torch.cat([fused[name] for name in names], dim=1)
        fused[names[0]], fused[names[1]] = both[:, :size], both[:, size:]
    for name, whole in fused.items():
        weights |= {name.replace(".experts.0.", f".experts.{e}."): part for e, part in enumerate(whole)}
    return weights


@pytest.mark.parametrize("order", ["gate, up", "up, gate"])
def test_experts_are_shared_where_they_lie_in_transformers_own_order(save_model, tmp_path, order):
    kind, changes = MODELS["qwen3-moe"]
    weights = load_file(save_model(tmp_path, kind, **changes) / "model.safetensors")
    in_engine_order(weights, changes["num_experts"], order)
    if order == "up, gate":
        with pytest.raises(ConfigError, match="the engine stores it differently"):
            PolicyModel.load(tmp_path, shared=SharedTensors(weights, {}))
        return
    model = PolicyModel.load(tmp_path, shared=SharedTensors(weights, {}))
    alone = PolicyModel.load(tmp_path)
    for (name, ours), (_, theirs) in zip(model.named_weights(), alone.named_weights(), strict=True):
        assert torch.equal(ours, theirs), name
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    weights[name][3, 5] += 1
    assert torch.equal(dict(model.named_weights())[name], weights[name])
    assert {p.untyped_storage().data_ptr() for p in model.network.parameters()} == {
        w.untyped_storage().data_ptr() for w in weights.values()
    }


@pytest.mark.parametrize("wrong", ["is lacking", "lies elsewhere", "lies after a gap", "lies in columns", "is another"])
def test_experts_of_which_one_lies_otherwise_are_not_shared(save_model, tmp_path, wrong):
    kind, changes = MODELS["qwen3-moe"]
    weights = load_file(save_model(tmp_path, kind, **changes) / "model.safetensors")
    in_engine_order(weights, changes["num_experts"])
    names = [f"model.layers.1.mlp.experts.{expert}.down_proj.weight" for expert in range(changes["num_experts"])]
    last = weights[names[-1]]
    if wrong == "is lacking":
        del weights[names[-1]]
    elif wrong == "lies elsewhere":
        weights[names[-1]] = last.clone()
    elif wrong == "lies in columns":
        weights[names[-1]] = last.as_strided(last.shape, last.stride()[::-1], last.storage_offset())
    elif wrong == "is another":
        weights[names[0]], weights[names[-1]] = weights[names[-1]], weights[names[0]]
    else:
        apart = torch.empty(len(names) + 1, *last.shape)
        for place, name in enumerate(names):
            weights[name] = apart[place + (name == names[-1])].copy_(weights[name])
    with pytest.raises(ConfigError, match=r"one copy of .*experts.down_proj \(.* the engine stores it differently"):
        PolicyModel.load(tmp_path, shared=SharedTensors(weights, {}))


def test_a_parameter_that_the_engine_refuses_or_has_in_another_shape_is_named(save_model, tmp_path):
    weights = load_file(save_model(tmp_path, "Qwen2") / "model.safetensors")
    name = "model.norm.weight"
    for changed, refused, reason in (
        ({name: weights[name][:-1]}, {}, "the engine has another"),
        ({}, {name: "it is quantized"}, "it is quantized"),
    ):
        known = {key: value for key, value in weights.items() if key != name} | changed
        with pytest.raises(ConfigError, match=rf"one copy of model\.norm\.weight \({reason}\)"):
            PolicyModel.load(tmp_path, shared=SharedTensors(known, refused))


def test_memory_is_shared_where_shape_and_storage_are():
    own = torch.zeros(2, 3)
    assert shares_memory(own.view(2, 3), own)
    assert not shares_memory(own.clone(), own)
    assert not shares_memory(own.view(3, 2), own)


@pytest.mark.parametrize("head", [torch.nn.Linear(48, 97, bias=True), torch.nn.Identity()])
def test_a_head_that_is_no_plain_product_stays_in_the_models_type(head, model_folder):
    model = PolicyModel.load(model_folder)
    model.network.set_output_embeddings(head)
    with refuses("model.fp32_head"):
        model.use_fp32_head()
    assert not model.has_lazy_logits


def test_unchecked_a_model_computes_nothing_while_it_is_loaded(model_folder, monkeypatch):
    monkeypatch.setattr(PolicyModel, "logits", None)
    model = PolicyModel.load(model_folder, "float16", checked=False, fp32_residual=True)
    assert (model.packing, model.max_model_len) == (True, None)


def test_a_pass_makes_no_cache_of_keys(model_folder, make_batch):
    model, caches = PolicyModel.load(model_folder), []
    for part in (model.network, model.network.get_decoder()):
        part.register_forward_hook(lambda _module, _inputs, output: caches.append(output.past_key_values))
    (row,) = micro_batches(make_batch(num=1), 1000)
    model.logits(row)
    hidden = model.forward(model.embed(row), row)
    assert caches == [None] * 3
    torch.testing.assert_close(model.head(hidden, row.predict_index_N), model.logits(row))


def test_a_model_is_loaded_without_progress_bars(model_folder):
    transformers.utils.logging.enable_progress_bar()
    PolicyModel.load(model_folder)
    assert not transformers.utils.logging.is_progress_bar_enabled()
