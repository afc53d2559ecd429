"""What a run was made with is recorded, and a resume with something else is refused or allowed by name."""

import contextlib
import json
import os
import shutil
import sys

import pytest
from safetensors.torch import load_file, save_file

from slipstream.errors import ConfigError, DataError, StartsAgain
from slipstream.launch.recovery import retry_policy
from slipstream.runlog.ledger import balance

from .conftest import LETTERS

HELPED = "from its_tasks import tasks\n\n\ndef reward(task, completion):\n    return float(completion == task.answer)\n"
WEIGHTS = "model.safetensors"
EVERY = ("--run.checkpoint_every", "1", "--evaluation", "false")
SFT = ("--algorithm.kind", "sft", *EVERY)


@pytest.fixture
def environment(tmp_path):
    """An environment of the user's, whose tasks come from a module beside it; and a module that it does not import."""
    folder = tmp_path / "mine"
    folder.mkdir()
    shutil.copy(LETTERS, folder / "its_tasks.py")
    (folder / "other.py").write_text("raise SystemExit('never imported')\n")
    path = folder / "mine.py"
    path.write_text(HELPED)
    return path


@pytest.fixture
def run(scripted):
    """Runs so many steps of SFT; `refused` is the sentence where it does not start."""

    def run(environment, *options, steps, resume=True):
        sys.modules.pop("its_tasks", None)  # each start is a process of its own
        name = ("--environment.name", str(environment)) if environment else ()
        return scripted.run(*SFT, *name, "--training.steps", str(steps), *options, resume=resume)

    def refused(*given, kind=ConfigError, **more):
        before = contents(scripted.folder)
        with contextlib.suppress(AssertionError):  # there is no new report of how it ended
            run(*given, **more)
        assert type(scripted.error) is kind, scripted.error
        assert contents(scripted.folder) == before, "nothing is changed"
        assert "\n" not in str(scripted.error)
        return str(scripted.error)

    run.refused = refused
    return run


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "run.lock"}


def attempts(scripted):
    return json.loads((scripted.folder / "provenance.json").read_text())["attempts"]


def warned(scripted, text):
    return [event for event in scripted.events("warning") if text in event["message"]]


def test_it_is_recorded_compared_and_allowed_by_name(scripted, run, environment, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "hunter2-hunter2")
    run(environment, "--environment.variables", '["JUDGE_API_KEY"]', steps=1, resume=False)
    (first,) = attempts(scripted)
    code = {each["name"]: each for each in first["sources"] if each["kind"] == "environment"}
    assert sorted(code) == ["its_tasks.py", "mine.py"], "and not what it does not import"
    assert code["mine.py"]["path"] == str(environment)
    tokenizer = {each["name"] for each in first["sources"] if each["kind"] == "tokenizer"}
    assert tokenizer >= {"tokenizer.json", "tokenizer_config.json", "chat template"}
    assert first["versions"].keys() >= {"slipstream", "torch", "transformers"}
    assert "hunter2" not in (scripted.folder / "provenance.json").read_text()

    moved = environment.parent.rename(environment.parent.with_name("moved")) / "mine.py"
    os.utime(moved, (1, 1))
    assert run(moved, steps=2).status == "finished", "the same, elsewhere and with other times"
    assert [each["lineage"] for each in attempts(scripted)] == [0, 1]

    moved.write_text(HELPED + "# graded otherwise\n")
    for options in ((), ("--run.allow_changes", '["tools"]')):
        told = run.refused(moved, *options, steps=3)
        assert f"another environment: {moved} was {code['mine.py']['digest'][:12]} and is " in told
        assert '"environment"' in told
    assert run(moved, "--run.allow_changes", '["environment"]', steps=3).status == "finished"
    assert str(moved) in attempts(scripted)[-1]["changed"][0]
    assert len(warned(scripted, "as run.allow_changes says")) == 1
    assert run(moved, steps=4).status == "finished", "the checkpoint is the new environment's"
    assert not warned(scripted, "run.allow_changes was")


def test_another_base_or_other_tasks_by_settings_are_refused_before_the_run_is_touched(scripted, run, model, tmp_path):
    base = shutil.copytree(model, tmp_path / "base")
    lora, weights = ("--lora.rank", "2", "--model.path", str(base)), load_file(base / WEIGHTS)
    run(None, *lora, steps=1, resume=False)
    save_file(weights, base / WEIGHTS, {"written": "again"})
    assert run(None, *lora, steps=2).status == "finished", "the same weights"
    for other, said in (
        (("--environment.settings", '{letters = "ab"}'), "other training items than there are now: resume with"),
        (("--environment.num_train_tasks", "12"), "64 training items, now there are 12"),
    ):
        assert f"made with {said}" in run.refused(None, *lora, *other, steps=3)
    save_file({name: 1.5 * each for name, each in weights.items()}, base / WEIGHTS, {"format": "pt"})
    assert "made with other weights at model.path than there are now" in run.refused(None, *lora, steps=3)


