"""Every sink gets every row and can be read back; one that fails, hangs or is missing costs the run nothing."""

import contextlib
import dataclasses
import json
import os
import struct
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import ConfigError, EngineError, Interrupted, StartsAgain
from slipstream.runlog import RunLog, read_events, read_metrics
from slipstream.sinks import MAX_SAMPLES, MetricSinks, Run, require_sinks, run_of
from slipstream.sinks.services import WandB

ROWS = [{"reward/mean": 0.25, "train/loss": -1.5}, {"reward/mean": 0.5, "train/loss": None}, {"reward/mean": 0.75}]


class Broken:
    """A sink that does what its test says when it is written to."""

    def __init__(self, on_write):
        self.on_write = on_write
        self.rows, self.samples, self.exit_code = [], None, None

    def __call__(self, run):
        return self

    def write(self, step, when, values):
        self.on_write(step)
        self.rows.append((step, values))

    def write_samples(self, step, when, samples):
        self.samples = (step, [sample["completion"] for sample in samples])

    def close(self, exit_code):
        self.exit_code = exit_code


class Log:
    def __init__(self):
        self.warnings, self.events = [], []

    def event(self, kind, **fields):
        self.events.append({"kind": kind, **fields})

    def warning(self, message, **fields):
        self.warnings.append(message)


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path, 0, {"training.steps": 3}, "abc")


def put_all(sinks, rows=ROWS, first=0):
    for step, row in enumerate(rows, start=first):
        sinks.put(step, row)


