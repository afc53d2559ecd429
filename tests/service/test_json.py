"""The JSON of each command of the queue: all its fields, of one real run."""

import json
import os
import shutil
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.cli.service import untested
from slipstream.plan.families import FAMILIES

from .conftest import GRPO
from .scripted.wandb import URL

pytestmark = pytest.mark.real_start
SCRIPTED = Path(__file__).with_name("scripted")
STEPS = 4
MORE = 'sinks = ["wandb"]\ncheckpoint_every = 2\n[lora]\nrank = 2\n'
NUMBER = (int, float)


def positive(value):
    return isinstance(value, NUMBER) and value > 0


def at_least_0(value):
    return isinstance(value, NUMBER) and value >= 0


def same(found, expected, at=""):
    """Compare with a table: a value, a type, a function that says yes, or a dict or list of them."""
    if isinstance(expected, dict):
        assert {*found} == {*expected}, at
        for name, each in expected.items():
            same(found[name], each, f"{at}.{name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), at
        for number, each in enumerate(expected):
            same(found[number], each, f"{at}[{number}]")
    elif isinstance(expected, type):
        assert isinstance(found, expected), (at, found)
    elif callable(expected):
        assert expected(found), (at, found)
    else:
        assert found == expected, at


ESTIMATE = {
    "shape": str,
    "steps": STEPS,
    "memory_gib": positive,
    "gpus": 0,
    "step_s": None,
    "rest_s": None,
    "how": str,
    "is_shared": False,
}
ATTEMPT = {
    "number": 1,
    "started": positive,
    "places": ["cpu"],
    "ended": at_least_0,
    "exit_code": None,
    "kind": None,
    "failure_class": "",
    "message": "",
    "decision": "",
    "saved": 0,
}
RECORD = {
    "steps": STEPS,
    "step_s": positive,
    "rest_s": positive,
    "seconds": positive,
    "gpu_hours": 0,
    "memory_gib": None,
    "queued_s": at_least_0,
    "start_s": lambda found: found["load the trainer's model"] > 0,
    "parts_s": lambda found: found["train"] > 0 and found["batch"] >= 0,
    "uploads_s": positive,
    "tokens_generated": 0,
    "tokens_trained": positive,
    "generated_per_s": None,
    "trained_per_s": positive,
    "peaks_gib": {"host": positive},
    "cost": 0,
    "wandb_url": URL,
    "consoles": {"run": "service/output.log", "supervisor": "service/supervisor.log", "uploads": "service/uploads.log"},
}


def of_run(folder, **changes):
    return {
        "id": "run",
        "folder": folder,
        "owner": str,
        "state": "preparing",
        "reason": "",
        "step": 0,
        "steps": STEPS,
        "model": "tiny",
        "algorithm": "sft",
        "submitted": positive,
        "places": ["cpu"],
        "attempts": [ATTEMPT],
        "estimate": ESTIMATE,
        "estimated_s": None,
        "estimated_cost": None,
        "actual": None,
        "cancel_requested": False,
        "store": str,
        "to": "local",
        "job": "",
        **changes,
    }


@pytest.fixture
def asked(capsys):
    """The answer of a command in JSON, or all its lines."""

    def ask(*arguments, is_one=True, code=0):
        with pytest.raises(SystemExit) as ended:
            main([*map(str, arguments), "--json"])
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert ended.value.code == code, lines
        return lines[0] if is_one else lines

    return ask


def test_every_command_prints_all_its_fields(place, asked, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", f"{SCRIPTED}{os.pathsep}{os.environ['PYTHONPATH']}")
    monkeypatch.setenv("SLIPSTREAM_GPU_HOUR_PRICE", "2.5")
    store, folder = str(tmp_path / "store"), str(tmp_path / "runs/run")
    file = place.run_file(STEPS, more=f'folder = "{folder}"\n{MORE}')
    same(asked("submit", file, "--to", "local", "--store", store), of_run(folder))
    *pieces, last = asked("logs", "-f", "run", is_one=False)
    finished = {"ended": positive, "exit_code": 0, "kind": "finished", "decision": "finished", "saved": STEPS}
    done = of_run(folder, state="done", step=STEPS, places=[], attempts=[ATTEMPT | finished], actual=RECORD)
    same(last, done)
    assert "made all 4 steps" in "".join(piece["output"] for piece in pieces)
    assert all({*piece} == {"output"} for piece in pieces)
    (row,) = asked("status", "run")
    same(row, done)
    same(json.loads((Path(folder) / "service/record.json").read_text())["actual"], RECORD)
    for path in row["actual"]["consoles"].values():
        assert (Path(folder) / path).is_file()
    same(asked("cancel", "run"), done | {"cancelled": False})

    def checkpoint(step, places, can_resume):
        values = {"step": step, "name": f"run:run/step-{step}", "weights": "adapter", "size_bytes": positive}
        return values | {"can_resume": can_resume, "is_best": False, "places": [str] * places}

    same(asked("checkpoints", "run"), [checkpoint(2, 2, False), checkpoint(4, 2, True)])
    cpu = {"place": "cpu", "name": str, "total_gib": positive, "free_gib": positive, "runs": [], "others": []}
    same(asked("gpus"), [cpu])
    summary = {"name": "run", "folder": "runs/run", "status": "finished", "step": STEPS, "total_steps": STEPS}
    summary |= {"reward": None, "accuracy": None, "started": positive, "duration_s": positive, "message": ""}
    same(asked("runs"), [summary | {"model": str}])


def test_the_rows_of_models(place, asked, capsys):
    columns = {"family", "class", "a step of SFT", "rows", "LoRA", "engine on a CPU", "engine on a GPU"}
    columns |= {"float32 head and residual", "same bits", "tested"}
    rows = asked("models")
    assert [row["class"] for row in rows] == [each.architecture for each in FAMILIES]
    for row in rows:
        same(row, {name: bool if name == "tested" else str for name in columns})
    (row,) = asked("models", place.model)
    assert (row["class"], row["tested"], row["engine on a CPU"]) == ("Qwen3ForCausalLM", True, "tested")
    other = place.folder / "other"
    shutil.copytree(place.model, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"architectures": ["OtherForCausalLM"]}))
    (row,) = asked("models", other)
    assert (row["class"], row["tested"]) == ("OtherForCausalLM", False)
    assert untested(str(other)) == "OtherForCausalLM"
    assert untested(str(place.model)) == untested("owner/name") == untested(str(place.folder)) == ""


