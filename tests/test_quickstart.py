"""The quickstart's program and its run files are the same runs; what the program shows, and where it ends."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import slipstream
from slipstream.config import load_config, load_settings
from slipstream.python import entry_points

from .programs import program

FOLDER = Path(__file__).parents[1] / "examples" / "quickstart"
ACCURACY = {"sft": 0.48, "grpo": 0.946, "control": 0.614}


def row(step, accuracy):
    low, high = accuracy - 0.04, accuracy + 0.04
    times = {f"time/{part}_s": 0.5 for part in ("batch", "train", "update", "probe")}
    found = {"eval/accuracy": accuracy, "eval/accuracy_low": low, "eval/accuracy_high": high}
    return {"step": step, "probe/abs_logprob_diff": 1e-6, **times, **found}


@pytest.fixture
def quickstart(monkeypatch, tmp_path):
    """Runs the program on runs that are over at once; `calls` are those that it asked for."""
    found = SimpleNamespace(calls=[], status="finished", accuracy=dict(ACCURACY), folder=tmp_path / "quickstart")

    def run(command, tree, objects, on_step, **options):
        found.calls.append((command, tree))
        folder = Path(tree["run"]["folder"])
        rows = [row(0, 0.0), row(1, found.accuracy[folder.name])]
        return SimpleNamespace(
            folder=folder, rows=rows, accuracy=rows[-1]["eval/accuracy"], weights=folder / "checkpoints/weights",
            status=found.status, step=1, report=lambda out: out,
        )  # fmt: skip

    def main(*arguments):
        monkeypatch.setattr(sys, "argv", ["run.py", "--folder", str(found.folder), *arguments])
        module.main()

    found.main = main
    monkeypatch.setattr(entry_points, "_run", run)
    monkeypatch.setattr(slipstream, "new_model", lambda folder, **options: folder, raising=False)
    with program(FOLDER / "run.py", "quickstart") as module:
        monkeypatch.setattr(module, "NUM_DEMONSTRATIONS", 50)
        yield found


def settings(config):
    return config.model_dump(exclude={"model": {"path"}, "data": {"path"}, "run": {"folder"}})


def test_the_run_files_say_the_same(quickstart):
    quickstart.main()
    for (command, tree), file in zip(quickstart.calls, ("sft.toml", "grpo.toml"), strict=False):
        asked = load_settings(tree, algorithm="sft" if command == "sft" else None).config
        assert settings(asked) == settings(load_config(FOLDER / file).config), file
    assert [command for command, _ in quickstart.calls] == ["sft", "train", "sft"]
    first, _, control = (tree for _, tree in quickstart.calls)
    assert control["training"] == {**first["training"], "steps": 100_000, "max_seconds": 2}
    rows = (quickstart.folder / "demonstrations.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(rows) == 50


def test_what_is_shown(quickstart, capsys):
    quickstart.main("--seed", "3")
    said = capsys.readouterr().out
    for line in ("after SFT +│ 48.0 % \\(44.0 to 52.0\\)", "after GRPO from there +│ 94.6 %", "control.*│ 61.4 %"):
        assert re.search(line, said), said
    assert "GRPO added +46.6 points" in said
    assert all(tree["run"]["seed"] == 3 for _, tree in quickstart.calls)


def test_a_poor_result_is_an_error(quickstart):
    quickstart.accuracy["grpo"] = 0.8
    with pytest.raises(SystemExit, match="expected at least 25 points more and 85 %"):
        quickstart.main()


def test_it_ends_with_a_run_that_was_stopped(quickstart):
    quickstart.status = "interrupted"
    with pytest.raises(SystemExit, match="interrupted at step 1"):
        quickstart.main()
    assert len(quickstart.calls) == 1
