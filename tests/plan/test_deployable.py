"""What people name, and what an engine is started on."""

from __future__ import annotations

import json
import os
import shutil
import time

import msgspec
import pytest

from slipstream.cli import main
from slipstream.commands.chat import chat_tokenizer
from slipstream.commands.export import export
from slipstream.commands.serve import ServeOptions, is_loopback, vllm_arguments
from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.config import load_config
from slipstream.errors import ConfigError
from slipstream.launch.prepare import prepare
from slipstream.plan.deployable import (
    adapter_config_of,
    deployed_engine,
    find_deployable,
    weights_folder,
    with_weights_folder,
)
from slipstream.records import Message
from slipstream.trainer.checkpoints.manifest import facts_of

SFT = """
[model]
path = "model"
[data]
path = "rows.jsonl"
[algorithm]
kind = "sft"
[training]
steps = 2
prompts_per_batch = 2
[run]
threads = 1
checkpoint_every = 1
"""
THINKING = "{% if add_generation_prompt and not enable_thinking %}{{ '<none>' }}{% endif %}"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model, and two runs that began with it: `whole`, and `adapter` with LoRA."""
    folder = tmp_path_factory.mktemp("deployable")
    model = new_model(folder / "model", hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1, context_length=64)
    template = model / "chat_template.jinja"
    template.write_text(template.read_text() + THINKING)
    rows = [{"prompt": letter, "completion": letter.upper()} for letter in "ab"]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sft.toml").write_text(SFT)
    for name, more in (("whole", []), ("adapter", ["--lora.rank", "12"])):
        more += ["--run.folder", str(folder / name), "--model.thinking", "true"]
        with pytest.raises(SystemExit) as ended:
            main(["sft", str(folder / "sft.toml"), "--json", *more])
        assert ended.value.code == 0
    return folder


def test_a_run_a_checkpoint_and_its_weights_are_the_same_model(place):
    weights = place / "whole/checkpoints/step-000002/weights"
    for named in (place / "whole", weights.parent, weights):
        assert weights_folder(named) == weights
        found = find_deployable(str(named))
        assert (found.name, found.model, found.adapter) == ("whole", str(weights), None)
        assert found.run_settings["model.thinking"] is True
    best = place / "whole/checkpoints/best"
    best.symlink_to("step-000001")
    assert weights_folder(place / "whole").parent.name == "step-000001"
    best.unlink()
    best.symlink_to("step-000099")  # the newest one is not what was asked for
    with pytest.raises(ConfigError, match="step-000099"):
        weights_folder(place / "whole")
    best.unlink()
    plain = find_deployable(str(place / "model"))
    assert (plain.name, plain.run_settings) == ("model", {})


def test_a_damaged_newest_or_best_checkpoint_is_not_passed_over(place, tmp_path):
    shutil.copytree(place / "whole", tmp_path / "run")
    newest = tmp_path / "run/checkpoints/step-000002"
    os.truncate(newest / "weights/model.safetensors", 100)
    with pytest.raises(ConfigError, match=r"step-000002 is damaged .*has 100 bytes"):
        weights_folder(tmp_path / "run")
    best = newest.with_name("best")
    best.symlink_to("step-000001")
    assert weights_folder(tmp_path / "run").parent.name == "step-000001"
    best.unlink()
    best.symlink_to("step-000009")
    with pytest.raises(ConfigError, match="step-000009 is damaged"):
        weights_folder(tmp_path / "run")


def test_an_export_reads_large_files_to_their_end(place, tmp_path, monkeypatch):
    shutil.copytree(place / "whole", tmp_path / "run")
    checkpoint = tmp_path / "run/checkpoints/step-000002"
    file = checkpoint / "weights/model.safetensors"
    monkeypatch.setattr("slipstream.trainer.checkpoints.manifest.HASHED_BYTES", 4096)
    facts = msgspec.to_builtins(facts_of(file))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["weights/model.safetensors"] = facts
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    for named in (tmp_path / "run", checkpoint, file.parent):
        with pytest.raises(ConfigError, match=r"model\.safetensors has other contents"):
            export(named, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_brings_its_base(place, tmp_path):
    found = find_deployable(str(place / "adapter"))
    weights = place / "adapter/checkpoints/step-000002/weights"
    assert (found.name, found.model, found.adapter) == ("adapter", str(place / "model"), weights)
    adapter = adapter_config_of(found)
    assert adapter.rank == 12
    assert "q_proj" in adapter.target_modules
    other = find_deployable(str(weights), str(place / "whole/checkpoints/step-000002/weights"))
    assert other.model.endswith("whole/checkpoints/step-000002/weights")
    lost = shutil.copytree(weights, tmp_path / "lost")
    content = json.loads((lost / "adapter_config.json").read_text())
    # deploy, eval and export have no --base
    for base, said in (("/gone", "belongs to the model /gone, which is not there: put it there again, or give --base"),
                       ("", "does not say which model it belongs to: write base_model_name_or_path")):  # fmt: skip
        (lost / "adapter_config.json").write_text(json.dumps(content | {"base_model_name_or_path": base}))
        with pytest.raises(ConfigError, match=said):
            find_deployable(str(lost))
    assert find_deployable(str(lost), str(place / "model")).model == str(place / "model")


def test_what_cannot_be_started_is_one_sentence(place, tmp_path):
    for name, file, content in (
        ("empty", "notes", ""),
        ("begun", "events.jsonl", ""),
        ("damaged", "manifest.json", '{"files": {"weights/model.safetensors": {"size_bytes": 5}}}'),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(content)
    for named, said in (
        (tmp_path / "empty", "holds neither a model nor an adapter, checkpoint or run: name one"),
        (tmp_path / "none", "does not exist: name the folder"),
        (place / "rows.jsonl", "is a file: name the folder"),
        (tmp_path / "begun", "has no whole checkpoint yet: wait for its first if"),
        (tmp_path / "damaged", "is damaged .*missing.*: use another one"),
    ):
        with pytest.raises(ConfigError, match=said):
            find_deployable(str(named))
    with pytest.raises(ConfigError, match="is a whole model, so it has no base: leave out --base"):
        find_deployable(str(place / "model"), "base")


def test_lengths_and_types_follow_from_the_model(place):
    found = find_deployable(str(place / "model"))
    settings = deployed_engine(found, ServeOptions(max_num_seqs=1))
    assert (settings.dtype, settings.max_model_len, settings.kv_cache_bytes) == ("float32", 64, 2**28)
    assert deployed_engine(found, ServeOptions(max_num_seqs=1, max_model_len=48)).max_model_len == 48
    with pytest.raises(ConfigError, match="above the model's context of 64 tokens: use at most"):
        deployed_engine(found, ServeOptions(max_num_seqs=1, max_model_len=65))
    with pytest.raises(ConfigError, match="of KV cache, more than a quarter of the memory"):
        deployed_engine(found, ServeOptions(max_num_seqs=10**9))


def test_a_model_is_talked_to_as_its_run_did(place):
    question = [Message("user", "x")]

    def prompt(named, **options):
        tokenizer = chat_tokenizer(find_deployable(str(place / named)), **options)
        return tokenizer.decode(tokenizer.render(question))

    assert not prompt("whole").endswith("<none>")
    assert prompt("whole", thinking=False).endswith("<none>")
    assert prompt("model").endswith("<none>")
    assert prompt("model", thinking=True, system="Be brief.").startswith("system\nBe brief.")


def test_the_servers_arguments(place):
    def given(named, **options):
        found = find_deployable(str(place / named))
        tokenizer = chat_tokenizer(found)
        arguments = vllm_arguments(found, tokenizer.template_kwargs, ServeOptions(**options))
        pairs = {key: value for key, value in zip(arguments, [*arguments[1:], ""], strict=True) if key[:2] == "--"}
        return pairs, arguments

    pairs, arguments = given("whole")
    assert pairs["--served-model-name"] == "whole"
    assert json.loads(pairs["--default-chat-template-kwargs"]) == {"enable_thinking": True}
    assert "--enable-lora" not in arguments
    pairs, arguments = given("adapter", name="mine")
    assert "--enable-lora" in arguments
    assert (pairs["--served-model-name"], pairs["--max-lora-rank"]) == ("mine-base", "16")
    assert json.loads(pairs["--lora-modules"])["name"] == "mine"


def test_what_is_loopback():
    assert [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "127.9.9.9")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "", "::", "192.0.2.7")] == [False] * 4
    with pytest.raises(ConfigError, match="is no address of this machine"):
        is_loopback("no such host")


def test_a_run_file_takes_a_run_or_a_checkpoint_as_its_model(place, monkeypatch):
    monkeypatch.chdir(place)
    weights = place / "whole/checkpoints/step-000002/weights"
    for named in ("whole", str(weights.parent), str(weights)):
        loaded = with_weights_folder(load_config("sft.toml", ["--model.path", named]))
        assert (place / loaded.config.model.path).resolve() == weights
    overrides = ["--model.path", "whole", "--model.thinking", "true"]
    assert prepare(load_config("sft.toml", overrides)).config.model.path.endswith("step-000002/weights")
    with pytest.raises(ConfigError, match=r"holds a LoRA adapter: give its base as model\.path and .*weights as lora"):
        prepare(load_config("sft.toml", ["--model.path", "adapter"]))


@pytest.mark.parametrize("named", ["nope", "nobody/nothing"])
def test_a_name_that_is_nowhere_is_told_at_once(place, monkeypatch, capsys, named):
    """The hub is not reachable here; its libraries would ask it again for half a minute."""
    monkeypatch.chdir(place)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    began = time.monotonic()
    plan = ["plan", "sft.toml", "--model.path", named]
    for command in (plan, ["chat", named, "--message", "x"], ["models", named]):
        with pytest.raises(SystemExit) as ended:
            main(command)
        said = capsys.readouterr().err
        assert ended.value.code == 2
        assert named in said
        assert "the hub cannot be asked for it" in said or "does not exist" in said
    assert time.monotonic() - began < 28
