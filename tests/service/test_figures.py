"""The measured figures of a run, each from the files of its folder."""

import json

import msgspec
import pytest

from slipstream.errors import ConfigError
from slipstream.plan.times import SHARED_TIMES
from slipstream.plan.times import shared as as_shared
from slipstream.report.markup import Html
from slipstream.service.figures import PRICE, Peaks, gpu_hour_price, measured
from slipstream.service.page import run_page
from slipstream.service.records import Actual, Attempt, Need
from slipstream.service.runs import shown
from slipstream.service.store import Store
from slipstream.service.submission import with_earlier

from .made import ESTIMATE, record

GIB = 1 << 30
EVENTS = [
    {"kind": "opened", "pid": 1},
    {"kind": "stage", "name": "load the model", "began_s": 0.0, "seconds": 1.5},
    {"kind": "stage", "name": "load the model", "began_s": 0.0, "seconds": 2.0},
    {"kind": "sink_opened", "name": "trackio", "url": "http://elsewhere.example"},
    {"kind": "sink_opened", "name": "wandb", "url": "https://wandb.example/me/mine/runs/key"},
    {"kind": "memory", "step": 1, "model": "m", "held_gib": 4.5, "planned_gib": 5.0},
    {"kind": "memory", "step": 2, "model": "m", "held_gib": 6.5, "planned_gib": 5.0},
]
ROW = {"time/batch_s": 1.0, "time/train_s": 2.0, "time/generate_s": 0.5, "time/step_s": 9.0, "memory/engine_gib": 7.0}
ROWS = [{"step": number, "time": 100.0 + 4 * number, **ROW, "tokens/generated": 60.0, "tokens/trained": 50.0,
         "train/num_tokens": 44.0} for number in (1, 2, 3)]  # fmt: skip
LOGS = ("service/output.log", "service/supervisor.log", "logs/engine.log", "logs/rank-1.log", "logs/teacher/engine.log")


@pytest.fixture
def folder(tmp_path):
    for name, lines in (("events", EVENTS), ("metrics", ROWS)):
        with (tmp_path / f"{name}.jsonl").open("w") as file:
            for line in lines:
                file.write(json.dumps({"time": 100.0, "lineage": 0, **line}) + "\n")
    for name in LOGS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def test_each_figure_of_the_record(folder):
    attempts = (Attempt(1, 110.0, ended=130.0), Attempt(2, 140.0, ended=150.0))
    report = {"status": "finished", "exit_code": 0, "error": "", "message": "", "step": 3, "seconds": 1.0}
    (folder / "exit.json").write_text(json.dumps(report | {"time": 148.0, "lineage": 0, "versions": {}}))
    run = record(submitted=100.0, need=Need(2), price=3.0, store="/store", actual=Actual(peaks_gib={"host": 1.0}))
    found = measured(folder, run, attempts, Peaks(2 * GIB))
    assert found == Actual(
        steps=3,
        step_s=4.0,
        rest_s=22.0,
        seconds=30.0,
        gpu_hours=round(2 * 30 / 3600, 6),
        memory_gib=6.5,
        queued_s=10.0,
        start_s={"load the model": 3.5},
        parts_s={"batch": 3.0, "generate": 1.5, "train": 6.0},
        uploads_s=2.0,
        tokens_generated=180,
        tokens_trained=150,
        generated_per_s=120.0,
        trained_per_s=25.0,
        peaks_gib={"host": 2.0, "trainer": 6.5, "engine": 7.0},
        cost=round(3.0 * round(2 * 30 / 3600, 6), 6),
        wandb_url="https://wandb.example/me/mine/runs/key",
        consoles={
            "run": "service/output.log",
            "supervisor": "service/supervisor.log",
            "engine": "logs/engine.log",
            "rank-1": "logs/rank-1.log",
            "teacher-engine": "logs/teacher/engine.log",
        },
    )
    assert measured(folder, run, attempts).peaks_gib["host"] == 1.0, "the peak of an earlier attempt counts"
    seen = measured(folder, run, attempts, Peaks(gpu_bytes=9 * GIB))
    assert (seen.memory_gib, seen.peaks_gib["gpu"]) == (9.0, 9.0), "the whole run's, where the driver shows it"
    assert measured(folder, run, attempts, Peaks(gpu_bytes=GIB)).memory_gib == 6.5, "a look came too late"
    page = run_page(shown(folder, record(state="done", attempts=attempts, actual=found)), b"", Html(""))
    assert page.index('id="checkpoints"') < page.index('id="output"')
    for text in ("load the model", "logs/teacher/engine.log", 'href="https://wandb.example/me/mine/runs/key"'):
        assert text in page


def test_the_step_of_a_run_without_a_heartbeat_is_that_of_its_end(folder):
    running = record(state="running", attempts=(Attempt(1, 110.0),))
    assert shown(folder, running).step == 0
    report = {"status": "finished", "exit_code": 0, "error": "", "message": "", "step": 3, "seconds": 1.0}
    for time, step in ((90.0, 0), (148.0, 3)):
        (folder / "exit.json").write_text(json.dumps(report | {"time": time, "lineage": 0, "versions": {}}))
        assert shown(folder, running).step == step