def tensorboard_reader(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    return reader


def tensorboard_rows(folder):
    reader = tensorboard_reader(folder)
    return {name: [(event.step, event.value) for event in reader.Scalars(name)] for name in reader.Tags()["scalars"]}


def test_tensorboard_reads_what_was_written(run):
    log = Log()
    with MetricSinks(["tensorboard"], run, log) as sinks:
        put_all(sinks)
    assert log.warnings == []
    assert log.events == [{"kind": "sink", "name": "tensorboard", "num_written": 3, "num_lost": 0}]
    assert tensorboard_rows(run.folder) == {"reward/mean": [(0, 0.25), (1, 0.5), (2, 0.75)], "train/loss": [(0, -1.5)]}


SAMPLE = {
    "step": 0,
    "task": "t",
    "prompt": "Sort: 31\n# no heading",
    "completion": "13",
    "reward": 1.0,
    "outcome": "done",
}


def test_tensorboard_shows_samples_as_text(run):
    with MetricSinks(["tensorboard"], run, Log()) as sinks:
        sinks.put_sample(SAMPLE)
        put_all(sinks)
    reader = tensorboard_reader(run.folder)
    (event,) = reader.Tensors("samples")
    text = event.tensor_proto.string_val[0].decode()
    assert event.step == 2
    assert "step 0, train, reward 1.0, done" in text
    assert "    Sort: 31\n    # no heading" in text
    assert reader.SummaryMetadata("samples").plugin_data.plugin_name == "text"


def test_samples_go_with_an_evaluation_and_at_the_end(run, monkeypatch):
    sink = Broken(lambda step: None)
    monkeypatch.setattr("slipstream.sinks.TARGETS", {"x": sink})
    with MetricSinks(["x"], run, Log()) as sinks:
        for number in range(100):
            sinks.put_sample({"completion": number})
        sinks.put(0, {"train/loss": 1.0})
        sinks.put(1, {"eval/accuracy": 1.0})
        wait_until(lambda: sink.samples)
        assert sink.samples == (1, [*range(100 - MAX_SAMPLES, 100)])
        sinks.put_sample({"completion": "last"})
        sinks.put(2, {"train/loss": 1.0})
    assert sink.samples == (2, ["last"])
    assert len(sink.rows) == 3


@pytest.mark.parametrize(
    ("error", "exit_code"), [(None, 0), (EngineError("x"), 5), (Interrupted("x"), 130), (StartsAgain("x"), 0)]
)
def test_a_sink_is_told_how_the_run_ended(run, error, exit_code, monkeypatch):
    sink = Broken(lambda step: None)
    monkeypatch.setattr("slipstream.sinks.TARGETS", {"x": sink})
    with contextlib.suppress(Exception), MetricSinks(["x"], run, Log()):
        if error:
            raise error
    assert sink.exit_code == exit_code


def wait_until(reached):
    until = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("resumed_from", [1, None])
def test_tensorboard_keeps_the_step_that_a_resume_goes_on_from(run, resumed_from):
    with MetricSinks(["tensorboard"], run, Log()) as sinks:
        put_all(sinks, [{"reward/mean": 0.0}, {"reward/mean": 0.25}, {"reward/mean": 0.5}])
    time.sleep(1.1)  # the file's name is the second in which it was opened
    with MetricSinks(["tensorboard"], dataclasses.replace(run, lineage=1, resumed_from=resumed_from), Log()) as sinks:
        put_all(sinks, [{"probe/abs_logprob_diff": 0.125}, {"reward/mean": 2.0}], 1)
    rows = tensorboard_rows(run.folder)
    assert rows["reward/mean"] == [(0, 0.0), *[(1, 0.25)] * (resumed_from == 1), (2, 2.0)]
    assert rows["probe/abs_logprob_diff"] == [(1, 0.125)]


def leveldb_records(log, at, block=32768, header=7):
    """The records of a LevelDB log (its doc/log_format.md), which wandb's files are, after `at` bytes of their own."""
    record = b""
    while at + header <= len(log):
        if block - at % block < header:
            at += block - at % block
            continue
        _, size, kind = struct.unpack_from("<IHB", log, at)
        record += log[at + header : at + header + size]
        at += header + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


OFFLINE = """
import json, sys
from pathlib import Path
from slipstream.runlog import RunLog, read_settings
import slipstream.sinks
from slipstream.sinks import MetricSinks, run_of
slipstream.sinks.CLOSE_TIMEOUT_S = 150
folder, first = Path(sys.argv[1]), int(sys.argv[4])
with RunLog.create(folder, resume=first > 0) as log:
    log.resolved('[environment]\\napi_key = "hunter2-secret"  # command line\\n[training]\\nsteps = 3  # default\\n'
                 '[run]\\nproject = "sorting"  # default\\nname = "the first"  # default\\nentity = "us"  # default\\n')
    run = run_of(folder, log.lineage, read_settings(folder))
    with MetricSinks([sys.argv[2]], run, log) as sinks:
        log.listeners.append(sinks.put)
        log.sample_listeners.append(sinks.put_sample)
        log.sample({"step": first, "completion": "hunter2-secret is out", "prompt": "say", "reward": 1.0})
        for step, row in enumerate(json.loads(sys.argv[3]), start=first):
            log.metrics(step, row)
        if first:
            sys.exit(3)
"""


def run_apart(folder, name, first=0, **environment):
    """A run with one sink in a process of its own, for libraries that keep global state; its command has a secret."""
    rows = [{name: value for name, value in row.items() if value is not None} for row in ROWS]
    result = subprocess.run(
        [sys.executable, "-c", OFFLINE, folder, name, json.dumps(rows), str(first), "--key", "hunter2-secret"],
        capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, "HOME": str(folder.parent), **environment},
    )  # fmt: skip
    assert result.returncode == (3 if first else 0), result.stderr
    told = {event["kind"]: event for event in read_events(folder)}
    assert "warning" not in told, told["warning"]
    assert told["sink"]["num_written"] == 3


