"""What a run saves, as transformers and PEFT read it: end tokens, template, type, base; whole, adapter and merged."""

import json
from types import SimpleNamespace

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from slipstream.commands.export import export, remarks
from slipstream.commands.serve import ServeOptions, vllm_arguments
from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.commands.verify import _downloaded
from slipstream.config import ModelConfig, load_config
from slipstream.config.schema import TeacherConfig
from slipstream.data.chat_template import ChatTokenizer
from slipstream.errors import ConfigError, DataError
from slipstream.plan.deployable import find_deployable
from slipstream.plan.measure import adapter_config
from slipstream.plan.preflight.model_folder import check_adapter, find_teacher
from slipstream.records import Message
from slipstream.trainer.checkpoints.checkpoint import CheckpointStore
from slipstream.trainer.learner import Learner
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.optim.base import MasterAdamW
from slipstream.weights.adapter_folder import AdapterConfig, read_adapter_config
from slipstream.weights.usage import EndTokens, write_usage
from tests.refusals import refuses

FIRST, SECOND = "1" * 40, "2" * 40
RUN = """
[model]
path = "{}"
[data]
path = "rows.jsonl"
[algorithm]
kind = "sft"
[lora]
rank = 2
[training]
steps = 1
"""


def as_base(folder, **settings):
    """As base models come: another end token than the chat template's."""
    new_model(folder, hidden_size=16, num_layers=1, num_heads=1, num_kv_heads=1, context_length=64, **settings)
    edit(folder / "tokenizer_config.json", eos_token="<|pad|>")
    for name in ("config.json", "generation_config.json"):
        edit(folder / name, eos_token_id=AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<|pad|>"))
    return folder


def edit(file, **values):
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(content | values))


