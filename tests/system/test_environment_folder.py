"""What `slipstream env new` writes can be checked, planned and trained; and so can what is named by digest."""

import re
import sys

import pytest

from slipstream.cli.env_files import environment_files, next_commands
from slipstream.cli.init_files import RL, SFT
from slipstream.runlog import read_settings

from .conftest import Scripted

SMALL = (
    *("--training.steps", "2", "--training.prompts_per_batch", "4", "--evaluation.num_tasks", "8"),
    *("--training.warmup_steps", "0", "--weights.probe_tasks", "2", "--run.threads", "1"),
)


@pytest.fixture
def slipstream(slipstream, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return slipstream


def sorting(scripted):
    """Sorts the digits of every other prompt."""

    def script(prompt_ids, seed):
        text = scripted._tokenizer._tokenizer.decode(prompt_ids)
        digits = re.search(r"Sort: (\d+)", text)[1]
        return scripted.say("".join(sorted(digits)) if seed % 2 else digits[0])

    return script


def trained(model, run_file, folder, *options):
    scripted = Scripted(model, run_file, folder)
    report = scripted.run("--model.path", str(model), *SMALL, *options, script=sorting(scripted))
    assert (report.status, report.step) == ("finished", 2), report.message
    return scripted


@pytest.mark.full
def test_a_new_folder_is_checked_planned_and_trained(slipstream, model, tmp_path, scripted):
    code, out, err = slipstream("env", "new", "mine")
    assert (code, err) == (0, "")
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == sorted(environment_files())
    assert next_commands() in out
    assert next_commands() in (tmp_path / "mine" / "AGENTS.md").read_text()
    assert slipstream("env", "new", "mine")[0] == 2
    for name, text in (("sft.toml", SFT), ("rl.toml", RL)):
        assert "# settings" in text
        written = (tmp_path / "mine" / name).read_text()
        assert "settings" not in written
        assert "about a minute" not in written
        code, out, err = slipstream("plan", f"mine/{name}", "--model.path", model)
        assert code == 0, err
    code, out, err = slipstream("env", "test", "mine/sft.toml", "--num-tasks", "16", "--model.path", model)
    assert code == 0, err
    assert "passed: the rewards of environment tell" in out
    trained(model, tmp_path / "mine" / "sft.toml", tmp_path / "sft")
    rl = trained(model, tmp_path / "mine" / "rl.toml", tmp_path / "rl")
    assert max(row.get("reward/signal_fraction", 0.0) for row in rl.metrics) > 0


@pytest.mark.full
def test_its_own_test_passes(slipstream, tmp_path):
    assert slipstream("env", "new", "mine", "--json")[0] == 0
    names = {}
    folder = str(tmp_path / "mine")
    text = (tmp_path / "mine" / "test_environment.py").read_text()
    sys.path.insert(0, folder)
    try:
        exec(text, names)  # ours
        tests = [found for name, found in names.items() if name.startswith("test_")]
        assert len(tests) == 3
        for test in tests:
            test()
    finally:
        sys.path.remove(folder)
        sys.modules.pop("environment", None)


def test_a_run_by_digest(slipstream, model, tmp_path, scripted):
    assert slipstream("env", "new", "mine")[0] == 0
    code, out, err = slipstream("env", "push", "mine", "registry")
    assert (code, err) == (0, "")
    reference = re.search(r'name = "(mine@[0-9a-f]{64})"', out)[1]
    assert f'registry = "{tmp_path}/registry"' in out
    options = ("--environment.name", reference, "--environment.registry", "registry")
    (tmp_path / "mine" / "environment.py").write_text("raise SystemExit('not this one')")
    code, out, err = slipstream("env", "test", "mine/sft.toml", *options, "--num-tasks", "16", "--model.path", model)
    assert code == 0, err
    rl = trained(model, tmp_path / "mine" / "rl.toml", tmp_path / "rl", *options)
    settings = read_settings(rl.folder)
    assert (settings["environment.name"], settings["environment.registry"]) == (reference, f"{tmp_path}/registry")
    (archive,) = (tmp_path / "registry").rglob("*.tar")
    archive.write_bytes(archive.read_bytes()[:3000])
    assert slipstream("env", "pull", reference, "registry", "again")[0] == 3
    assert slipstream("env", "push", "mine", "registry", "--json")[0] == 0
    assert slipstream("env", "pull", reference[:20], "registry", "again")[0] == 3
