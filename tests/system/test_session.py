"""A session on real vLLM: the figures of a run, losses and tasks of the caller's, and every way out."""

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from slipstream.runlog import read_exit, read_metrics
from slipstream.runlog.ledger import balance

pytestmark = pytest.mark.engine


@pytest.fixture
def program(command):
    """Starts a program of `loops.py`."""

    def start(name, *arguments):
        return command(name, *arguments, module=("tests.system.loops",))

    return start


def figures(folder):
    """What does not depend on when it was made."""
    left_out = ("time", "lineage", "throughput/", "idle/", "update/stall", "rollout/batches_ready", "rollout/requests")
    return [
        {name: value for name, value in row.items() if not name.startswith(left_out)} for row in read_metrics(folder)
    ]


@pytest.mark.quick("full")
@pytest.mark.parametrize("lora", ["", "[lora]\nrank = 4\nalpha = 8\n"], ids=["full", "lora"])
def test_a_loop_on_the_session_gives_the_figures_of_the_run(command, program, run_file, tmp_path, lora):
    text = run_file.read_text().replace("reward_timeout_s = 60", "reward_timeout_s = 60\nsettings = {parity = true}")
    run_file.write_text(text + lora)
    steps = ("--training.steps", 6)
    command("train", run_file, *steps, "--run.folder", tmp_path / "run").ok()
    program("order_of_a_run", run_file, tmp_path / "session").ok()
    expected, found = figures(tmp_path / "run"), figures(tmp_path / "session")
    assert [row["step"] for row in found] == list(range(7))
    assert found == expected
    assert any(row["train/grad_norm"] > 0 for row in found[1:])
    assert [row["eval/accuracy"] is not None for row in (found[0], found[-1])] == [True, True]
    assert read_exit(tmp_path / "session").status == "finished"
    assert balance(tmp_path / "session").entries == balance(tmp_path / "run").entries
    written = [path / "checkpoints" / "step-000006" / "weights" for path in (tmp_path / "run", tmp_path / "session")]
    names = [sorted(file.name for file in folder.glob("*.safetensors")) for folder in written]
    assert names[0] == names[1] != []
    for name in names[0]:
        assert (written[0] / name).read_bytes() == (written[1] / name).read_bytes()


@pytest.mark.full
def test_losses_and_tasks_of_the_callers(program, run_file, tmp_path):
    said = json.loads(program("chosen_losses", run_file, tmp_path / "s").ok().splitlines()[-1])
    assert said["sizes"] == [3, 3]
    assert len(said["refused"]) == 5
    assert list(Path(said["weights"]).glob("*.safetensors"))
    found = {(entry.state, entry.reason): entry.num_groups for entry in balance(tmp_path / "s").entries}
    assert found == {("trained", ""): 3, ("dropped", "unused"): 8}


@pytest.mark.full
def test_a_stream_goes_on_from_its_checkpoint(program, run_file, tmp_path):
    folder = tmp_path / "s"
    said = [json.loads(program("stream_in_two_parts", run_file, folder, last).ok().splitlines()[-1]) for last in (2, 4)]
    assert said == [{"begun": 0, "known": {}}, {"begun": 2, "known": {"step": 2}}]
    rows = read_metrics(folder)
    assert [row["step"] for row in rows] == list(range(5))
    assert [row["staleness/max"] for row in rows[1:]] == [0.0, 1.0, 0.0, 1.0], "each part begins with its own weights"
    assert (balance(folder).num_open, read_exit(folder).status) == (0, "finished")


def test_an_exception_of_the_callers_leaves_no_process(program, run_file, tmp_path):
    run = program("caller_fails", run_file, tmp_path / "s")
    run.until(run.engines)
    code, _, err = run.wait()
    assert code == 1
    assert 'KeyError: "the caller\'s own"' in err
    assert (tmp_path / "s.ready").exists(), "it came that far"
    assert run.left_behind(5.0) == []
    assert (read_exit(tmp_path / "s").status, read_exit(tmp_path / "s").error) == ("failed", "KeyError")
    assert balance(tmp_path / "s").num_open == 0


@pytest.mark.full
def test_a_caller_that_is_killed_leaves_no_process(program, run_file, tmp_path):
    run = program("waits", run_file, tmp_path / "s")
    run.until(lambda: (tmp_path / "s.ready").exists())
    assert run.engines()
    run.process.kill()
    run.process.wait(10)
    assert run.left_behind(60.0) == []


@pytest.mark.full
def test_coroutines_leave_the_event_loop_alone(program, run_file, tmp_path):
    said = json.loads(program("by_coroutines", run_file, tmp_path / "s").ok().splitlines()[-1])
    assert said["ticks"] > 50
    assert (read_exit(tmp_path / "s").status, read_exit(tmp_path / "s").step) == ("finished", 2)


@pytest.mark.full
def test_two_ranks_take_a_loss_of_a_file(program, run_file, tmp_path):
    run = program("on_two_ranks", run_file, tmp_path / "s")
    run.until(lambda: run.running("slipstream.launch.ranks.child"))
    said = json.loads(run.ok().splitlines()[-1])
    assert "is in the program itself" in said["refused"]
    assert [row["step"] for row in read_metrics(tmp_path / "s")] == [0, 1, 2]
    assert run.left_behind(5.0) == []


@pytest.mark.full
@pytest.mark.real_start
def test_a_notebook_whose_event_loop_runs(run_file, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    lines = (
        "import slipstream",
        f"async with slipstream.session({str(run_file)!r}, folder={str(tmp_path / 'a')!r}, steps=1) as s:",
        "    await s.train(await s.rollouts())",
        "    await s.sync()",
        "with slipstream.session(" + f"{str(run_file)!r}, folder={str(tmp_path / 'b')!r}, steps=1) as s:",
        "    s.train(s.rollouts())",
    )
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("\n".join(lines))])
    NotebookClient(book, timeout=400, kernel_name="python3").execute()
    assert [read_exit(tmp_path / name).status for name in "ab"] == ["finished", "finished"]


@pytest.mark.full
@pytest.mark.parametrize("name", ["best_of_n", "self_play"])
def test_an_example_trains(name, command, model, run_file, tmp_path):
    text = run_file.read_text()
    run_file.write_text(text.replace("reward_timeout_s = 60", "reward_timeout_s = 60\nsettings = {parity = true}"))
    small = {"best_of_n": ("--rounds", 2, "--tasks", 4, "--answers", 4), "self_play": ("--steps", 2)}[name]
    file = model if name == "self_play" else run_file
    command(file, "--folder", tmp_path / "s", *small, module=(f"examples.algorithms.{name}",)).ok()
    folders = [tmp_path / "s" / player for player in ("matcher", "hider")] if name == "self_play" else [tmp_path / "s"]
    for folder in folders:
        assert read_exit(folder).status == "finished"
        assert balance(folder).num_open == 0
        assert all(row["train/grad_norm"] > 0 for row in read_metrics(folder)[1:])