@pytest.mark.full
def test_smoke_of_a_run_file(place, asked):
    run = {"num_steps": 2, "loss": positive, "grad_norm": positive, "probe": None, "problems": []}
    smoke = ("smoke", place.run_file(100), "--steps", 2, "--folder", place.folder / "smoke")
    same(asked(*smoke), {"folder": str(place.folder / "smoke"), "runs": [run], "healthy": True})
    found = asked(*smoke[:-1], place.folder / "again", "--model.path", place.folder / "nowhere", code=7)
    same(found, {"folder": str, "healthy": False, "runs": [run | {
        "num_steps": 0, "loss": None, "grad_norm": None, "problems": [str]}]})  # fmt: skip
    assert asked("smoke", place.run_file(100), "--channels", "a_only", code=2)["error"] == "ConfigError"


@pytest.mark.service
@pytest.mark.engine
def test_smoke_of_reinforcement_learning(place, asked):
    """With real vLLM: engine and trainer agree."""
    place.template = GRPO
    run = {"num_steps": 2, "loss": float, "grad_norm": positive, "probe": at_least_0, "problems": []}
    found = asked("smoke", place.run_file(100), "--steps", 2, "--folder", place.folder / "smoke")
    same(found, {"folder": str, "runs": [run], "healthy": True})
    assert found["runs"][0]["probe"] < 1e-3