@pytest.mark.full
def test_rows_rewards_and_tokenizer(scripted, run, model, tmp_path):
    rows, reward, own = tmp_path / "rows.jsonl", tmp_path / "reward.py", tmp_path / "model"
    lines = [json.dumps({"prompt": f"say {i}", "answer": "a"}) + "\n" for i in range(40)]
    rows.write_text("".join(lines))
    reward.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n")
    shutil.copytree(model, own)
    settings = ("--environment.settings.path", str(rows), "--environment.settings.reward", f"{reward}")
    given = ("rows", *settings, "--model.path", str(own))
    run(*given, steps=1, resume=False)
    sources = attempts(scripted)[0]["sources"]
    (data,) = (each for each in sources if each["kind"] == "data")
    assert (data["num_rows"], data["size_bytes"], data["path"]) == (40, rows.stat().st_size, str(rows))
    assert {each["name"] for each in sources if each["kind"] == "reward"} == {"reward.py"}

    rows.write_text("".join([*lines, lines[0].replace("say", "tell")]))
    reward.write_text(reward.read_text() + "\n")
    (own / "tokenizer_config.json").write_text((own / "tokenizer_config.json").read_text() + " ")
    told = run.refused(*given, steps=2)
    assert "another data, reward and tokenizer: " in told
    assert all(f"{path} was " in told for path in (rows, reward, own / "tokenizer_config.json"))
    assert "another reward: " in run.refused(*given, "--run.allow_changes", '["data", "tokenizer"]', steps=2)
    allowed = ("--run.allow_changes", '["data", "reward", "tokenizer"]')
    assert run(*given, *allowed, steps=2).status == "finished", "with 41 rows"
    (scripted.folder / "provenance.json").write_text("{")
    assert "remove it to resume without comparing" in run.refused(*given, steps=3, kind=DataError)
    (scripted.folder / "provenance.json").unlink()
    assert run(*given, steps=3).status == "finished", "as a run of an earlier version"
    assert len(attempts(scripted)) == 1


@pytest.mark.full
def test_other_versions_warn_once_and_the_checkpoints_attempt_counts(scripted, run, environment):
    run(environment, steps=1, resume=False)
    path = scripted.folder / "provenance.json"
    found = json.loads(path.read_text())
    found["attempts"][0]["versions"]["transformers"] = "4.0"
    started = {**found["attempts"][0], "lineage": 7, "sources": []}  # and made no checkpoint
    path.write_text(json.dumps({**found, "attempts": [*found["attempts"], started]}))
    assert run(environment, steps=2).status == "finished"
    assert run(environment, steps=3).status == "finished"
    (told,) = warned(scripted, "other versions")
    assert "transformers was 4.0 and is " in told["message"]


def test_an_automatic_restart_survives_an_edit_and_uses_nothing_of_the_old_code(scripted, environment, monkeypatch):
    monkeypatch.setattr(retry_policy, "FIRST_WAIT_S", 0.01)
    name = ("--environment.name", str(environment), "--training.steps", "5")
    ahead = ("--training.staleness", "1")
    with pytest.raises(StartsAgain):
        scripted.run(*EVERY, *name, *ahead, change=lambda engine: dies_when_some_are_ready(scripted, engine))
    environment.write_text(HELPED + "# while the run goes on\n")
    assert scripted.run(*EVERY, *name, *ahead, resume=True).status == "finished"
    assert warned(scripted, "the run goes on by itself with the environment as it is now")
    assert str(environment) in attempts(scripted)[-1]["changed"][0]
    ended = balance(scripted.folder)
    assert ended.num_open == 0
    reasons = {entry.reason for entry in ended.entries if entry.state == "dropped"}
    assert reasons == {"other settings"}, "what the old reward graded is not trained on"


def dies_when_some_are_ready(scripted, engine):
    """The engine dies with its weights, at a group of the third batch, when another group waits for its batch."""
    generate = engine.generate

    async def dies(request):
        if request.group_id == "2.3":
            await scripted.until_a_group_waits(2)
            engine.is_in_memory_only, engine.is_alive = True, False
        return await generate(request)

    engine.generate = dies
