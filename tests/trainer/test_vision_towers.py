"""Models that read images, trained on text: positions, what is trained, adapters, and the memory that is planned."""

import json

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.trainer.conftest import SMALL
from tests.trainer.plain import logprobs_of, loss_and_gradients
from tests.trainer.plain import plain as by_transformers
from tests.trainer.steps import advance, learner_of

from slipstream import records
from slipstream.commands.export import export
from slipstream.config.schema import CriticConfig
from slipstream.errors import ConfigError
from slipstream.plan.measure import read_trained_model
from slipstream.plan.memory.sizes import optimizer_bytes
from slipstream.trainer.checkpoints.checkpoint import CheckpointStore
from slipstream.trainer.critic import Critic, ValueModel
from slipstream.trainer.loss import SFTObjective
from slipstream.trainer.model.lora import blank_adapter
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.model.vision_towers import in_modules, names_in_towers
from slipstream.trainer.packing import StepBatch
from slipstream.weights.adapter_folder import AdapterConfig, write_adapter_folder

TEXT = SMALL | {"head_dim": 8}
MROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]}
TOKENS = {"vision_start_token_id": 60, "vision_end_token_id": 61, "image_token_id": 62, "video_token_id": 63}
PATCHES = {"patch_size": 4, "temporal_patch_size": 1, "spatial_merge_size": 2}
SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "vision_use_head": False,
}
MODELS = {
    "qwen2-vl": (
        "Qwen2VL",
        {"rope_parameters": MROPE},
        PATCHES | {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2},
        TOKENS,
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VL",
        {"rope_parameters": MROPE},
        PATCHES | {"depth": 1, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 48},
        TOKENS,
    ),
    "qwen3-vl": (
        "Qwen3VL",
        {"rope_parameters": MROPE | {"mrope_interleaved": True}},
        PATCHES
        | {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        TOKENS,
    ),
    # Its tower's layers have the names of the decoder's.
    "gemma3": (
        "Gemma3",
        {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
        SIGLIP | {"patch_size": 4},
        {"image_token_index": 62, "boi_token_index": 60, "eoi_token_index": 61, "mm_tokens_per_image": 4},
    ),
}


def save_with_tower(folder, name, **text):
    """A small model of that kind with random weights."""
    kind, own, tower, tokens = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        text_config=TEXT | own | text, vision_config=tower, tie_word_embeddings=True, **tokens
    )
    network = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    for parameter in network.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    network.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder_of(name):
        if name not in made:
            made[name] = save_with_tower(tmp_path_factory.mktemp("models") / name, name)
        return made[name]

    return folder_of


SEQUENCES = [
    records.Sequence([(7 * i + 3 * j) % 59 + 1 for j in range(n)], [j > 3 for j in range(n)])
    for i, n in enumerate((40, 5, 17, 39, 6))
]


def plain(folder):
    return by_transformers(folder, attention="eager", kind="ImageTextToText")


@pytest.mark.parametrize("name", MODELS)
def test_packed_text_gives_the_plain_models_loss_and_gradients(name, folders, gradients_of):
    """The plain model counts its positions itself, one sequence at a time: for text all three of mRoPE's are equal."""
    loss, expected = loss_and_gradients(plain(folders(name)), SEQUENCES)
    learner = learner_of(PolicyModel.load(folders(name)))
    assert learner.forward_backward(StepBatch(SEQUENCES), SFTObjective())["loss"] == pytest.approx(loss, abs=1e-5)
    ours = gradients_of(learner)
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_the_tower_stays_and_the_checkpoint_is_the_whole_model(name, folders, tmp_path):
    folder = folders(name)
    learner = learner_of(PolicyModel.load(folder))
    advance(learner, StepBatch(SEQUENCES))
    weights = CheckpointStore(tmp_path).save(1, learner, folder, {}) / "weights"
    before, after = (load_file(path / "model.safetensors") for path in (folder, weights))
    assert before.keys() == after.keys()
    tower = {key for key in before if "visual" in key or "vision" in key or "projector" in key}
    assert tower
    assert {key for key in before if not torch.equal(before[key], after[key])} == before.keys() - tower
    again = plain(weights)(input_ids=torch.tensor([SEQUENCES[0].token_ids])).logits[0, -2].log_softmax(-1)
    ours = learner.forward(SEQUENCES[:1]).logprobs[0][-1]
    assert (again[SEQUENCES[0].token_ids[-1]] - ours).abs() < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_all_linear_leaves_the_tower_alone_here_and_in_peft(name, folders, tmp_path):
    folder = folders(name)
    model = PolicyModel.load(folder)
    adapter = model.add_adapter(AdapterConfig(4, 8.0, ("all-linear",), str(folder)))
    assert len(adapter.layers) == 2 * 7
    assert all("language_model" in layer for layer in adapter.layers)
    learner = learner_of(model)
    for _ in range(2):
        advance(learner, StepBatch(SEQUENCES))
    write_adapter_folder(tmp_path / "a", adapter.named_weights(), adapter.config)
    theirs = peft.PeftModel.from_pretrained(plain(folder), tmp_path / "a")
    adapted = {key.split(".lora_")[0].removeprefix("base_model.model.") for key, _ in theirs.named_parameters()
               if ".lora_" in key}  # fmt: skip
    assert adapted == set(adapter.layers)
    for sequence, ours in zip(SEQUENCES, learner.forward(SEQUENCES).logprobs, strict=True):
        assert (logprobs_of(theirs, sequence) - ours).abs().max() < 1e-5
    merged = plain(export(tmp_path / "a", tmp_path / "merged", merged=True)).state_dict()
    for key, tensor in theirs.merge_and_unload().state_dict().items():
        torch.testing.assert_close(merged[key], tensor, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_the_plan_counts_what_is_trained(name, folders):
    folder = folders(name)
    facts = read_trained_model(str(folder))
    learner = learner_of(PolicyModel.load(folder))
    masters = sum(master.numel() for master in learner.optimizer.masters().values())
    assert facts.num_frozen > 0
    assert facts.num_decoding == masters
    assert optimizer_bytes("adamw", facts.num_decoding, facts) == 16 * masters


def test_a_critic_of_such_a_model(folders):
    model = ValueModel(PolicyModel.load(folders("qwen3-vl")))
    critic = Critic(learner_of(model), CriticConfig(learning_rate=1e-2, value_clip=0.0))
    assert not any("visual" in name for name in critic.learner.optimizer.masters())
    step = StepBatch(SEQUENCES)
    for name, value in (("old_values", 0.0), ("returns", 1.0)):
        step.fill(name, [torch.full((sequence.num_trainable,), value) for sequence in SEQUENCES])
    losses = [critic.train([step])["value/loss"] for _ in range(5)]
    assert losses[0] == 0.5
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.Qwen2AudioConfig, "Qwen2AudioForConditionalGeneration, not a causal language model"),
        (transformers.Gemma3nConfig, "hears audio"),
    ],
)
def test_one_that_hears_is_refused(tmp_path, config, reason):
    config = config()
    config.architectures = [type(config).__name__.removesuffix("Config") + "ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        PolicyModel.load(tmp_path)


OWN_CODE = """
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

class OwnConfig(Qwen2VLConfig):
    model_type = "own_vl"

class OwnForImages(Qwen2VLForConditionalGeneration):
    config_class = OwnConfig
"""


def test_names_in_a_tower_of_a_model_that_brings_its_own_code(folders, model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    config = json.loads((folders("qwen2-vl") / "config.json").read_text())
    classes = {"AutoConfig": "own_code.OwnConfig", "AutoModelForImageTextToText": "own_code.OwnForImages"}
    (tmp_path / "own_code.py").write_text(OWN_CODE)
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "own_vl", "auto_map": classes}))
    inside, outside = "model.visual.blocks.0.attn.qkv", "model.language_model.layers.0.self_attn.q_proj"
    assert names_in_towers(str(tmp_path), [outside, inside], trust_remote_code=True) == [inside]
    with pytest.raises(ConfigError, match="brings its own Python code, which is run only if you trust it"):
        names_in_towers(str(tmp_path), [inside])
    assert names_in_towers(str(tmp_path), []) == [], "it is not even read"
    assert names_in_towers(str(model_folder), [inside]) == []
    adapter = blank_adapter(str(tmp_path), AdapterConfig(4, 8.0, ("q_proj",), ""), trust_remote_code=True)
    assert len(adapter.layers) == 2


def test_names_of_modules_are_compared_by_their_parts():
    names = ["visual", "visual.merger", "visuals.merger", "model.visual", "merger"]
    assert in_modules(names, ["visual", "x"]) == ["visual", "visual.merger"]
    assert in_modules(names, []) == []
