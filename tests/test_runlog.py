"""The run folder, written by one process and read by others."""

import itertools
import json
import math
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import tomllib
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import runlog
from slipstream.errors import ConfigError, DataError, EngineError, Interrupted, SlipstreamError
from slipstream.records import Rollout, Sequence
from slipstream.runlog import RunLog, files
from slipstream.runlog.files import whole_lines
from slipstream.runlog.redaction import redact, redact_toml

from .waiting import until

WRITER = """
import sys, time
from slipstream.runlog import RunLog
log = RunLog.create(sys.argv[1], resume=len(sys.argv) > 2)
print("open", flush=True)
for step in range(1, 1_000_000):
    log.metrics(step, {"reward/mean": step / 2})
    log.event("tick", text="x" * 2000)
    if step > 20_000:  # who looks at it may stand still meanwhile
        time.sleep(0.1)
"""


def start_writer(folder, *more):
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(folder), *more], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    return process


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    process.stdout.close()


def num_lines(folder):
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_a_run_from_beginning_to_end(tmp_path):
    with RunLog.create(tmp_path / "runs" / "one") as log:
        log.resolved("[training]\nsteps = 2 # run.toml\n")
        log.metrics(1, {"reward/mean": 0.25, "loss/policy": 1})
        log.metrics(2, {"reward/mean": 0.5, "eval/accuracy": 0.75})
        log.event("evaluated", num_right=3)
        log.sample({"step": 2, "completion": "4"})
    folder = log.folder
    assert [(row["step"], row["lineage"], row["reward/mean"]) for row in runlog.read_metrics(folder)] == [
        (1, 0, 0.25),
        (2, 0, 0.5),
    ]
    assert [event["kind"] for event in runlog.read_events(folder)] == ["opened", "evaluated", "exit"]
    assert runlog.read_samples(folder)[0]["completion"] == "4"
    report = runlog.read_exit(folder)
    assert report is not None
    assert (report.status, report.exit_code, report.step, report.error) == ("finished", 0, 2, "")
    assert {"slipstream", "torch", "vllm", "transformers", "python"} <= report.versions.keys()
    [run] = runlog.find_runs([tmp_path / "runs"]).runs
    assert (run.name, run.status, run.step, run.total_steps) == ("one", "finished", 2, 2)
    assert (run.reward, run.accuracy) == (0.5, 0.75)


def test_folder_and_files_are_private(tmp_path):
    old_mask = os.umask(0)
    try:
        with RunLog.create(tmp_path / "run") as log:
            log.resolved("")
    finally:
        os.umask(old_mask)
    assert stat.S_IMODE(log.folder.stat().st_mode) == 0o700
    names = {path.name: stat.S_IMODE(path.stat().st_mode) for path in log.folder.iterdir()}
    assert set(names.values()) == {0o600}
    assert names.keys() == {"events.jsonl", "metrics.jsonl", "samples.jsonl", "resolved.toml", "exit.json", "run.lock"}


