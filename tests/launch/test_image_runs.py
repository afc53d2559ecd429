"""Runs whose data have images, as they are prepared: what the plan says of them, and what is refused."""

import dataclasses
import json
import re

import pytest
import torch
from PIL import Image

from slipstream.commands.small_models.tiny_qwen2_vl import new_vision_model
from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.config.parse.load import load_config
from slipstream.errors import ConfigError, DataError
from slipstream.launch.prepare import prepare
from slipstream.launch.recovery.resume import identity_of, tasks_digest
from slipstream.plan import make_plan
from slipstream.plan.summary import trainer_bytes
from slipstream.records import Media, Message, Task
from slipstream.trainer.model.policy import PolicyModel
from slipstream.weights.adapter_folder import AdapterConfig, write_adapter_folder
from tests.data.test_square_images import save_model

SFT = """
[model]
path = "{model}"
[data]
path = "rows.jsonl"
[algorithm]
kind = "sft"
[training]
steps = 1
prompts_per_batch = 2
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    shape = {"hidden_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
    return new_vision_model(tmp_path_factory.mktemp("models") / "m", **shape)


@pytest.fixture
def run(model, tmp_path, monkeypatch):
    """Prepares SFT on two rows with images and one without; keywords are settings."""
    monkeypatch.chdir(tmp_path)
    rows = []
    for number, size in enumerate(((40, 30), (100, 60))):
        Image.new("RGB", size, (number, 0, 0)).save(tmp_path / f"{number}.png")
        asked = {"role": "user", "content": "<image>Which?"}
        rows.append({"messages": [asked, {"role": "assistant", "content": str(number)}], "images": [f"{number}.png"]})
    rows.append({"prompt": "a", "completion": "b"})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "run.toml").write_text(SFT.format(model=model))

    def make(*overrides):
        return prepare(load_config(tmp_path / "run.toml", ["--no-evaluation", *overrides]))

    return make


def test_the_plan_says_what_becomes_of_images(run):
    prepared = run()
    (note,) = (note for note in prepared.plan.notes if note.name == "images")
    assert note.value == 2
    assert note.how.startswith("4 to 24 tokens each; scaled once, to 256 to 16,384 pixels")
    assert [len(each.media) for each in prepared.examples] == [1, 1, 0]


def test_images_can_be_bounded(run):
    prepared = run("--model.max_pixels", "1024")
    assert [each.media[0].grid for each in prepared.examples if each.media] == [(1, 2, 2), (1, 1, 2)]
    (note,) = (note for note in prepared.plan.notes if note.name == "images")
    assert note.how.startswith("2 to 4 tokens each; scaled once, to 256 to 1,024 pixels")
    for bound in ("100", "20000"):
        with pytest.raises(ConfigError, match=f"max_pixels = {bound} is not between 256 and 16384, the bounds of"):
            run("--model.max_pixels", bound)


def test_a_trained_tower_takes_memory(run):
    frozen, trained = run(), run("--model.train_tower", "true")
    assert frozen.facts.model.num_frozen == frozen.facts.model.num_tower > 0
    assert trained.facts.model.num_frozen == 0
    first, second = (next(n for n in each.plan.notes if n.name.endswith("vision tower")) for each in (frozen, trained))
    assert first.how.startswith("frozen: weights 0.00 GiB, features of images 0.00 GiB, activations 0.00 GiB for 112 ")
    assert second.how.startswith("trained: weights 0.00 GiB, masters, moments and gradients 0.00 GiB, features of ")
    assert frozen.facts.tower == dataclasses.replace(trained.facts.tower, is_trained=False)
    assert (trained.facts.tower.total_tokens, trained.facts.tower.image_tokens) == (28, 24)
    sizes = [trainer_bytes(each.plan.config, each.facts) for each in (frozen, trained)]
    assert sizes[1] - sizes[0] > 16 * trained.facts.model.num_tower, "masters, moments, gradients and activations"


def test_a_tower_that_takes_more_than_there_is_for_a_row_is_told(run):
    prepared = run("--model.train_tower", "true")
    large = dataclasses.replace(prepared.facts.tower, total_tokens=10**6, image_tokens=16_000, row_tokens=16_000)
    facts = dataclasses.replace(prepared.facts, tower=large, memory_bytes=4 << 30)
    (warning,) = (each for each in make_plan(prepared.loaded.config, facts).warnings if "tower" in each)
    said = r"takes \d\.\d\d GiB for 64,000 patches of images at once, .* \(0\.50 GiB\): lower model\.max_pixels, or"
    assert re.match(f"the vision tower {said} model.train_tower = false", warning)
    with pytest.raises(ConfigError, match=r"the run needs about .*: lower model\.max_pixels"):
        make_plan(prepared.loaded.config, dataclasses.replace(facts, memory_bytes=1 << 29))


def test_without_images_there_is_no_tower_to_tell_of(run, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}))
    prepared = run()
    assert prepared.facts.tower is None
    assert not [note for note in prepared.plan.notes if "tower" in note.name]


def test_another_picture_is_another_training_set_and_another_place_is_not(run, tmp_path, model):
    def found():
        prepared = run()
        return identity_of(prepared.config, [], prepared.conversations, model)["training items"]

    before = found()
    (tmp_path / "pictures").mkdir()
    (tmp_path / "0.png").rename(tmp_path / "pictures/0.png")
    rows = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(rows.replace('"0.png"', '"pictures/0.png"'))
    assert found() == before
    Image.new("RGB", (40, 30), "green").save(tmp_path / "pictures/0.png")
    assert found() != before


def test_tasks_with_images_have_the_digest_that_earlier_versions_gave_them():
    """Or runs of before could not be resumed."""
    media = Media("image", "/pictures/a.png", "ab" * 32, width=3, height=4)
    task = Task("a", (Message("user", "<image>x", (media,)), Message("user", "t")), "1")
    assert tasks_digest([task]) == "04299cf52e952cff3ba45ce19ccbdb51d98d4e33c0e0ef5f531aa5c82f02d13f"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("--training.ranks", "2", "--model.train_tower", "true"), "a vision tower that is trained is not divided"),
        (
            ("--model.train_tower", "true", "--lora.rank", "4", "--lora.target_modules", '["q_proj"]'),
            "lora.target_modules names no layer of a vision tower",
        ),
        (("--lora.rank", "4", "--lora.target_modules", '["qkv"]'), "a layer of the vision tower, which is frozen"),
    ],
)
def test_settings_that_images_exclude(run, overrides, said):
    with pytest.raises(ConfigError, match=said):
        run(*overrides)


def test_text_alone_of_an_adapter_of_a_tower(run, model, tmp_path):
    """A tower that nothing trains is refused, and not an adapter that has layers of one: `slipstream eval` on text."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 3)
    asked = ("--model.train_tower", "true", "--lora.rank", "4", "--lora.alpha", "8")
    with pytest.raises(ConfigError, match=r"model.train_tower = true has no effect without an image in the data"):
        run(*asked)
    policy = PolicyModel.load(model, train_tower=True)
    adapter = policy.add_adapter(AdapterConfig(4, 8.0, ("all-linear",), str(model), with_tower=True))
    for layer in adapter.layers.values():
        torch.nn.init.normal_(layer.lora_B, std=0.1)
    write_adapter_folder(tmp_path / "adapter", adapter.named_weights(), adapter.config)
    assert run(*asked, "--lora.path", str(tmp_path / "adapter")).num_items == 3


