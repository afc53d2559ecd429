"""Adapters as PEFT's folders: what is written, what is read back, and what is refused in which words."""

import json
import math

import peft
import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.weights.adapter_folder import (
    AdapterConfig,
    adapted_modules,
    adapter_parameter,
    changes_nothing,
    check_adapter_fits,
    folded,
    is_adapter_folder,
    magnitude_parameter,
    read_adapter_config,
    read_adapter_shapes,
    read_adapter_tensors,
    renamed,
    selects,
    write_adapter_folder,
)

CONFIG = AdapterConfig(4, 8.0, ("q_proj", "up_proj"), "org/base")
MODULES = [f"model.layers.{number}.mlp.up_proj" for number in range(5)]
WEIGHTS = {
    adapter_parameter(module, half): torch.randn((4, 6) if half == "A" else (8, 4))
    for module in MODULES
    for half in "AB"
}
SHAPES = {name: tuple(tensor.shape) for name, tensor in WEIGHTS.items()}


@pytest.fixture
def folder(tmp_path):
    write_adapter_folder(tmp_path / "adapter", WEIGHTS.items(), CONFIG)
    return tmp_path / "adapter"


def rewrite(folder, **settings):
    """Other settings in the adapter's configuration; those that are `...` are taken out."""
    file = folder / "adapter_config.json"
    content = json.loads(file.read_text()) | settings
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))


@pytest.mark.parametrize(("alpha", "stored"), [(8.0, 8), (0.5, 0.5)])
def test_the_folder_says_to_peft_what_the_adapter_is(tmp_path, alpha, stored):
    config = AdapterConfig(4, alpha, ("q_proj",), "org/base", dora=True, excluded=("model.visual", "tower"))
    learnt = {name: torch.nn.Parameter(tensor) for name, tensor in WEIGHTS.items()}
    num_bytes = write_adapter_folder(tmp_path / "adapter", learnt.items(), config, durable=True)
    assert num_bytes == 5 * (4 * 6 + 8 * 4) * 4
    text = (tmp_path / "adapter/adapter_config.json").read_text()
    content = json.loads(text)
    assert content == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "org/base",
        "r": 4,
        "lora_alpha": stored,
        "target_modules": ["q_proj"],
        "exclude_modules": r"(model\.visual|tower)(\..*)?",
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "use_rslora": False,
        "use_dora": True,
        "modules_to_save": None,
    }
    assert type(content["lora_alpha"]) is type(stored)
    assert len(text.splitlines()) > len(content), "a person reads a setting a line"
    found = read_adapter_tensors(tmp_path / "adapter")
    assert found.keys() == WEIGHTS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in WEIGHTS.items())


def test_what_is_read_is_what_was_written(folder):
    assert read_adapter_config(folder) == CONFIG
    assert CONFIG.scaling == 2.0
    assert read_adapter_shapes(folder) == SHAPES
    assert "exclude_modules" not in json.loads((folder / "adapter_config.json").read_text())
    assert is_adapter_folder(folder)
    assert not is_adapter_folder(folder.parent)


def test_others_leave_out_what_they_do_not_need(folder):
    rewrite(folder, base_model_name_or_path=None, use_dora=..., target_modules="all-linear", bias=..., use_rslora=None)
    assert read_adapter_config(folder) == AdapterConfig(4, 8.0, ("all-linear",), "")
    rewrite(folder, base_model_name_or_path=..., use_dora=True, target_modules=None, init_lora_weights="gaussian")
    assert read_adapter_config(folder) == AdapterConfig(4, 8.0, (), "", dora=True)


@pytest.mark.parametrize(
    "settings", [{"r": 10**9}, {"r": 2}, {"r": 0}, {"r": -4}, {"lora_alpha": math.nan}, {"lora_alpha": math.inf}]
)
def test_a_rank_or_scale_of_no_adapter_is_refused_before_layers_are_made(folder, settings):
    rewrite(folder, **settings)
    with pytest.raises(ConfigError, match="r = "):
        read_adapter_config(folder)