def wandb_records(folder, pattern):
    """Rows, the run, and its exit code."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob(pattern)
    rows, run, exit_code = [], None, None
    for data in leveldb_records(path.read_bytes(), 7):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
        elif record.WhichOneof("record_type") == "run":
            run = record.run
        elif record.WhichOneof("record_type") == "exit":
            exit_code = record.exit.exit_code
    return rows, run, exit_code


@pytest.mark.full
def test_wandb_offline_keeps_every_row_and_no_secret(tmp_path):
    folder = tmp_path / "run"
    run_apart(folder, "wandb", WANDB_API_KEY="", WANDB_MODE="offline")
    rows, run, exit_code = wandb_records(folder, "wandb/offline-run-*/*.wandb")
    assert [row["reward/mean"] for row in rows] == [0.25, 0.5, 0.75]
    assert [row["_step"] for row in rows] == [0, 1, 2]
    assert (run.project, run.display_name, run.entity, exit_code) == ("sorting", "the first", "us", 0)
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["training.steps"] == 3
    assert config["environment.api_key"] == "<redacted>"
    for file in folder.rglob("*"):
        if file.is_file():
            assert b"hunter2-secret" not in file.read_bytes(), file
    (table,) = folder.glob("wandb/offline-run-*/files/media/table/*.json")
    table = json.loads(table.read_text())
    (line,) = (dict(zip(table["columns"], row, strict=True)) for row in table["data"])
    assert (line["prompt"], line["completion"], line["reward"]) == ("say", "<redacted> is out", 1.0)
    time.sleep(1.1)  # a process's folder is named after the second in which it began
    run_apart(folder, "wandb", first=2, WANDB_API_KEY="", WANDB_MODE="offline")
    paths = sorted(folder.glob("wandb/offline-run-*"))
    assert len(paths) == 2
    _, resumed, exit_code = wandb_records(paths[1], "*.wandb")
    assert (resumed.run_id, exit_code) == (run.run_id, 3)


def wandb_rows(told):
    """As W&B does: what comes for a step before the newest is lost, and of one step the last value counts."""
    rows = {}
    for step, values in told:
        if step >= max(rows, default=0):
            rows[step] = rows.get(step, {}) | values
    return rows


LATE = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=6)


@given(st.integers(0, 3), st.integers(0, 3), st.booleans(), LATE)
def test_wandb_has_each_evaluation_and_the_first_row_of_each_step(starting_step, first, is_missing, steps):
    """Of a run that goes on from `first` where W&B has the rows before `starting_step`. An evaluation goes on beside
    each step that begins one, and is taken before the next one begins, as `trainer.evaluations` does."""
    told, running, evaluated = [], None, {}
    run = SimpleNamespace(log=lambda values, step: told.append((step, values)))
    sink = WandB.__new__(WandB)
    sink._run, sink._first, sink._step, sink._evaluated = run, starting_step, starting_step, -1
    sink._resumed_from = first

    def evaluate(step):
        sink.write(step, 0.0, {"eval/accuracy": step / 8})
        if step >= starting_step or step == first:
            evaluated[step] = step / 8

    sink.write(first, 0.0, {"probe/abs_logprob_diff": 0.5} | ({"eval/accuracy": first / 8} if is_missing else {}))
    if is_missing:
        evaluated[first] = first / 8
    for step, (begins, ends) in enumerate(steps, start=first + 1):
        if begins and running is not None:
            evaluate(running)
            running = None
        sink.write(step, 0.0, {"reward/mean": step / 8})
        running = step if begins else running
        if ends and running is not None and running < step:
            evaluate(running)
            running = None
    last = first + len(steps)
    if last >= starting_step:
        evaluate(last)  # of a run that ends early
    rows = wandb_rows([(starting_step, {}), *told])
    found = {row["eval/step"]: row["eval/accuracy"] for row in rows.values() if "eval/step" in row}
    assert found == evaluated
    rewards = {step: row["reward/mean"] for step, row in rows.items() if "reward/mean" in row}
    assert rewards == {step: step / 8 for step in range(max(first + 1, starting_step), last + 1)}


def test_wandb_is_opened_with_its_address_and_evaluations_have_a_step_of_their_own(tmp_path, monkeypatch):
    told = []
    run = SimpleNamespace(
        starting_step=0,
        url="https://wandb.example/us/sorting/runs/key",
        define_metric=lambda name, step_metric: told.append((name, step_metric)),
        finish=lambda exit_code: None,
    )
    library = SimpleNamespace(init=lambda **options: run, Table=dict, Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", library)
    log, said = Log(), []
    with MetricSinks(["wandb"], Run(tmp_path, 0, {}, "key"), log, tell=said.append):
        wait_until(lambda: said)
    assert log.events[0] == {"kind": "sink_opened", "name": "wandb", "url": run.url}
    assert said == [f"metrics in wandb: {run.url}"]
    assert told == [("eval/*", "eval/step")]


def test_trackio_keeps_every_row_in_its_local_store(tmp_path):
    folder = tmp_path / "run"
    run_apart(folder, "trackio", TRACKIO_DIR=str(tmp_path / "store"))
    program = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as S; "
        "rows = S.get_logs('sorting', 'the first'); "
        "print(json.dumps([(r['step'], r.get('reward/mean'), 'samples' in r) for r in rows]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, "HOME": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "store")},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = [[0, 0.25, False], [1, 0.5, False], [2, 0.75, False], [2, None, True]]
    assert json.loads(result.stdout) == rows


@pytest.mark.parametrize("error", [OSError("no\nnetwork"), SystemExit(3)])
def test_a_failing_sink_is_one_warning_and_the_others_go_on(run, error, monkeypatch):
    def fails_at_first(step):
        if step < 2:
            raise error

    log, good, bad = Log(), Broken(lambda step: None), Broken(fails_at_first)
    monkeypatch.setattr("slipstream.sinks.TARGETS", {"bad": bad, "good": good})
    with MetricSinks(["bad", "good", "bad"], run, log) as sinks:
        put_all(sinks)
    assert [step for step, _ in good.rows] == [0, 1, 2]
    assert [step for step, _ in bad.rows] == [2]
    (warning,) = log.warnings
    assert "\n" not in warning
    assert f"sink bad did not take step 0 ({type(error).__name__}" in warning
    told = [(event["name"], event["num_written"], event["num_lost"]) for event in log.events]
    assert told == [("bad", 1, 2), ("good", 3, 0)]


@pytest.mark.parametrize("error", [ImportError("torn"), SystemExit(3)])
def test_a_sink_that_cannot_be_opened(run, error, monkeypatch):
    def make(run):
        raise error

    log = Log()
    monkeypatch.setattr("slipstream.sinks.TARGETS", {"bad": make})
    with MetricSinks(["bad"], run, log) as sinks:
        put_all(sinks)
    (warning,) = log.warnings
    assert "cannot be opened" in warning
    assert log.events[0]["num_lost"] == 3


def test_a_hanging_sink_neither_slows_nor_holds_the_run(run, monkeypatch):
    released = threading.Event()
    log = Log()
    begun = time.monotonic()
    monkeypatch.setattr("slipstream.sinks.TARGETS", {"slow": Broken(lambda step: released.wait(300))})
    monkeypatch.setattr("slipstream.sinks.MAX_WAITING", 2)
    monkeypatch.setattr("slipstream.sinks.CLOSE_TIMEOUT_S", 0.3)
    sinks = MetricSinks(["slow"], run, log)
    put_all(sinks, [{"reward/mean": 1.0}] * 500)
    sinks.close()
    assert time.monotonic() - begun < 100.0, "a write hangs for 300 s"
    assert len(log.warnings) == 1
    assert "2 rows behind" in log.warnings[0]
    assert log.events == [{"kind": "sink", "name": "slow", "num_written": 0, "num_lost": 500}]
    released.set()


def test_a_missing_library_is_one_sentence_with_the_remedy(tmp_path, monkeypatch):
    (tmp_path / "no_such_sink").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("no_such_library", "no_such_sink"):
        with pytest.raises(ConfigError, match=rf'"{name}", which is not installed: pip install "slipstream\[{name}\]"'):
            require_sinks([name])
    require_sinks(["json"])


def test_the_run_log_tells_its_listeners_and_keeps_its_own(tmp_path, monkeypatch):
    good = Broken(lambda step: None)
    monkeypatch.setattr("slipstream.sinks.TARGETS", {"good": good})
    with RunLog.create(tmp_path / "run") as log, MetricSinks(["good"], run_of(log.folder, 0, {}), log) as sinks:
        log.listeners.append(sinks.put)
        log.metrics(0, {"a/b": 1.0, "a/nan": float("nan")})
    assert good.rows == [(0, {"a/b": 1.0})]
    assert read_metrics(tmp_path / "run")[0]["a/b"] == 1.0


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_sink_writes_through_no_link(name, run, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (run.folder / name).symlink_to(tmp_path / "elsewhere")
    log = Log()
    with MetricSinks([name], run, log) as sinks:
        put_all(sinks)
    assert len(log.warnings) == 1
    assert log.events == [{"kind": "sink", "name": name, "num_written": 0, "num_lost": 3}]
    assert not list((tmp_path / "elsewhere").iterdir())