def test_images_whose_tokens_see_later_ones(run, tmp_path, monkeypatch):
    """Gemma 3: the packed attention of training does it, transformers' causal mask and vLLM on a CPU do not."""
    folder = str(save_model(tmp_path / "gemma"))
    notes = [note for note in run("--model.path", folder).plan.notes if note.name == "images"]
    ((value, how),) = [(note.value, note.how) for note in notes]
    assert (value, how) == (2, "4 to 4 tokens each; scaled once, to 16 x 16 pixels, by the model's processor")
    said = r"has images whose tokens attend to later ones too, and training.packing = false has a causal mask"
    with pytest.raises(ConfigError, match=said):
        run("--model.path", folder, "--training.packing", "false")
    monkeypatch.setattr("slipstream.plan.preflight.images.uses_engine", lambda config: True)
    with pytest.raises(ConfigError, match="which vLLM does not do on a CPU: use a GPU, or here SFT without"):
        run("--model.path", folder)


@pytest.mark.parametrize(("name", "value"), [("train_tower", "true"), ("max_pixels", "1024")])
def test_settings_of_images_need_some(run, tmp_path, name, value):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}))
    with pytest.raises(ConfigError, match=f"model.{name}.* has no effect without an image in the data"):
        run(f"--model.{name}", value)


def test_a_model_of_text_is_refused(run, tmp_path):
    text = new_model(tmp_path / "text", hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1)
    with pytest.raises(ConfigError, match="reads no images"):
        run("--model.path", str(text))


def test_a_row_longer_than_the_context_is_named_or_counted(run):
    with pytest.raises(DataError, match=r"row 2 of .*rows.jsonl has \d+ tokens, more than data.max_length = 50"):
        run("--data.max_length", "50", "--data.too_long", "error")
    prepared = run("--data.max_length", "50", "--data.too_long", "drop")
    assert prepared.dropped["conversation_too_long"] == 1


def test_a_text_with_the_placeholder_is_named(run, tmp_path):
    rows = (tmp_path / "rows.jsonl").read_text().replace("Which?", "<|image_pad|>?", 1)
    (tmp_path / "rows.jsonl").write_text(rows)
    with pytest.raises(DataError, match=r"row 1 of .*: the chat template renders 2 image placeholders for 1 images"):
        run()