def test_brackets_without_end_are_a_sentence(folder):
    (folder / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_adapter_config(folder)


@pytest.mark.parametrize(
    "settings",
    [
        {"peft_type": "IA3"},
        {"bias": "all"},
        {"init_lora_weights": "pissa"},
        {"fan_in_fan_out": True},
        {"use_rslora": True},
        {"lora_bias": True},
        {"modules_to_save": ["lm_head"]},
        {"rank_pattern": {"q_proj": 8}},
        {"alpha_pattern": {"q_proj": 8}},
        {"layer_replication": [[0, 1]]},
        {"target_parameters": ["w"]},
        {"trainable_token_indices": [1]},
        {"alora_invocation_tokens": [1]},
        {"use_qalora": True},
        {"use_bdlora": {"a": 1}},
    ],
)
def test_what_is_neither_lora_nor_dora_is_refused_by_name(folder, settings):
    rewrite(folder, **settings)
    ((name, value),) = settings.items()
    with pytest.raises(ConfigError) as error:
        read_adapter_config(folder)
    assert f"has {name} = {json.dumps(value)}, which is neither plain LoRA nor DoRA" in str(error.value)


@pytest.mark.parametrize("name", ["embed_tokens.lora_embedding_A", "embed_tokens.weight", "lm_head.base_layer.weight"])
def test_tensors_of_other_layers_are_refused_by_name(tmp_path, name):
    write_adapter_folder(tmp_path / "adapter", [*WEIGHTS.items(), (name, torch.zeros(4, 6))], CONFIG)
    with pytest.raises(ConfigError, match=f"has {name}, which is not of a linear layer"):
        read_adapter_config(tmp_path / "adapter")


def test_a_folder_that_cannot_be_read_says_what_to_do(tmp_path, folder):
    with pytest.raises(ConfigError, match=r"has no adapter_config\.json: give the folder of an adapter"):
        read_adapter_config(tmp_path)
    for settings in ({"r": ...}, {"lora_alpha": "much"}, {"r": None}):
        rewrite(folder, **{"r": 4, "lora_alpha": 8, **settings})
        with pytest.raises(ConfigError, match=r"cannot be read .*: save the adapter again"):
            read_adapter_config(folder)
    for damage in (lambda file: file.write_bytes(b"short"), lambda file: file.unlink()):
        damage(folder / "adapter_model.safetensors")
        for read in (read_adapter_shapes, read_adapter_tensors):
            with pytest.raises(ConfigError, match=r"adapter_model\.safetensors cannot be read .*: save the adapter"):
                read(folder)


def test_an_adapter_that_fits_is_one_of_the_same_kind_and_size(folder):
    check_adapter_fits(folder, CONFIG, SHAPES)
    for other, said in (
        (AdapterConfig(4, 8.0, (), "", dora=True), "is plain LoRA: set lora.dora = false"),
        (AdapterConfig(8, 8.0, (), ""), f"lora.rank = 8, and the adapter in {folder} has 4: set lora.rank = 4"),
        (AdapterConfig(4, 2.5, (), ""), f"lora.alpha = 2.5, and the adapter in {folder} has 8: set lora.alpha = 8"),
    ):
        with pytest.raises(ConfigError) as error:
            check_adapter_fits(folder, other, SHAPES)
        assert str(error.value).endswith(said)
    rewrite(folder, use_dora=True)
    with pytest.raises(ConfigError, match=r"is DoRA: set lora\.dora = true$"):
        check_adapter_fits(folder, CONFIG, SHAPES)


@pytest.mark.parametrize("num_other", [1, 3, 4])
def test_tensors_that_do_not_fit_are_named_the_first_three_of_them(folder, num_other):
    others = sorted(WEIGHTS)[:num_other]
    few = {name: shape for name, shape in SHAPES.items() if name not in others}
    shown = ", ".join(others[:3]) + (" and 1 more" if num_other == 4 else "")
    with pytest.raises(ConfigError) as error:
        check_adapter_fits(folder, CONFIG, few)
    assert f"does not fit model.path and lora.target_modules (unexpected {shown}): its own" in str(error.value)
    assert str(error.value).endswith("target_modules are q_proj, up_proj")
    write_adapter_folder(folder, [(name, WEIGHTS[name]) for name in few], CONFIG)
    with pytest.raises(ConfigError) as error:
        check_adapter_fits(folder, CONFIG, SHAPES)
    assert f"(missing {shown})" in str(error.value)
    wrong = few | dict.fromkeys(list(few)[:num_other], (3, 3))
    with pytest.raises(ConfigError) as error:
        check_adapter_fits(folder, CONFIG, wrong)
    first = next(iter(few))
    assert f"({first} has shape {list(SHAPES[first])}, not [3, 3]):" in str(error.value), "one is enough"


def test_names_lead_from_modules_to_parameters_and_back():
    names = [adapter_parameter("a.b", "A"), magnitude_parameter("a.b"), adapter_parameter("c", "B")]
    assert names == [
        "base_model.model.a.b.lora_A.weight",
        "base_model.model.a.b.lora_magnitude_vector",
        "base_model.model.c.lora_B.weight",
    ]
    assert adapted_modules(names) == ("a.b", "c")
    assert selects(["o_proj", "q_proj"], "layers.0.q_proj")
    assert selects(["layers.0.q_proj"], "layers.0.q_proj")
    assert not selects(["proj"], "layers.0.q_proj"), "whole names only"


def test_scaling_is_folded_into_b_in_memory_that_stays():
    a, b = (adapter_parameter("m", half) for half in "AB")
    learnt = {a: torch.nn.Parameter(torch.ones(2, 3)), b: torch.nn.Parameter(torch.full((3, 2), 2.0))}
    assert [tensor is learnt[name] for name, tensor in folded(learnt.items(), 1.0)] == [True, True]
    kept = {}
    first = dict(folded(learnt.items(), 0.5, kept))
    assert first[a] is learnt[a]
    assert first[b].tolist() == [[1.0] * 2] * 3
    assert not first[b].requires_grad
    again = dict(folded([(b, torch.full((3, 2), 6.0))], 0.5, kept))
    assert again[b] is first[b]
    assert first[b].tolist() == [[3.0] * 2] * 3
    assert dict(folded(learnt.items(), 3.0))[b].tolist() == [[6.0] * 2] * 3


def test_a_spare_file_is_written_over_and_an_absent_one_is_made(tmp_path):
    spare = tmp_path / "spare"
    spare.write_bytes(bytes(100_000))
    inode = spare.stat().st_ino
    for step in range(2):
        write_adapter_folder(tmp_path / f"0.{step}", WEIGHTS.items(), CONFIG, spare=spare)
        file = tmp_path / f"0.{step}/adapter_model.safetensors"
        assert not spare.exists()
        assert (file.stat().st_ino == inode) == (step == 0)
        assert read_adapter_tensors(tmp_path / f"0.{step}").keys() == WEIGHTS.keys()


INFIXES = {
    "newer": ("model.language_model.layers.0.q_proj", "model.layers.0.q_proj"),
    "older": ("language_model.model.layers.0.q_proj", "model.language_model.layers.0.q_proj"),
    "text only": ("model.layers.0.q_proj", "language_model.model.layers.0.q_proj"),
    "the same": ("model.layers.0.q_proj", "model.layers.0.q_proj"),
}


@pytest.mark.parametrize("case", INFIXES)
def test_a_decoder_of_a_vision_language_model_may_have_another_name(case, tmp_path):
    theirs, ours = INFIXES[case]
    tensors = {adapter_parameter(theirs, half): torch.ones(2, 2) for half in "AB"}
    tensors |= {adapter_parameter("visual.merger", half): torch.ones(2, 2) for half in "AB"}
    config = AdapterConfig(2, 4.0, ("q_proj",), "org/base")
    write_adapter_folder(tmp_path / "adapter", tensors.items(), config)
    wanted = {adapter_parameter(module, half): (2, 2) for module in (ours, "visual.merger") for half in "AB"}
    names = check_adapter_fits(tmp_path / "adapter", config, wanted)
    assert names[adapter_parameter(theirs, "A")] == adapter_parameter(ours, "A")
    assert sorted(names.values()) == sorted(wanted)


def test_a_name_that_fits_two_or_none_stays():
    wanted = ["model.a.w", "language_model.a.w", "b.w"]
    assert renamed(["model.language_model.a.w"], wanted) == {"model.language_model.a.w": "model.language_model.a.w"}
    assert renamed(["c.w", "model.b.w"], wanted) == {"c.w": "c.w", "model.b.w": "b.w"}
    assert renamed(["model.b.w", "b.w"], wanted) == {"model.b.w": "model.b.w", "b.w": "b.w"}, "two would become one"


def test_an_adapter_before_its_first_update_changes_nothing(tmp_path):
    config, tensors = AdapterConfig(2, 4.0, ("q",), "m"), {adapter_parameter("q", "A"): torch.ones(2, 2)}
    for number, (b, expected) in enumerate(((0.0, True), (0.5, False))):
        more = {adapter_parameter("q", "B"): torch.full((2, 2), b)}
        write_adapter_folder(tmp_path / str(number), (tensors | more).items(), config)
        assert changes_nothing(tmp_path / str(number)) is expected


def test_the_commit_of_a_base_is_pefts_revision(tmp_path):
    config = AdapterConfig(2, 4.0, ("q",), "org/base", revision="1" * 40)
    write_adapter_folder(tmp_path / "a", {adapter_parameter("q", "A"): torch.ones(2, 2)}.items(), config)
    assert peft.PeftConfig.from_pretrained(tmp_path / "a").revision == "1" * 40
    assert read_adapter_config(tmp_path / "a").revision == "1" * 40