def test_sft_counts_the_tokens_of_the_loss_and_a_run_without_rows_has_its_time(folder):
    rows = [{name: value for name, value in row.items() if not name.startswith("tokens/")} for row in ROWS]
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"lineage": 0, **row}) + "\n" for row in rows))
    attempts = (Attempt(1, 110.0, ended=130.0),)
    found = measured(folder, record(), attempts)
    assert (found.tokens_generated, found.tokens_trained, found.generated_per_s) == (0, 132, None)
    assert (found.cost, found.gpu_hours) == (None, 0.0)
    (folder / "metrics.jsonl").write_text("{")
    (folder / "events.jsonl").unlink()
    found = measured(folder, record(), attempts)
    assert (found.seconds, found.steps, found.step_s) == (20.0, 0, None)
    assert found.consoles["engine"] == "logs/engine.log"


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("events", {"kind": "stage"}),
        ("events", {"kind": "stage", "name": ["x"], "seconds": "y"}),
        ("events", {"kind": "memory", "held_gib": "much"}),
        ("events", {"kind": "sink_opened", "name": "wandb"}),
        ("events", {"kind": "sink_opened", "name": "wandb", "url": 5}),
        ("metrics", {"step": 4, "time/train_s": 10**400}),
        ("metrics", {"step": 4, "tokens/trained": 1e308 * 10}),
    ],
)
def test_a_damaged_file_says_nothing_and_the_run_ends(folder, file, line):
    with (folder / f"{file}.jsonl").open("a") as opened:
        opened.write(json.dumps({"time": 120.0, "lineage": 0, **line}) + "\n")
    found = measured(folder, record(), (Attempt(1, 110.0, ended=130.0),))
    assert found.seconds == 20.0
    assert msgspec.json.decode(msgspec.json.encode(found), type=Actual) == found, "the next reader can decode it"


def test_a_price_is_a_number(monkeypatch):
    monkeypatch.delenv(PRICE, raising=False)
    assert gpu_hour_price() is None
    monkeypatch.setenv(PRICE, "2.5")
    assert gpu_hour_price() == 2.5
    for text in ("-1", "inf", "nan", "free"):
        monkeypatch.setenv(PRICE, text)
        with pytest.raises(ConfigError, match=PRICE):
            gpu_hour_price()


@pytest.mark.parametrize(
    ("peaks", "memory_gib"),
    [
        ({"trainer": 4.0}, 4.0),
        ({"trainer": 3.0, "engine": 9.0}, 1.0),
        ({"trainer": 3.0, "engine": 1.0, "gpu": 4.0}, 4.0),
    ],
)
def test_an_estimate_is_corrected_by_the_last_run_of_its_shape(tmp_path, peaks, memory_gib):
    store = Store(tmp_path / "state")
    actual = Actual(step_s=2.0, rest_s=10.0, memory_gib=4.0, peaks_gib=peaks)
    for name, state, attempts in (("done", "done", 1), ("retried", "done", 2), ("lost", "failed", 1)):
        tried = tuple(Attempt(number, 0.0) for number in range(attempts))
        (tmp_path / name / "service").mkdir(parents=True)
        changed = msgspec.structs.replace(actual, step_s=2.0 if name == "done" else 99.0)
        store.add(tmp_path / name, record(name, state=state, attempts=tried, actual=changed))
    found = with_earlier(store, ESTIMATE)
    assert (found.step_s, found.rest_s, found.memory_gib) == (2.0, 10.0, memory_gib)
    assert found.how == "as measured in done"
    assert found.seconds == 20.0
    shared = msgspec.structs.replace(ESTIMATE, is_shared=True)
    for name, estimate, start_s in (
        ("first", ESTIMATE, {"start vLLM: compile": 14.3, "start vLLM: capture graphs": 3.0}),
        ("later", shared, {}),
    ):
        (tmp_path / name / "service").mkdir(parents=True)
        changed = msgspec.structs.replace(actual, start_s=start_s)
        values = {"state": "done", "attempts": (Attempt(0, 0.0),), "actual": changed, "estimate": estimate}
        store.add(tmp_path / name, record(name, **values))
    found = with_earlier(store, ESTIMATE)
    assert (found.how, found.rest_s) == ("as measured in first", 2.0), "alone, and the next one finds the compiled code"
    other = msgspec.structs.replace(ESTIMATE, shape="another")
    assert with_earlier(store, other) == other
    (tmp_path / "other/service").mkdir(parents=True)
    values |= {"actual": actual, "estimate": msgspec.structs.replace(other, is_shared=True)}
    store.add(tmp_path / "other", record("other", **values))
    found = with_earlier(store, other)
    assert (found.step_s, found.is_shared) == (2.0 / SHARED_TIMES, False)
    again = as_shared(as_shared(found), is_shared=False)
    assert (again.seconds, again.how) == (pytest.approx(found.seconds), found.how)