def test_an_existing_folder_is_refused_and_stays_as_it_is(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="use another folder"):
        RunLog.create(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(ConfigError, match="is a file"):
        RunLog.create(tmp_path / "notes.txt")
    with pytest.raises(ConfigError, match="holds no run"):
        RunLog.create(tmp_path, resume=True)
    (tmp_path / "empty").mkdir()
    RunLog.create(tmp_path / "empty").close()


def test_readers_of_a_run_that_writes_fast_see_no_damage(tmp_path):
    """Nor lines that are added while they read: where one process appends, the kernel may show another one zeros."""
    process = start_writer(tmp_path / "run")
    try:
        assert {runlog.summarize(tmp_path / "run").status for _ in range(8)} == {"running"}
        until(lambda: num_lines(tmp_path / "run"))
    finally:
        kill(process)
    path = tmp_path / "run/metrics.jsonl"
    rows, num_rows = whole_lines(path), num_lines(tmp_path / "run")
    found = [next(rows)]
    with path.open("ab") as file:
        file.write(b'{"step": 1}\n' * 10_000)
    assert len([*found, *rows]) == num_rows


def test_readers_do_not_disturb_a_starting_writer(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_LOCK_TRIES", 3000)  # a reader may be held up while it has the lock
    stop = threading.Event()
    folder = tmp_path / "run"
    RunLog.create(folder).close()

    def read():
        while not stop.is_set():
            runlog.is_running(folder)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(10):
            RunLog.create(folder, resume=True).close()
    finally:
        stop.set()
        for reader in readers:
            reader.join()


def test_a_writer_that_was_stopped_between_its_tries_for_the_lock_tries_again(tmp_path, monkeypatch):
    tries, seconds, lock = [], itertools.count(0, 100), files.try_lock
    monkeypatch.setattr(files, "time", SimpleNamespace(sleep=tries.append, monotonic=lambda: next(seconds)))
    monkeypatch.setattr(files, "try_lock", lambda *asked: len(tries) > 2 and lock(*asked))
    RunLog.create(tmp_path / "run").close()
    assert len(tries) == 3


def test_the_end_of_an_attempt_that_was_killed_is_its_own(tmp_path, monkeypatch):
    times = itertools.count(1000.0, 50.0)
    monkeypatch.setattr(runlog.writer, "_now", lambda: next(times))
    with RunLog.create(tmp_path / "run") as log:
        log.metrics(1, {"train/loss": 1.0})
        log.metrics(2, {"train/loss": 1.0})
        log.has_exit = True
    with RunLog.create(log.folder, resume=True, is_over=True) as ends:
        ends.exit(EngineError("killed"), step=2)
    report = runlog.read_exit(log.folder)
    assert (report.lineage, report.step, round(report.seconds)) == (0, 2, 100)
    events = runlog.read_events(log.folder)
    assert [(event["kind"], event["lineage"]) for event in events] == [("opened", 0), ("exit", 0)]
    with RunLog.create(log.folder, resume=True) as resumed:
        assert resumed.lineage == 1


def test_the_lock_dies_with_the_writer_though_a_forked_child_lives(tmp_path):
    code = (
        "import os, sys, time\n"
        "from slipstream.runlog import RunLog\n"
        f"log = RunLog.create({str(tmp_path / 'run')!r})\n"
        "if os.fork() == 0:\n"
        "    print(os.getpid(), flush=True); time.sleep(600); os._exit(0)\n"
        "time.sleep(0.2); os._exit(9)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    process.wait(timeout=60)
    try:
        os.kill(child, 0)
        assert not runlog.is_running(tmp_path / "run")
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


def test_kill_9_at_any_moment_leaves_a_readable_and_resumable_run(tmp_path):
    folder = tmp_path / "run"
    more = []
    for lineage in range(4):
        before = num_lines(folder)
        process = start_writer(folder, *more)
        # A slow machine may take longer than any pause to write its first row.
        until(lambda before=before: num_lines(folder) != before)
        time.sleep(0.02 * lineage)
        kill(process)
        rows = runlog.read_metrics(folder)
        assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
        assert {row["lineage"] for row in rows} == {lineage}
        assert runlog.summarize(folder).status == "killed"
        assert runlog.read_exit(folder) is None
        more = ["--resume"]
    opened = [event for event in runlog.read_events(folder) if event["kind"] == "opened"]
    assert [event["previous"] for event in opened] == ["none", "killed", "killed", "killed"]


@pytest.mark.parametrize("torn", ['{"step": 3, "lin', '{"step": 3, "lineage": 0, "time": 1.0}', "\x00\x00"])
def test_a_torn_last_line_is_ignored_then_cut_away(tmp_path, torn):
    with RunLog.create(tmp_path / "run") as log:
        log.metrics(1, {"reward/mean": 0.5})
        log.metrics(2, {"reward/mean": 0.5})
    with (log.folder / "metrics.jsonl").open("a") as file:
        file.write(torn)
    assert [row["step"] for row in runlog.read_metrics(log.folder)] == [1, 2]
    with RunLog.create(log.folder, resume=True) as log:
        log.metrics(3, {"reward/mean": 0.75})
    assert [row["step"] for row in runlog.read_metrics(log.folder)] == [1, 2, 3]
    assert torn not in (log.folder / "metrics.jsonl").read_text()


def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(tmp_path):
    with RunLog.create(tmp_path / "run") as log:
        log.metrics(1, {"reward/mean": 0.5})
    with (log.folder / "metrics.jsonl").open("a") as file:
        file.write("not json\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2 is damaged"):
        runlog.read_metrics(log.folder)
    [run] = runlog.find_runs([tmp_path]).runs
    assert run.status == "damaged"
    assert "line 2" in run.message


def test_superseded_steps_are_left_out(tmp_path):
    folder = tmp_path / "run"
    for lineage, (first, last) in enumerate([(1, 7), (5, 6), (4, 5)]):
        with RunLog.create(folder, resume=lineage > 0) as log:
            assert log.lineage == lineage
            if lineage:
                log.resumed(first - 1)
                log.metrics(first - 1, {"probe/abs_logprob_diff": 0.5 * lineage})
            for step in range(first, last + 1):
                log.sample({"step": step - 1})
                log.metrics(step, {"reward/mean": float(lineage)})
    rows = runlog.read_metrics(folder)
    assert [(row["step"], row["lineage"]) for row in rows] == [(1, 0), (2, 0), (3, 0), (4, 2), (5, 2)]
    assert (rows[2]["reward/mean"], rows[2]["probe/abs_logprob_diff"]) == (0.0, 1.0)
    samples = [(row["step"], row["lineage"]) for row in runlog.read_samples(folder)]
    assert samples == [(0, 0), (1, 0), (2, 0), (3, 2), (4, 2)]


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5), st.booleans()), min_size=1, max_size=5), st.booleans())
def test_history_after_any_resumes_has_each_step_once_and_newest(tmp_path_factory, lineages, announced):
    folder = tmp_path_factory.mktemp("runs") / "run"
    model: dict[int, int] = {}
    for lineage, (start, num_steps, probes) in enumerate(lineages):
        with RunLog.create(folder, resume=lineage > 0) as log:
            if lineage and announced:
                log.resumed(start)
                model = {step: made_by for step, made_by in model.items() if step <= start}
                if probes:
                    log.metrics(start, {})
                    model.setdefault(start, lineage)
            elif num_steps:
                model = {step: made_by for step, made_by in model.items() if step <= start}
            for step in range(start + 1, start + num_steps + 1):
                log.metrics(step, {})
                model[step] = lineage
    rows = runlog.read_metrics(folder)
    assert [(row["step"], row["lineage"]) for row in rows] == sorted(model.items())


