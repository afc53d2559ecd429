"""A plan tells what the last run took of its GPU. There is none here: one is as if measured."""

import json
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.config import load_config
from slipstream.launch.prepare import prepare
from slipstream.launch.run import train
from slipstream.plan import measure
from slipstream.plan.memory.cards import Gpus
from slipstream.plan.memory.sizes import GIB
from slipstream.runlog import read_events
from slipstream.trainer import learner
from slipstream.view import make_view

LETTERS = Path(__file__).with_name("letters.py")

SFT = """
evaluation = false
[model]
path = "{model}"
[environment]
name = "{environment}"
num_train_tasks = 400
[algorithm]
kind = "sft"
[training]
steps = 1
prompts_per_batch = 400
[run]
threads = 1
"""
CARD_BYTES = int((2 * GIB + 17e6) / 0.96)
"""So small that memory bounds the rows of a small model."""


@pytest.fixture
def card(monkeypatch):
    """A card on which a trainer holds `card["factor"]` times what was planned."""
    values = {"factor": 1.0}

    def metrics(device, planned_bytes, longest_row):
        held = values["factor"] * planned_bytes / GIB
        sizes = {"peak_gib": 0.9 * held, "held_gib": held, "planned_gib": planned_bytes / GIB}
        return {f"memory/trainer_{name}": size for name, size in (sizes | {"row_tokens": longest_row}).items()}

    monkeypatch.setattr(measure, "describe_gpus", lambda: Gpus(1, CARD_BYTES))
    monkeypatch.setattr(learner, "memory_metrics", metrics)
    return values


@pytest.fixture
def file(model, tmp_path):
    path = tmp_path / "sft.toml"
    path.write_text(SFT.format(model=model, environment=LETTERS))
    return path


@pytest.fixture
def prepared(file, tmp_path):
    """Prepares a run in the folder of that name."""

    def make(name, *settings):
        return prepare(load_config(file, ("--run.folder", str(tmp_path / "runs" / name), *settings)))

    return make


def test_a_plan_tells_what_the_last_run_took_and_keeps_its_values(card, prepared, capsys, file, tmp_path):
    first = prepared("a")
    assert first.plan.notices == ()
    card["factor"] = 1.1
    made = train(first, first.config.run.folder, make_view("none")).folder
    (recorded,) = [event for event in read_events(made) if event["kind"] == "memory"]
    assert recorded["held_gib"] == pytest.approx(1.1 * first.plan.trainer_bytes / GIB)
    assert 0 < recorded["row_tokens"] <= first.config.training.micro_batch_tokens

    held, planned = (f"{factor * first.plan.trainer_bytes / GIB:.2f} GiB" for factor in (1.1, 1.0))
    took = f"its trainer took {held} of a GPU's memory where {planned} were estimated"
    says = f"{made} is the last run of this model: {took}"
    for name in ("a", "b"):
        again = prepared(name).plan
        assert (again.derived, again.notes, again.notices) == (first.plan.derived, first.plan.notes, (says,))

    for options in ((), ("--json",)):
        with pytest.raises(SystemExit, match=r"^0$"):
            main(["plan", str(file), "--run.folder", str(tmp_path / "runs" / "c"), *options])
        shown = capsys.readouterr().out
        assert "were estimated" in (json.loads(shown)["earlier_runs"][0] if options else " ".join(shown.split()))
