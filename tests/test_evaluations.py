"""Files of kept results."""

import json
import os
import stat

import msgspec
import pytest

from slipstream.errors import ConfigError, DataError
from slipstream.records import Message
from slipstream.runlog.evaluations import (
    KeptEvaluation,
    KeptSample,
    KeptTask,
    figures_of,
    find_evaluation,
    keep_evaluation,
    new_place,
    prompt_digest,
    read_evaluation,
    refuse_taken,
    sources_of,
)


def evaluation(*rows, **changes):
    """An evaluation of tasks with these samples, 1 for right and 0 for wrong."""
    tasks = [
        KeptTask(
            f"eval/{number}", "", prompt_digest([Message("user", f"q{number}")]), f"q{number}", "a",
            [KeptSample("ab"[not right], float(right), bool(right), "done") for right in row],
        )
        for number, row in enumerate(rows)
    ]  # fmt: skip
    settings = {"environment.name": "letters", "evaluation.threshold": 1.0} | changes.pop("settings", {})
    return msgspec.structs.replace(
        KeptEvaluation(model="m", time=1.0, settings=settings, metrics={}, tasks=tasks), **changes
    )


def test_are_private_whole_and_read_back(tmp_path):
    kept = evaluation([1, 0], [1, 1])
    before = os.umask(0)
    try:
        keep_evaluation(tmp_path / "kept.json", kept)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "kept.json").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["kept.json"]
    assert read_evaluation(tmp_path / "kept.json") == kept
    plain = json.loads((tmp_path / "kept.json").read_text())
    assert plain["schema"] == 1
    assert plain["tasks"][0]["samples"][0]["text"] == "a"


def test_are_never_overwritten(tmp_path):
    path = tmp_path / "kept.json"
    keep_evaluation(path, evaluation([1]))
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"kept\.json exists already.*--out"):
        refuse_taken(path)
    with pytest.raises(ConfigError, match="made by another process meanwhile"):
        keep_evaluation(path, evaluation([0]))
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["kept.json"]
    with pytest.raises(ConfigError, match="is not a folder"):
        refuse_taken(tmp_path / "nowhere" / "kept.json")


def test_a_run_keeps_several_and_means_its_newest(tmp_path):
    (tmp_path / "events.jsonl").touch()
    with pytest.raises(ConfigError, match="has no kept evaluation: make one with `slipstream eval"):
        find_evaluation(tmp_path)
    for number in range(3):
        keep_evaluation(new_place(tmp_path), evaluation([number == 2]))
    assert len(list((tmp_path / "evaluations").iterdir())) == 3
    assert stat.S_IMODE((tmp_path / "evaluations").stat().st_mode) == 0o700
    assert read_evaluation(find_evaluation(tmp_path)).tasks[0].accuracy == 1.0
    for number in (9, 10):  # all of one second, and of one tick of the file system's clock
        keep_evaluation(tmp_path / "evaluations" / f"20260101-000000-{number}.json", evaluation([number == 10]))
    keep_evaluation(tmp_path / "evaluations" / "20260101-000000.json", evaluation([0]))
    for path in (tmp_path / "evaluations").glob("20260101-*"):
        os.utime(path, (2e9, 2e9))
    assert find_evaluation(tmp_path).name == "20260101-000000-10.json"
    with pytest.raises(ConfigError, match="does not exist: name a file"):
        find_evaluation(tmp_path / "none")
    with pytest.raises(ConfigError, match="holds no run: name a file"):
        find_evaluation(tmp_path / "evaluations")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "holds no kept results"),
        ("{}", "holds no kept results"),
        ('{"schema": 2}', "schema 2, and this Slipstream reads 1"),
        ('{"schema": 1, "model": 3}', "holds no kept results"),
        ("\xff", "holds no kept results"),
    ],
)
def test_other_files_are_refused(tmp_path, content, problem):
    (tmp_path / "file").write_text(content, encoding="latin-1")
    with pytest.raises(DataError, match=problem):
        read_evaluation(tmp_path / "file")


def test_tasks_that_cannot_be_paired_are_refused(tmp_path):
    twice = evaluation([1], [0])
    twice.tasks[1] = twice.tasks[0]
    for number, (given, problem) in enumerate(((evaluation([1], []), "no sample of task eval/1"), (twice, "one id"))):
        path = tmp_path / f"{number}.json"
        keep_evaluation(path, given)
        with pytest.raises(DataError, match=problem):
            read_evaluation(path)


def test_figures_are_found_by_their_names():
    metrics = {
        "eval/best@4": 0.5, "eval/best@4_low": 0.4, "eval/best@4_high": 0.6, "eval/mean@16": 0.2, "eval/best@2": None,
        "eval/reward/mean@16": 0.3, "eval/source/a/b/accuracy": 1.0, "eval/source/a/b/mean@16": 1.0,
    }  # fmt: skip
    assert figures_of(metrics) == {"mean@16": (0.2, None, None), "best@4": (0.5, 0.4, 0.6)}
    assert sources_of(metrics) == ["a/b"]
    assert figures_of(metrics, "eval/source/a/b") == {"mean@16": (1.0, None, None)}