def test_the_first_row_of_a_resume_adds_to_the_step_that_it_begins_with_and_replaces_nothing(tmp_path):
    with RunLog.create(tmp_path / "run") as log:
        log.metrics(1, {"rollout/num": 4.0, "time/update_s": 1.0, "retry/late": 3.0, "dropped_tokens/stale": 5.0})
    with RunLog.create(tmp_path / "run", resume=True) as log:
        log.resumed(1)
        log.count({"dropped_tokens/stale": 2.0, "dropped_groups/stale": 1.0})
        log.metrics(1, {"time/update_s": 60.0, "probe/abs_logprob_diff": 0.5})
    [row] = runlog.read_metrics(log.folder)
    assert (row["time/update_s"], row["probe/abs_logprob_diff"], row["retry/late"]) == (1.0, 0.5, 3.0)
    assert (row["dropped_tokens/stale"], row["dropped_groups/stale"], row["lineage"]) == (7.0, 1.0, 0)


SPARSE_NAMES = (
    *("dropped/stale", "dropped_groups/surplus", "retry/late", "rollout/stop_length_fraction", "train/skipped"),
    *("reward/non_finite", "reward/a/not_applicable", "reward/unclosed_thinking", "task/a/dropped"),
)
SPARSE = st.dictionaries(st.sampled_from(SPARSE_NAMES), st.floats(0.0, 1.0))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(SPARSE, st.booleans(), st.booleans()), min_size=1, max_size=8))
def test_a_mean_over_the_rows_of_what_only_some_have_is_one_over_all_from_the_first_on(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("runs") / "run"
    log, seen = RunLog.create(folder), set()
    for step, (values, has_rollouts, ends) in enumerate(rows):
        values |= {"rollout/num": 1.0, "reward/sums": 0.5} if has_rollouts else {}
        row = log.metrics(step, values)
        assert row == (dict.fromkeys(seen, 0.0) if has_rollouts else {}) | values
        seen |= values.keys() - {"rollout/num", "reward/sums"}
        if ends:
            log.close()
            log = RunLog.create(folder, resume=True)
    log.close()


def test_numbers_that_come_later_are_of_their_step_and_have_nothing_of_the_next_row(tmp_path):
    with RunLog.create(tmp_path / "run") as log:
        heard = []
        log.listeners.append(lambda step, row: heard.append((step, dict(row))))
        log.metrics(1, {"reward/mean": 0.5})
        log.metrics(2, {"reward/mean": 0.75})
        log.note({"update/bytes": 8.0})
        with log.phase("train"):
            log.add_metrics(1, {"eval/accuracy": 1.0, "eval/reward": math.inf})
        with pytest.raises(ValueError, match="has no group"):
            log.add_metrics(1, {"accuracy": 1.0})
        log.metrics(3, {})
        assert log.step == 3
    first, second, third = runlog.read_metrics(log.folder)
    assert (first["reward/mean"], first["eval/accuracy"], first["eval/reward"]) == (0.5, 1.0, None)
    assert "eval/accuracy" not in second
    assert (third["update/bytes"], "time/train_s" in third) == (8.0, True)
    assert heard[2] == (1, {"eval/accuracy": 1.0, "eval/reward": None})
    assert "not finite in step 1: eval/reward" in [event.get("message") for event in runlog.read_events(log.folder)]


def test_warnings_and_samples_are_told_to_who_listens(tmp_path):
    told, samples = [], []
    with RunLog.create(tmp_path / "run") as log:
        log.warning_listeners.append(told.append)
        log.sample_listeners.append(samples.append)
        log.resolved('[environment]\napi_key = "hunter2-secret"\n')
        log.warning("look", step=3)
        log.metrics(1, {"train/loss": math.nan})
        log.sample({"step": 1, "completion": "hunter2-secret"})
    assert told == ["look", "not finite in step 1: train/loss"]
    assert runlog.read_events(log.folder)[-2]["metrics"] == {"train/loss": "nan"}
    assert samples == [{"step": 1, "completion": "<redacted>"}]


def test_metrics_without_a_group_are_refused(tmp_path):
    with RunLog.create(tmp_path / "run") as log, pytest.raises(ValueError, match="group/name"):
        log.metrics(1, {"reward": 1.0})
    with RunLog.create(tmp_path / "two") as log, pytest.raises(ValueError, match="every event has"):
        log.event("x", lineage=3)


def test_phases_are_timed_into_the_next_row(tmp_path):
    with RunLog.create(tmp_path / "run") as log:
        for _ in range(2):
            with log.phase("generate"):
                time.sleep(0.02)
        with pytest.raises(OSError, match="no"), log.phase("train"):
            raise OSError("no")
        first = log.metrics(1, {})
        second = log.metrics(2, {})
    assert first["time/generate_s"] >= 0.04
    assert "time/train_s" in first
    assert second == {}


@pytest.mark.parametrize(
    ("error", "status", "exit_code", "has_traceback", "failure"),
    [
        (EngineError("the engine died"), "failed", 5, False, ("engine", True)),
        (ConfigError("no such key"), "failed", 2, False, ("config", False)),
        (RuntimeError("a bug"), "failed", 1, True, ("bug", False)),
        (Interrupted("stopped by Ctrl-C"), "interrupted", 130, False, ("stopped", True)),
        (KeyboardInterrupt(), "interrupted", 130, False, ("stopped", True)),
        (SystemExit(3), "failed", 3, True, ("bug", False)),
        (SystemExit(0), "finished", 0, False, ("", False)),
    ],
)
def test_leaving_by_an_error_writes_why(tmp_path, error, status, exit_code, has_traceback, failure):
    def run():
        with RunLog.create(tmp_path / "run") as log:
            log.metrics(7, {})
            raise error

    with pytest.raises(type(error)):
        run()
    report = runlog.read_exit(tmp_path / "run")
    assert (report.status, report.exit_code, report.step) == (status, exit_code, 7)
    assert (report.error, report.message) == (type(error).__name__, str(error))
    assert bool(report.traceback) == has_traceback
    assert (report.failure_class, report.retriable) == failure
    assert runlog.summarize(tmp_path / "run").status == status


def test_an_explicit_exit_is_kept_and_a_resume_removes_it(tmp_path):
    with RunLog.create(tmp_path / "run") as log:
        log.exit(EngineError("first"), step=3)
    assert runlog.read_exit(tmp_path / "run").message == "first"
    log = RunLog.create(tmp_path / "run", resume=True)
    assert runlog.read_exit(tmp_path / "run") is None
    assert runlog.read_events(tmp_path / "run")[-1]["previous"] == "failed"
    log.close()
    assert runlog.summarize(tmp_path / "run").status == "killed"


@given(st.text(min_size=1))
def test_a_secret_written_as_json_would_is_redacted(secret):
    literal = json.dumps(secret).replace("\x7f", "\\u007f")
    if re.search(r"\\ud[89a-f]", literal):  # TOML has no surrogate pairs
        literal = json.dumps(secret, ensure_ascii=False).replace("\x7f", "\\u007f")
    toml = f'name = "run"\n[service]\ntoken = {literal}\n'
    try:
        clean, secrets = redact_toml(toml)
    except ConfigError:
        assert "\x7f" in secret
        return
    assert secrets == {secret} - {runlog.REDACTED}
    assert tomllib.loads(clean)["service"]["token"] == runlog.REDACTED


def test_parts_of_a_mixture_may_have_names_like_secrets_and_their_secrets_are_hidden():
    part = {
        "name": "reasoning_gym/gcd",
        "settings": {"api_key": "hunter2-secret", "mixture": {"token": "hunter3-secret"}},
    }
    found = redact({"environment": {"mixture": {"token_count": part, "key": {"name": "x"}}}})
    hidden = {"api_key": "<redacted>", "mixture": {"token": "<redacted>"}}
    assert found == {"environment": {"mixture": {"token_count": {**part, "settings": hidden}, "key": {"name": "x"}}}}
    toml = '[environment.mixture.token_count]\nname = "rows"\nsettings = {password = "hunter2-secret"}\n'
    clean, secrets = redact_toml(toml)
    assert secrets == {"hunter2-secret"}
    assert 'name = "rows"' in clean


def test_records_and_strange_values_are_written(tmp_path):
    rollout = Rollout("r", "t", "g", [Sequence([1, 2], [False, True])], 1.0, "done", completion="é\n\u2028")
    with RunLog.create(tmp_path / "run") as log:
        log.sample(rollout)
        log.event("odd", folder=tmp_path, error=ValueError("x"), number=math.inf)
    [sample] = runlog.read_samples(log.folder)
    assert msgspec.convert({key: sample[key] for key in Rollout.__struct_fields__}, Rollout) == rollout
    [event] = [event for event in runlog.read_events(log.folder) if event["kind"] == "odd"]
    assert (event["folder"], event["error"], event["number"]) == (str(tmp_path), "x", None)


def test_many_threads_write_whole_lines(tmp_path):
    log = RunLog.create(tmp_path / "run")

    def write(index):
        for number in range(50):
            log.event("from", index=index, number=number, text="y" * 500)

    threads = [threading.Thread(target=write, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    events = [event for event in runlog.read_events(log.folder) if event["kind"] == "from"]
    assert {(event["index"], event["number"]) for event in events} == {(i, n) for i in range(4) for n in range(50)}


def test_a_full_disk_leaves_no_half_line(tmp_path):
    resource = pytest.importorskip("resource")
    code = (
        "import resource, signal, sys\n"
        "from slipstream.errors import SlipstreamError\n"
        "from slipstream.runlog import RunLog\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "log = RunLog.create(sys.argv[1])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "try:\n"
        "    while True: log.event('tick', text='x' * 700)\n"
        "except SlipstreamError as error:\n"
        "    print(error.exit_code, error)\n"
    )
    assert resource.RLIMIT_FSIZE is not None
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("1 ")
    assert "make room on its disk" in done.stdout
    data = (tmp_path / "run" / "events.jsonl").read_bytes()
    assert data.endswith(b"}\n")
    assert len(runlog.read_events(tmp_path / "run")) > 20


def test_a_closed_log_refuses(tmp_path):
    log = RunLog.create(tmp_path / "run")
    log.close()
    log.close()
    with pytest.raises(ValueError, match="was closed"):
        log.event("late")


def test_lists_are_newest_first_and_only_runs(tmp_path):
    assert runlog.find_runs([tmp_path / "missing"]).runs == []
    for name in ("b", "a"):
        RunLog.create(tmp_path / name).close()
        time.sleep(0.01)
    (tmp_path / "other").mkdir()
    assert [run.name for run in runlog.find_runs([tmp_path]).runs] == ["a", "b"]


HALF = json.loads('"\\ud83d"')
"""What `json.loads` makes of half an emoji in a model's tool call."""


def test_half_an_emoji_is_written_as_an_escape(tmp_path):
    def run():
        with RunLog.create(tmp_path / "run") as log:
            log.sample({"step": 0, "completion": f"called {HALF}", HALF: (HALF, 1), "path": tmp_path})
            log.metrics(1, {f"reward/{HALF}": 0.5})
            raise EngineError(f"the first: {HALF}")

    with pytest.raises(EngineError):
        run()
    [sample] = runlog.read_samples(tmp_path / "run")
    assert (sample["completion"], sample["\\ud83d"]) == ("called \\ud83d", ["\\ud83d", 1])
    assert runlog.read_metrics(tmp_path / "run")[0]["reward/\\ud83d"] == 0.5
    report = runlog.read_exit(tmp_path / "run")
    assert (report.exit_code, report.message) == (5, "the first: \\ud83d")


SMALL_DISK = """
import sys
from pathlib import Path
from slipstream.errors import SlipstreamError
from slipstream.records import Ticket, Version
from slipstream.runlog import RunLog
folder, how = Path(sys.argv[1]) / "run", sys.argv[2]
try:
    with RunLog.create(folder) as log:
        log.metrics(1, {"train/loss": 1.0})
        with (folder.parent / "filler").open("wb", buffering=0) as filler:
            try:
                while True: filler.write(bytes(4096))
            except OSError: pass
        if how == "bug":
            raise ValueError("x" * 20_000)
        for step in range(2, 1000):
            if how == "ticket":
                log.published(Ticket(Version(0, step), "disk", "", ()))
            log.event("tick", text="x" * 99)
except (SlipstreamError, ValueError) as error:
    print(getattr(error, "exit_code", None), str(error)[:300])
print((folder / "exit.json").read_text())
"""  # fmt: skip


def in_namespace(command):
    """The command where it may mount, as root or as a user; skips where the system allows neither."""
    if shutil.which("unshare"):
        for flags in (["-m"], ["-rm"]):
            prefix = ["unshare", *flags]
            if subprocess.run([*prefix, "true"], capture_output=True, timeout=60, check=False).returncode == 0:
                return subprocess.run(
                    [*prefix, "sh", "-c", command], capture_output=True, text=True, timeout=120, check=False
                )
    pytest.skip("needs `unshare`, which this system does not allow")


@pytest.mark.parametrize(("how", "code"), [("line", "1 "), ("ticket", "1 "), ("bug", "None x")])
def test_a_disk_that_is_full_to_the_last_byte_leaves_its_reason(tmp_path, how, code):
    script = tmp_path / "fill.py"
    script.write_text(SMALL_DISK)
    (tmp_path / "disk").mkdir()
    done = in_namespace(
        f"mount -t tmpfs -o size=512k none {tmp_path}/disk && {sys.executable} {script} {tmp_path}/disk {how}"
    )
    assert done.returncode == 0, done.stderr
    said, _, report = done.stdout.partition("\n")
    assert said.startswith(code)
    assert code == "None x" or "make room on its disk" in said
    report = json.loads(report)
    assert (report["status"], report["exit_code"]) == ("failed", 1)
    assert report["message"].startswith(said.partition(" ")[2][:100])


@pytest.mark.parametrize("change", [shutil.rmtree, lambda folder: folder.rename(folder.with_name("moved"))])
def test_a_run_whose_folder_is_removed_or_replaced_ends(tmp_path, change):
    folder = tmp_path / "run"

    def run():
        with RunLog.create(folder) as log:
            log.metrics(1, {})
            change(folder)
            log.metrics(2, {})

    with pytest.raises(SlipstreamError, match=r"metrics\.jsonl cannot be written \(No such file") as ended:
        run()
    assert ended.value.exit_code == 1
    assert not (folder / "exit.json").exists()


def test_resuming_does_not_read_what_it_does_not_need(tmp_path):
    tokens = [{"token_ids": list(range(100_000, 108_000)), "sampled": [[10, 8000]], "logprobs": [-0.5] * 7990}]
    with RunLog.create(tmp_path / "run") as log:
        log.metrics(1, {"reward/mean": 0.5})
        log.sample({"step": 0, "id": "0.0.0", "completion": "x", "sequences": tokens})
    path = tmp_path / "run" / "samples.jsonl"
    line = path.read_bytes()
    path.write_bytes(line * 600 + line[: len(line) // 2])  # 50 MB
    code = (
        "import resource, sys\n"
        "from slipstream.runlog import RunLog, read_run\n"
        "used = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = used()\n"
        "RunLog.create(sys.argv[1], resume=True).close()\n"
        "resumed = used()\n"
        "print(len(read_run(sys.argv[1]).samples), resumed - before, used() - resumed)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True, timeout=60, check=True
    )
    count, resumed_kib, read_kib = map(int, done.stdout.split())
    assert count == 600
    assert path.stat().st_size == 600 * len(line)
    assert resumed_kib < 10_000
    assert read_kib < 20_000


@given(st.lists(st.binary(max_size=20).map(lambda part: part.replace(b"\n", b"")), max_size=5), st.binary(max_size=9))
def test_the_end_of_whole_lines_is_found_from_the_end(tmp_path_factory, lines, rest):
    path = tmp_path_factory.mktemp("lines") / "file"
    whole = b"".join(line + b"\n" for line in lines)
    path.write_bytes(whole + rest.replace(b"\n", b""))
    before, files._BLOCK_BYTES = files._BLOCK_BYTES, 3
    try:
        files.LineFile(path).close()
    finally:
        files._BLOCK_BYTES = before
    assert path.read_bytes() == whole


def test_runs_are_found_at_any_depth_of_several_folders_and_folders_are_counted(tmp_path, monkeypatch):
    for name in ("a/one", "a/quickstart/grpo", "b/far/too/deep", "b/.hidden/run", "a/one/inner"):
        RunLog.create(tmp_path / name).close()
    (tmp_path / "b" / "back").symlink_to(tmp_path)
    a, b = tmp_path / "a", tmp_path / "b"
    assert {run.name for run in runlog.find_runs([a]).runs} == {"one", "quickstart/grpo"}
    assert [run.name for run in runlog.find_runs([b]).runs] == ["far/too/deep"]
    found = runlog.find_runs([a, b, a / "one"])
    assert {run.folder for run in found.runs} == {a / "one", a / "quickstart" / "grpo", b / "far" / "too" / "deep"}
    (tmp_path / "c" / "d").mkdir(parents=True)
    found = runlog.find_runs([tmp_path / "c"])
    assert (found.runs, found.num_folders, found.was_cut) == ([], 2, False)
    monkeypatch.setattr("slipstream.runlog.reader.MAX_FOLDERS", 2)
    assert runlog.find_runs([tmp_path]).was_cut


def test_samples_of_older_runs_are_found_by_the_ids_of_newer_ones(tmp_path):
    from slipstream.runlog.trace import trace

    with RunLog.create(tmp_path / "run") as log:
        for step in (0, 2):
            tokens = {"token_ids": [step, 6], "sampled": [[1, 2]], "logprobs": [-0.5]}
            line = {"step": step, "split": "eval", "id": "eval.1", "task": f"eval/{step}", "completion": "x"}
            log.sample(line | {"sequences": [tokens]})
        log.sample({"step": 2, "id": "2.0.1", "task": "train/9", "completion": "x"})
    record = runlog.read_run(tmp_path / "run")
    assert trace(record, "eval.2.1").task == "eval/2"
    assert trace(record, "eval.2.1").num_sampled == 1
    assert trace(record, "eval.0.1").step == 0
    assert trace(record, "2.0.1").task == "train/9"
    with pytest.raises(ConfigError, match=r"name one of 2\.0\.1, eval\.0\.1, eval\.2\.1, as"):
        trace(record, "eval.1")


def test_counts_add_up_until_the_next_row(tmp_path):
    with RunLog.create(tmp_path / "run") as log:
        log.count({"retry/late": 1.0})
        log.count({"retry/late": 2.0, "retry/refused": 1.0})
        log.note({"retry/refused": 4.0})
        log.metrics(1, {"train/loss": 0.5})
        log.metrics(2, {"train/loss": 0.25})
    first, second = runlog.read_metrics(tmp_path / "run")
    assert (first["retry/late"], first["retry/refused"], second["retry/late"]) == (3.0, 5.0, 0.0)
