"""What a run takes of its GPU corrects the plans of the next ones. There is none here: one is as if measured."""

import json
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.config import load_config
from slipstream.launch.plan import measure
from slipstream.launch.plan.memory.sizes import GIB
from slipstream.launch.prepare import prepare
from slipstream.launch.run import train
from slipstream.runlog import read_events, read_settings
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
TOKENS = "training.micro_batch_tokens"
CARD_BYTES = int((2 * GIB + 17e6) / 0.96)
"""So small that memory bounds the rows of a small model."""


@pytest.fixture
def card(monkeypatch):
    """A card on which a trainer holds `card["factor"]` times what was planned."""
    values = {"factor": 1.0, "name": "A card"}

    def metrics(device, planned_bytes, longest_row):
        held = values["factor"] * planned_bytes / GIB
        sizes = {"peak_gib": 0.9 * held, "held_gib": held, "planned_gib": planned_bytes / GIB}
        return {f"memory/trainer_{name}": size for name, size in (sizes | {"row_tokens": longest_row}).items()}

    monkeypatch.setattr(measure, "measure_gpus", lambda: (1, CARD_BYTES))
    monkeypatch.setattr(measure, "name_card", lambda: (values["name"], "2.11.0"))
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


def carry_out(made, resume=False):
    folder = made.config.run.folder
    train(made, folder, make_view("none"), resume=resume)
    return folder


def test_a_run_corrects_the_next_plan_and_a_resumed_run_keeps_its_own(card, prepared, capsys, file, tmp_path):
    first = prepared("a")
    tokens = first.config.training.micro_batch_tokens
    assert tokens < 16_384, "memory bounds the rows"
    card["factor"] = 1.1
    folder = carry_out(first)
    (noted,) = [event for event in read_events(folder) if event["kind"] == "memory"]
    assert noted["settings"] == first.plan.memory_settings
    assert noted["held_gib"] == pytest.approx(1.1 * first.plan.trainer_bytes / GIB)
    assert 0 < noted["row_tokens"] <= tokens

    second = prepared("b")
    assert second.config.training.micro_batch_tokens < tokens
    assert f"corrected by {folder}: " in second.plan.told[0]
    other = carry_out(second)
    assert read_settings(other)[TOKENS] == second.config.training.micro_batch_tokens, "it runs what was planned"
    assert f"derived: {next(d.reason for d in second.plan.derived if d.name == TOKENS)}" in (
        other / "resolved.toml"
    ).read_text().replace('\\"', '"')

    # On a card of another name nothing is known.
    card["name"] = "Another"
    assert prepared("c").config.training.micro_batch_tokens == tokens
    assert "card was A card and is Another" in prepared("c").plan.told[0]
    card["name"] = "A card"

    for name, made in (("a", tokens), ("b", second.config.training.micro_batch_tokens)):
        again = prepared(name, "--training.steps", "2")
        assert again.config.training.micro_batch_tokens == made
        assert "it goes on with the plan that it began with; its trainer took " in again.plan.told[0]
        resumed = carry_out(again, resume=True)
        start = [event for event in read_events(resumed) if event["kind"] == "start"][-1]
        assert all(text.startswith("training.steps ") for text in start["changed"]), start["changed"]
    assert prepared("a", "--training.steps", "2").plan == prepared("a", "--training.steps", "2").plan

    settings = ("--run.folder", str(tmp_path / "runs" / "c"))
    for options in ((), ("--json",)):
        with pytest.raises(SystemExit, match=r"^0$"):
            main(["plan", str(file), *settings, *options])
        shown = capsys.readouterr().out
        assert "corrected by" in (json.loads(shown)["earlier_runs"][0] if options else " ".join(shown.split()))


@pytest.mark.parametrize(
    "text",
    [
        b'not json, but of memory: "memory"\n',
        b'["memory"]\n',
        b'{"kind": "memory", "lineage": 0, "time": 1.0, "peak_gib": 1.0, "held_gib": 2.0, "planned_gib": 2.0}\n',
        b'{"kind": "memory", "peak_gib": "much", "held_gib": null, "row_tokens": true, "settings": {}}\n',
        b'{"kind": "memory", "peak_gib": 1e999, "held_gib": 1.0, "row_tokens": 9, "settings": {}}\n',
        b'{"kind": "memory", "time": "now", "peak_gib": 1, "held_gib": 1, "row_tokens": 9, "settings": "those"}\n',
        None,
    ],
)
@pytest.mark.usefixtures("card")
def test_what_cannot_be_used_is_named_and_left_out(prepared, tmp_path, text):
    alone = prepared("new").plan
    events = tmp_path / "runs" / "old" / "events.jsonl"
    events.parent.mkdir(parents=True)
    events.mkdir() if text is None else events.write_bytes(text)
    (tmp_path / "runs" / "a file").touch()
    plan = prepared("new").plan
    assert (plan.config, plan.derived, plan.warnings) == (alone.config, alone.derived, alone.warnings)
    (told,) = plan.told
    assert told.startswith("what an earlier run tells of its memory cannot be used and corrects nothing: ")
    assert str(events.parent) in told
