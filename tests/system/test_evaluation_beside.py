"""Runs in which one of two scripted engines evaluates while training goes on."""

import asyncio
import io
import time
from pathlib import Path

import pytest
from benchmarks.scripted_engine import ScriptedEngine
from rich.console import Console

from slipstream.runlog import read_samples
from slipstream.runlog.ledger import balance
from slipstream.runlog.samples import read_tickets
from slipstream.view import make_view

STEPS = 6
TWO = ("--inference.replicas", "2", "--run.threads", "2", "--training.staleness", "1", "--training.steps", str(STEPS))
BESIDE = (*TWO, "--evaluation.every", "2", "--run.save_samples", "16")
LATER = "eval/steps_later"


class Patient(ScriptedEngine):
    """Answers in an evaluation beside training when another engine is two versions ahead, as it does in none else."""

    may_answer = staticmethod(lambda engine: True)

    async def generate(self, request):
        while request.id.startswith("eval.") and not self.may_answer(self):
            await asyncio.sleep(0.001)
        assert Path(self.location).is_dir(), "what it would be started on again"
        return await super().generate(request)


def patient(scripted, *, steps=STEPS, then=lambda engine: None):
    """For `Scripted.run`: engines that take their time; `then` changes them further."""

    def may_answer(engine):
        newest = max(each.version.step for each in scripted.engines)
        return engine.version.step >= steps or newest >= engine.version.step + 2

    def change(engine):
        engine.may_answer = may_answer
        then(engine)

    return {"kind": Patient, "change": change}


def evaluated(scripted):
    """The evaluated steps, each with how many steps later it was recorded; None for one that all engines made."""
    return {row["step"]: row.get(LATER) for row in scripted.metrics if "eval/accuracy" in row}


def check_versions(folder):
    """All tokens of a held-out sample are of the version that was evaluated."""
    held_out = [sample for sample in read_samples(folder) if sample.get("split") == "eval"]
    assert held_out
    for sample in held_out:
        assert {name for one in sample["sequences"] for _, name in one["versions"]} == {f"0.{sample['step']}"}


def test_evaluations_come_later_at_their_own_step_and_the_last_is_made_by_all(scripted):
    text = io.StringIO()
    view = make_view("plain", Console(file=text, width=200))
    scripted.finish(STEPS, *BESIDE, **patient(scripted), view=view)
    assert evaluated(scripted) == {0: 2.0, 2: 2.0, 4: 2.0, 6: None}
    assert [row["step"] for row in scripted.metrics] == [*range(STEPS + 1)]
    assert all(row["probe/abs_logprob_diff"] < 1e-5 for row in scripted.metrics)
    assert all(row["eval/beside_s"] > 0 for row in scripted.metrics if LATER in row)
    assert max(row.get("staleness/max", 0.0) for row in scripted.metrics) == 1.0
    assert [event["step"] for event in scripted.events("evaluation_began")] == [0, 2, 4]
    check_versions(scripted.folder)
    assert "evaluation of step 2:  accuracy " in text.getvalue()
    assert {engine.version.step for engine in scripted.engines} == {STEPS}
    # The evaluation of step 4 went on when the last version was published.
    assert sorted(path.name for path in (scripted.folder / "weights").iterdir()) == ["0.4", "0.5", "0.6"]
    assert [ticket.version.step for ticket in read_tickets(scripted.folder)] == [4, 5, 6]
    assert balance(scripted.folder).num("trained") == STEPS * 4


def test_one_is_recorded_after_the_step_in_which_it_ended_and_not_when_the_next_begins(scripted):
    options = (*TWO, "--training.steps", "9", "--evaluation.every", "9")
    scripted.finish(9, *options, **patient(scripted, steps=9, then=lambda engine: slower_and_slower(scripted, engine)))
    later = evaluated(scripted)
    assert later.pop(9) is None
    # The engine may answer when the trainer is two versions ahead.
    assert 2.0 <= later.pop(0) < 9.0
    assert not later


def slower_and_slower(scripted, engine):
    """Have the batches from version 3 on take longer and longer, until an evaluation is recorded."""
    generate = engine.generate

    async def slowly(request):
        if not request.id.startswith(("eval.", "probe")) and engine.version.step >= 3:
            until = time.monotonic() + 0.05 * 4 ** (engine.version.step - 3)
            while time.monotonic() < until and not evaluated(scripted):
                await asyncio.sleep(0.02)
        return await generate(request)

    engine.generate = slowly


