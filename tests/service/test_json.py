"""The JSON of each command of the queue: all its fields, of one real run."""

import json
import os
from pathlib import Path

import pytest

from slipstream.cli import main

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


ESTIMATE = {"shape": str, "steps": STEPS, "memory_gib": positive, "gpus": 0, "step_s": None, "rest_s": None, "how": str}
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
        **changes,
    }


def test_every_command_prints_all_its_fields(place, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", f"{SCRIPTED}{os.pathsep}{os.environ['PYTHONPATH']}")
    monkeypatch.setenv("SLIPSTREAM_GPU_HOUR_PRICE", "2.5")
    store, folder = str(tmp_path / "store"), str(tmp_path / "runs/run")

    def asked(*arguments, is_one=True):
        with pytest.raises(SystemExit) as ended:
            main([*map(str, arguments), "--json"])
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert ended.value.code == 0, lines
        return lines[0] if is_one else lines

    file = place.run_file(STEPS, more=f'folder = "{folder}"\n{MORE}')
    same(asked("submit", file, "--to", "local", "--store", store), of_run(folder))
    *pieces, last = asked("logs", "-f", "run", is_one=False)
    finished = {"ended": positive, "exit_code": 0, "kind": "finished", "decision": "finished"}
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
