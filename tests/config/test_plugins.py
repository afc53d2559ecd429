"""A method in a foreign package: its section, its errors, and a run on two models of the same loss."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.runlog import read_exit, read_metrics

PLUGIN = Path(__file__).parents[2] / "examples" / "plugin"


@pytest.fixture
def installed(tmp_path):
    """The variables of a process that has the package installed."""
    shutil.copytree(PLUGIN / "first_token", tmp_path / "site" / "first_token")
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    metadata = tmp_path / "site" / "first_token-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: first-token\nVersion: 1.0\n")
    ((group, points),) = project["entry-points"].items()
    lines = [f"{name} = {value}" for name, value in points.items()]
    (metadata / "entry_points.txt").write_text(f"[{group}]\n" + "\n".join(lines))
    path = [str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


SETTINGS = """
import json, sys
from slipstream.config import load_settings
from slipstream.errors import ConfigError
given = {"model": {"path": "m"}, "environment": {"name": "rows", "settings": {"path": "r.jsonl"}},
         "algorithm": {"kind": "sft"}, "training": {"steps": 3}}
found = []
for change in json.loads(sys.argv[1]):
    try:
        config = load_settings({k: v for k, v in (given | change).items() if v is not None}).config
        found.append([type(config.method).__name__, config.method.weight])
    except ConfigError as error:
        found.append(str(error))
assert not {"torch", "transformers"} & sys.modules.keys()
print(json.dumps(found))
"""


def test_its_section_is_like_any_other(installed):
    changes = [
        {"first_token": {"weight": 3.0}},
        {"first_token": {"weight": -1.0}},
        {"first_token": {"wieght": 3.0}},
        {"first_token": {}, "algorithm": {"kind": "grpo"}},
        {"first_token": {}, "matching": {}},
        {"first_token": {}, "environment": None, "data": {"path": "r.jsonl"}},
    ]
    command = [sys.executable, "-c", SETTINGS, json.dumps(changes)]
    done = subprocess.run(command, env=installed, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    right, *wrong = json.loads(done.stdout)
    assert right == ["FirstToken", 3.0]
    sentences = ("first_token.weight = -1.0", "did you mean first_token.weight?", "applies to sft, not to grpo")
    for text, sentence in zip(wrong, (*sentences, "a run trains by one method", "needs an environment"), strict=True):
        assert sentence in text, text


@pytest.mark.full
def test_it_trains(installed, tmp_path):
    new_model(tmp_path / "model", num_layers=1, hidden_size=64, num_heads=2, num_kv_heads=1)
    losses, section = {}, "[first_token]\nweight = 3.0\n"
    text = (PLUGIN / "run.toml").read_text()
    assert section in text
    for name, weight in (("plain", None), ("one", 1.0), ("nine", 9.0)):
        run_file = tmp_path / f"{name}.toml"
        run_file.write_text(text.replace(section, "" if weight is None else section.replace("3.0", str(weight))))
        folder = tmp_path / name
        command = [sys.executable, "-m", "slipstream", "sft", str(run_file), "--no-evaluation"]
        command += ["--model.path", str(tmp_path / "model"), "--run.folder", str(folder), "--run.threads", "1"]
        command += ["--training.steps", "3"]
        done = subprocess.run(command, env=installed, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        assert read_exit(folder).status == "finished"
        losses[name] = [row["train/loss"] for row in read_metrics(folder)]
    assert losses["one"] == pytest.approx(losses["plain"], rel=1e-6)
    assert losses["nine"] != pytest.approx(losses["plain"], rel=1e-3)
