"""What `slipstream eval` evaluates: run files, runs, checkpoints, models and adapters."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.commands.evaluation_target import find_target
from slipstream.commands.results import place_of
from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.errors import ConfigError
from slipstream.launch.prepare import prepare
from slipstream.processes.files import write_whole

SFT = """
[model]
path = "model"
[data]
path = "rows.jsonl"
[environment]
name = "task.py"
[algorithm]
kind = "sft"
[training]
steps = 1
prompts_per_batch = 2
[evaluation]
num_tasks = 4
[run]
threads = 1
"""
TASK = """
def tasks(split, num_tasks, seed):
    return [{"prompt": f"{split} {i}", "answer": "a"} for i in range(min(num_tasks, 6))]

def reward(task, completion):
    return float(completion == task.answer)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, a run file with a task, and two runs on it: `whole`, and `adapter` with LoRA."""
    folder = tmp_path_factory.mktemp("targets")
    new_model(folder / "model", hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1, context_length=64)
    rows = [{"prompt": letter, "completion": letter.upper()} for letter in "ab"]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "task.py").write_text(TASK)
    (folder / "sft.toml").write_text(SFT)
    for name, more in (("whole", []), ("adapter", ["--lora.rank", "12", "--lora.target_modules", '["q_proj"]'])):
        rest = ["--json", "--evaluation", "false", "--run.folder", str(folder / name), *more]
        with pytest.raises(SystemExit) as ended:
            main(["sft", str(folder / "sft.toml"), *rest])
        assert ended.value.code == 0
    return folder


def weights(place, run):
    return place / run / "checkpoints/step-000001/weights"


ON = ("--evaluation.num_tasks", "3", "--environment.name")
"""The runs were made without an evaluation."""


@pytest.mark.parametrize("part", ["", "checkpoints/step-000001", "checkpoints/step-000001/weights"])
def test_a_run_or_its_checkpoint_is_its_last_weights_on_its_tasks(place, part):
    named = place / "whole" / part
    target = find_target(named, None, (*ON, str(place / "task.py")))
    assert target.loaded.config.model.path == str(weights(place, "whole"))
    assert target.loaded.config.data.path == str(place / "rows.jsonl")
    assert target.run.resolve() == place / "whole"
    assert place_of(target, None).parent == target.run / "evaluations"
    assert target.name == str(named)


def test_what_makes_trainer_and_engine_agree_is_left_to_the_machine(place):
    resolved = place / "whole" / "resolved.toml"
    text = resolved.read_text()
    settings = text.replace("\nshared_kernels = false", "\nshared_kernels = true")
    assert settings != text
    resolved.write_text(settings)
    try:
        config = find_target(place / "whole", None, (*ON, str(place / "task.py"))).loaded.config
        asked = find_target(place / "whole", None, ("--model.shared_kernels", "true", *ON, str(place / "task.py")))
    finally:
        resolved.write_text(text)
    assert config.model.shared_kernels == "auto"
    assert asked.loaded.config.model.shared_kernels is True


def test_an_adapter_run_is_its_base_and_the_adapter(place):
    for named, model in ((place / "adapter", None), (place / "sft.toml", str(weights(place, "adapter")))):
        overrides = (*ON, str(place / "task.py")) if model is None else ()
        target = find_target(named, model, overrides)
        config = target.loaded.config
        assert config.model.path == str(place / "model")
        assert config.lora.path == str(weights(place, "adapter"))
        assert (config.lora.rank, config.lora.alpha, config.lora.target_modules) == (12, 32.0, ("q_proj",))
        assert target.run.resolve() == place / "adapter"
        prepared = prepare(target.loaded)
        assert prepared.config.lora.path == config.lora.path
        assert [task.id for task in prepared.eval_tasks] == [f"eval/{n}" for n in range(len(prepared.eval_tasks))]


def test_another_model_on_a_run_files_tasks(place):
    target = find_target(place / "sft.toml", None, ())
    assert (target.name, target.run) == (str(place / "model"), None)
    assert place_of(target, None) is None
    other = find_target(place / "sft.toml", str(place / "whole"), ())
    assert other.loaded.config.model.path == str(weights(place, "whole"))
    assert place_of(other, None).parent == place / "whole/evaluations"
    # A run's tasks, and a model that is not its own: nothing of it goes into the run's folder.
    foreign = find_target(place / "whole", str(place / "model"), (*ON, str(place / "task.py")))
    assert (foreign.loaded.config.model.path, foreign.run) == (str(place / "model"), None)
    address = find_target(place / "sft.toml", "https://host/v1/", ())
    assert (address.address, address.run) == ("https://host/v1", None)


def test_a_whole_model_takes_the_place_of_an_adapter(place):
    shape = ("--lora.rank", "12", "--lora.target_modules", '["q_proj"]')
    overrides = (*shape, "--lora.path", str(weights(place, "adapter")))
    target = find_target(place / "sft.toml", str(place / "whole"), overrides)
    assert target.loaded.config.lora.path is None
    assert target.loaded.config.model.path == str(weights(place, "whole"))


def test_what_is_missing_is_said(place, tmp_path):
    with pytest.raises(ConfigError, match=r"belongs to no run .*slipstream eval RUN_FILE --model"):
        find_target(place / "model", None, ())
    with pytest.raises(ConfigError, match="run:q2 is a model without tasks: slipstream eval RUN_FILE --model run:q2"):
        find_target(Path("run:q2"), None, [])
    with pytest.raises(ConfigError, match="nowhere does not exist: name a run file, a run, or"):
        find_target(place / "nowhere", None, ())
    (tmp_path / "events.jsonl").touch()
    with pytest.raises(ConfigError, match=r"has no resolved\.toml"):
        find_target(tmp_path, None, ())
    text = (place / "whole/resolved.toml").read_text()
    write_whole(tmp_path / "resolved.toml", text.encode() + b'[environment.settings]\napi_key = "<redacted>"\n')
    with pytest.raises(ConfigError, match="without the secrets in it"):
        find_target(tmp_path, None, ())


def test_a_run_that_cannot_be_written_is_refused_before_the_evaluation(place, monkeypatch):
    target = find_target(place / "whole", None, (*ON, str(place / "task.py")))
    assert place_of(target, None).parent == place / "whole/evaluations"
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match=r"whole cannot be written to, and keeps the results: give --out FILE"):
        place_of(target, None)