@pytest.mark.full
def test_without_staleness_the_numbers_of_the_steps_are_the_same_where_it_is_asked_for(scripted, tmp_path):
    options = ("--inference.replicas", "2", "--run.threads", "2", "--evaluation.every", "1")
    names = ("train/loss", "train/grad_norm", "reward/mean", "eval/accuracy", "probe/abs_logprob_diff")
    rows = []
    for beside in ("false", "true"):
        scripted.folder = tmp_path / beside
        assert scripted.run(*options, "--evaluation.beside", beside).status == "finished"
        rows.append([[row.get(name) for name in names] for row in scripted.metrics])
    assert rows[0] == rows[1]


def test_an_engine_that_dies_while_it_evaluates_is_started_again_on_its_version(scripted):
    killed = []

    def on_request(engine, request):
        if request.id.startswith("eval.") and engine.version.step == 2 and not killed:
            killed.append(engine)
            engine.kill()

    scripted.finish(STEPS, *BESIDE, **patient(scripted), on_request=on_request)
    assert len(killed) == 1
    assert evaluated(scripted) == {0: 2.0, 2: 2.0, 4: 2.0, 6: None}
    assert {row["eval/num_failed"] for row in scripted.metrics if "eval/num_failed" in row} == {0.0}
    check_versions(scripted.folder)


@pytest.mark.full
def test_a_token_of_another_version_is_an_error_and_no_figure(scripted):
    def on_request(engine, request):
        if request.id.startswith("eval.3") and engine.version.step == 2:
            engine.version, engine.may_answer = scripted.engines[0].version, lambda engine: True

    report = scripted.run(*BESIDE, **patient(scripted), on_request=on_request)
    assert report.error == "IntegrityError"
    assert "of the evaluation of version 0.2 holds tokens of version 0." in report.message
    assert evaluated(scripted) == {0: 2.0}


@pytest.mark.full
@pytest.mark.parametrize("dies_at", [4, 7])
def test_one_that_a_dead_run_left_is_made_again_or_told_as_missing(scripted, dies_at):
    """The other engine dies for good while step 4 is evaluated. Version 4 is in the last checkpoint, or is not."""

    def on_request(engine, request):
        if not request.id.startswith("eval.") and engine.version.step == dies_at:
            engine._max_restarts = 0
            engine.kill()

    def then(engine):
        engine.may_answer = lambda engine: engine.version.step == 0

    options = (*TWO, "--training.steps", "8", "--evaluation.every", "4", "--run.checkpoint_every", "1")
    report = scripted.run(*options, **patient(scripted, then=then), on_request=on_request)
    assert report.error == "EngineError"
    assert evaluated(scripted).keys() == {0}
    assert scripted.events("checkpoint")[-1]["step"] == dies_at
    scripted.finish(8, *options, **patient(scripted, steps=8), resume=True)
    missing = [event["message"] for event in scripted.events("warning") if "is missing" in event["message"]]
    if dies_at == 4:
        assert (evaluated(scripted).keys(), missing) == ({0, 4, 8}, [])
        # Its engine may answer when the trainer is two versions ahead; the next evaluation waits for it at step 8.
        assert 2.0 <= evaluated(scripted)[4] <= 4.0
    else:
        assert evaluated(scripted).keys() == {0, 8}
        assert [text[:37] for text in missing] == ["the evaluation of step 4 had not ended"[:37]]


@pytest.mark.full
def test_a_run_ends_some_steps_after_the_accuracy_that_ends_it_and_its_last_version_is_evaluated(scripted):
    options = (*BESIDE, "--evaluation.stop_at", "0.05", "--evaluation.beside", "true")
    scripted.finish(2, *options, **patient(scripted, steps=2))
    assert "reached evaluation.stop_at = 0.05" in scripted.events("early_stop")[0]["reason"]
    assert evaluated(scripted) == {0: 2.0, 2: None}


@pytest.mark.full
def test_the_best_checkpoint_is_that_of_the_step_that_was_evaluated(scripted):
    """Step 2 is the best: only its version is right."""
    right, wrong = scripted.say("a"), scripted.say("b")

    def then(engine):
        letter, engine.judged = engine._script, None
        engine._script = lambda prompt, seed: engine.judged or letter(prompt, seed)

    def on_request(engine, request):
        engine.judged = None
        if request.id.startswith("eval."):
            engine.judged = right if engine.version.step == 2 else wrong

    options = (*BESIDE, "--evaluation.patience", "9", "--evaluation.beside", "true", "--run.keep_weights", "1")
    how = {**patient(scripted, then=then), "on_request": on_request}
    scripted.finish(STEPS, *options, "--run.keep_checkpoints", "1", **how)
    folder = scripted.folder / "checkpoints"
    assert (folder / "best").resolve() == folder / "step-000002"
    assert {event["step"]: event["accuracy"] for event in scripted.events("best")}[2] == 1.0
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-000002", "step-000006"]