def saved(base, folder, kind, dtype="float32"):
    """A checkpoint's weights, exported where `kind` says so."""
    torch.manual_seed(0)
    model = PolicyModel.load(base, dtype)
    if kind != "whole":
        adapter = model.add_adapter(AdapterConfig(2, 4.0, ("q_proj", "down_proj"), str(base)))
        for layer in adapter.layers.values():
            torch.nn.init.normal_(layer.lora_B, std=0.1)
    store = CheckpointStore(folder / "checkpoints", ends=EndTokens(*ChatTokenizer(base).end_tokens))
    path = store.save(1, Learner(model, MasterAdamW(model.network.named_parameters())), model.folder, {})
    return export(path, folder / "exported", merged=kind == "merged")


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("kind", "dtype"), [("whole", "bfloat16"), ("adapter", "float32"), ("merged", "float32")])
def test_other_readers_stop_where_training_did(kind, dtype, tied, tmp_path):
    base = as_base(tmp_path / "base", tie_embeddings=tied)
    template = (base / "chat_template.jinja").read_text()
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    folder = saved(base, tmp_path, kind, dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end, pad = (tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|pad|>"))
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [end, pad]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|pad|>")
    assert (folder / "chat_template.jinja").read_text() == template
    load = peft.AutoPeftModelForCausalLM if kind == "adapter" else AutoModelForCausalLM
    model = load.from_pretrained(folder)
    assert str(next(model.parameters()).dtype) == f"torch.{dtype}"
    network = model.get_base_model() if kind == "adapter" else model
    assert (network.get_input_embeddings().weight is network.get_output_embeddings().weight) is tied
    if kind != "adapter":
        assert model.generation_config.eos_token_id == [end, pad]
        assert AutoConfig.from_pretrained(folder).eos_token_id == [end, pad]
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before, "the base is only read"
    arguments = vllm_arguments(find_deployable(str(folder)), ChatTokenizer(base).template_kwargs, ServeOptions())
    if kind == "adapter":
        assert arguments[arguments.index("--generation-config") + 1] == str(folder)
    # A run that goes on from the folder learns the same end, and changes nothing more.
    if kind != "adapter":
        assert ChatTokenizer(folder).end_tokens == ((end, pad), "<|im_end|>")


CASES = {
    # end tokens of config.json and generation_config.json (None: no such file), and what is saved
    "the end is named": (1, [7, 1], [7, 1]),
    "another is named": (1, 1, [7, 1]),
    "no file": (1, None, [7, 1]),
    "nothing is named": (None, {}, 7),
}


@pytest.mark.parametrize("case", CASES)
def test_a_folder_says_all_ends_and_keeps_what_else_it_says(case, tmp_path):
    config, generation, expected = CASES[case]
    source = tmp_path / "source"
    source.mkdir()
    edit(source / "config.json", bos_token_id=3, **({} if config is None else {"eos_token_id": config}))
    if generation is not None:
        ids = {} if generation == {} else {"eos_token_id": generation}
        edit(source / "generation_config.json", temperature=0.6, **ids)
    edit(source / "tokenizer_config.json", eos_token={"content": "</s>", "lstrip": False})
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    write_usage(adapter, source, EndTokens((7,), "<|im_end|>"))
    said = json.loads((adapter / "generation_config.json").read_text())
    assert said["eos_token_id"] == expected
    assert said.get("temperature") == (0.6 if generation is not None else None)
    assert said.get("bos_token_id") == (None if generation is not None else 3)
    token = json.loads((adapter / "tokenizer_config.json").read_text())["eos_token"]
    assert token == {"content": "<|im_end|>", "lstrip": False}
    write_usage(source, source, EndTokens((7,)))
    assert json.loads((source / "config.json").read_text()).get("eos_token_id") == (None if config is None else [7, 1])
    assert json.loads((source / "tokenizer_config.json").read_text())["eos_token"]["content"] == "</s>"


def test_a_tokenizers_end_stays_where_the_template_writes_it(tmp_path):
    base = as_base(tmp_path / "base")
    assert ChatTokenizer(base).end_tokens[1] == "<|im_end|>"
    template = base / "chat_template.jinja"
    template.write_text("{{ eos_token }}" + template.read_text())
    assert ChatTokenizer(base).end_tokens[1] == ""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache with two commits of one model, `main` the second, and no network behind it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repository = tmp_path / "cache" / "models--org--tiny"
    for seed, commit in enumerate((FIRST, SECOND)):
        as_base(repository / "snapshots" / commit, seed=seed)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(SECOND)
    return repository / "snapshots"


def adapter_of(hub, folder, **changes):
    (folder / "run.toml").write_text(RUN.format(hub / FIRST))
    config = adapter_config(load_config(folder / "run.toml").config)
    assert (config.base, config.revision) == ("org/tiny", FIRST)
    path = saved(hub / FIRST, folder, "adapter")
    edit(path / "adapter_config.json", base_model_name_or_path="org/tiny", revision=FIRST, **changes)
    return path


def test_an_adapter_stays_with_the_commit_that_it_was_trained_on(hub, tmp_path):
    adapter = adapter_of(hub, tmp_path)
    assert read_adapter_config(adapter).revision == FIRST
    assert find_deployable(str(adapter)).model == str(hub / FIRST)
    assert find_deployable(str(adapter), "org/tiny").model == str(hub / FIRST)
    assert find_deployable(str(adapter), str(hub / SECOND)).model == str(hub / SECOND), "who names another gets it"
    merged = load_file(export(adapter, tmp_path / "merged", merged=True) / "model.safetensors")
    untouched = "model.embed_tokens.weight"
    assert torch.equal(merged[untouched], load_file(hub / FIRST / "model.safetensors")[untouched])
    assert _downloaded("org/tiny", FIRST) == hub / FIRST
    assert _downloaded("org/tiny", None) == hub / SECOND
    check_adapter(SimpleNamespace(path=str(hub / FIRST)), str(adapter))
    with refuses("lora.path"):
        check_adapter(SimpleNamespace(path=str(hub / SECOND)), str(adapter))
    check_adapter(SimpleNamespace(path=str(tmp_path)), str(adapter))  # another model is the user's choice
    edit(adapter / "adapter_config.json", revision="gone")
    with pytest.raises(ConfigError, match="at gone, which is not there"):
        find_deployable(str(adapter))


def test_an_adapter_stays_with_the_weights_that_it_was_trained_on(tmp_path):
    base, other = as_base(tmp_path / "base"), as_base(tmp_path / "other", seed=1)
    adapter = saved(base, tmp_path, "adapter")
    assert find_deployable(str(adapter)).model == str(base)
    check_adapter(SimpleNamespace(path=str(base)), str(adapter))
    (base / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    for deploys in (
        lambda: export(adapter, tmp_path / "merged", merged=True),
        lambda: find_deployable(str(adapter)),
        lambda: check_adapter(SimpleNamespace(path=str(base)), str(adapter)),
    ):
        with pytest.raises(ConfigError, match=str(base)):
            deploys()
    assert not (tmp_path / "merged").exists()
    assert find_deployable(str(adapter), str(base)).model == str(base), "who names another gets it"
    (base / "model.safetensors").unlink()
    check_adapter(SimpleNamespace(path=str(base)), str(adapter))  # a plan needs no weights


def test_a_teacher_of_the_hub_is_found_once(hub):
    config = SimpleNamespace(model=ModelConfig(path="m", revision=FIRST), teacher=TeacherConfig(path="org/tiny"))
    teacher = find_teacher(config, weights=True)
    assert teacher.path == str(hub / SECOND), "the revision is the policy's"
    assert find_teacher(SimpleNamespace(teacher=teacher), weights=True) is teacher
    config.teacher = TeacherConfig(path="org/lost")
    with pytest.raises(ConfigError, match=r"teacher\.path"):
        find_teacher(config, weights=True)


def test_an_export_says_what_the_folder_cannot(tmp_path):
    folder = saved(as_base(tmp_path / "base"), tmp_path, "adapter")
    assert any("by a path of this machine" in text for text in remarks(folder))
    check_adapter(SimpleNamespace(path=str(tmp_path / "base")), str(folder))
    tensors = load_file(folder / "adapter_model.safetensors")
    zeroed = {name: tensor * (".lora_A." in name) for name, tensor in tensors.items()}
    save_file(zeroed, folder / "adapter_model.safetensors")
    assert any("is zero" in text for text in remarks(folder))
    with pytest.raises(ConfigError, match="every B"):
        check_adapter(SimpleNamespace(path=str(tmp_path / "base")), str(folder))
    edit(folder / "adapter_config.json", base_model_name_or_path="org/tiny")
    assert not any("by a path of this machine" in text for text in remarks(folder))


def test_a_token_without_an_embedding_is_refused_where_a_text_has_it(tmp_path):
    """transformers #11102: a token was added to the tokenizer, and the embedding was not resized."""
    base = new_model(tmp_path / "m", hidden_size=16, num_layers=1, num_heads=1, num_kv_heads=1, context_length=64)
    tokenizer = AutoTokenizer.from_pretrained(base)
    rows = len(tokenizer)
    tokenizer.add_tokens(["<tool>"], special_tokens=True)
    tokenizer.save_pretrained(base)
    chat = ChatTokenizer(base)
    question = [Message("user", "a"), Message("assistant", "b")]
    assert max(chat.training_tokens(question).token_ids) < rows
    for turns in ([Message("user", "<tool>")], [*question[:1], Message("assistant", "b <tool>")]):
        with pytest.raises(DataError, match=rf"'<tool>' is number {rows}, and the embedding .* has {rows} rows"):
            chat.training_tokens(turns) if len(turns) > 1 else chat.render(turns)
    edit(base / "config.json", image_token_id=rows)  # a placeholder, which features replace
    assert rows in ChatTokenizer(base).render([Message("user", "<tool>")])
    edit(base / "config.json", vocab_size=5)
    with pytest.raises(ConfigError, match="the embedding of"):
        ChatTokenizer(base)
