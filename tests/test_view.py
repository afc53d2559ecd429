"""What is shown of a run."""

import io
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from slipstream.runlog import RunSummary
from slipstream.view import NullView, PlainView, RichView, make_view, render_runs, sparkline
from slipstream.view.text import BLOCK_LEVELS

from .waiting import Clock

TITLE = "reverse-1 · models/byte-1m · spell_backward"
ROW = {
    "reward/mean": 0.41234,
    "eval/accuracy": 0.5,
    "probe/abs_logprob_diff": 0.0031,
    "train/loss": -0.012,
    "train/grad_norm": 1.3,
    "throughput/generated_tokens_per_s": 12345.6,
}


class BrokenFile(io.StringIO):
    def write(self, text):
        raise OSError("the terminal is gone")


def terminal(width=90, file=None):
    return Console(file=file or io.StringIO(), force_terminal=True, width=width, height=40, color_system=None)


def lines_of(console):
    return console.file.getvalue().splitlines()


def picture_of(view):
    console = terminal(view.console.width)
    console.print(view.picture())
    return console.file.getvalue()


@pytest.fixture
def clock():
    return Clock(100.0)


@pytest.fixture
def plain(clock):
    return PlainView(Console(file=io.StringIO(), width=40), clock)


@pytest.fixture
def rich(clock):
    view = RichView(terminal(), clock)
    view.start(TITLE, 50)
    yield view
    view.stop()


def test_plain_writes_one_aligned_line_for_each_step(plain, clock):
    plain.start(TITLE, 12)
    for step in range(1, 12):
        clock.now += 2.5
        plain.step(step, ROW if step % 2 else {**ROW, "reward/mean": -0.2, "train/loss": 11.5})
    plain.stop()
    lines = lines_of(plain.console)
    assert lines[0] == f"{TITLE}  12 steps"
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 11
    assert len({len(line) for line in steps}) == 1
    assert steps[0] == (
        "step  1/12  reward   0.412  accuracy   0.500  probe diff  0.0031  loss -0.0120  "
        "grad norm     1.3  tokens/s  12,346  step s     2.5"
    )


def test_plain_shows_only_numbers_that_the_run_has(plain):
    plain.start(TITLE, 3)
    plain.step(1, {"train/loss": 2.0})
    plain.step(2, {"train/loss": 1.5, "eval/accuracy": 0.25})
    plain.step(3, {"train/loss": 1.0})
    plain.stop()
    texts = lines_of(plain.console)[1:]
    assert "accuracy" not in texts[0]
    assert "accuracy   0.250" in texts[1]
    assert "accuracy       -" in texts[2]
    assert not any("reward" in text for text in texts)


def test_plain_reports_long_phases_and_no_others(plain, clock):
    plain.start(TITLE, 3)
    plain.phase("start engine")
    clock.now += 42
    plain.phase("generate", 100)
    plain.advance(30)
    clock.now += 9
    plain.advance(10)
    clock.now += 2
    plain.advance(10)
    plain.advance(10)
    plain.phase("train", 4)
    clock.now += 9
    plain.step(1, {})
    assert lines_of(plain.console)[1:] == [
        "   start engine  took 42.0 s",
        "   generate  50/100  after 11 s",
        "   generate  60/100  took 11.0 s",
        "step 1/3  step s    62.0",
    ]


def test_an_evaluation_beside_training_has_a_line_of_its_own(plain, clock):
    plain.start(TITLE, 12)
    plain.step(4, {"eval/accuracy": 0.25})
    plain.evaluated(2, {"eval/accuracy": 0.5, "eval/pass@4": 0.75, "eval/samples_per_task": 4.0})
    assert lines_of(plain.console)[-1] == "evaluation of step 2:  accuracy 0.500  pass@4 0.750"
    assert (plain.row["eval/accuracy"], plain.steps_done) == (0.5, 4)


def test_rich_shows_title_progress_numbers_and_the_reward(rich, clock):
    for step in range(1, 11):
        clock.now += 6
        rich.step(step, {**ROW, "reward/mean": step / 10})
    rich.phase("generate", 256)
    rich.advance(64)
    picture = picture_of(rich)
    assert TITLE in picture
    assert re.search(r"step .*10/50 1:00, 4:00 left", picture)
    assert re.search(r"generate .*64/256", picture)
    for label, value in [("accuracy", "0.500"), ("probe diff", "0.0031"), ("tokens/s", "12,346"), ("step s", "6.0")]:
        assert label in picture
        assert value in picture
    assert "▁" in picture
    assert "0.100 … 1.000" in picture


def test_rich_keeps_the_last_warnings_and_counts_the_others(rich):
    for number in range(5):
        rich.message(f"warning number {number}", "warning")
    rich.message("the end", "error")
    rich.message("scrolls by")
    picture = picture_of(rich)
    assert [f"number {number}" in picture for number in range(5)] == [False, False, False, True, True]
    assert "error: the end" in picture
    assert "and 3 earlier" in picture
    assert "scrolls by" not in picture
    assert "scrolls by" in rich.console.file.getvalue()


def test_rich_shows_the_phases_of_several_threads(rich):
    def orchestrate():
        rich.phase("generate", 100)
        rich.advance(7)

    thread = threading.Thread(target=orchestrate)
    thread.start()
    thread.join()
    rich.phase("train", 4)
    rich.advance(3)
    picture = picture_of(rich)
    assert re.search(r"generate .*7/100", picture)
    assert re.search(r"train .*3/4", picture)
    rich.step(1, {})
    assert "train" not in picture_of(rich)


@pytest.mark.parametrize("width", [30, 60, 200])
def test_rich_fits_the_terminal(clock, width):
    view = RichView(terminal(width), clock)
    view.start(TITLE, 50)
    view.phase("generate", 10)
    view.message("no group of this step had any reward variance: nothing to learn", "warning")
    for step in (1, 2):
        view.step(step, ROW)
    picture = picture_of(view)
    view.stop()
    assert view.failure is None
    assert all(len(line) <= width for line in picture.splitlines())
    if width >= 60:
        assert "12,346" in picture


def test_the_last_picture_stays_and_the_cursor_returns(clock):
    console = terminal()
    view = RichView(console, clock)
    view.start(TITLE, 2)
    view.step(2, ROW)
    view.stop()
    output = console.file.getvalue()
    assert output.endswith("\x1b[?25h")
    assert "2/2" in output[output.rindex("╭") :]


def test_a_resumed_run_estimates_from_its_own_steps(clock):
    view = RichView(terminal(), clock)
    view.start(TITLE, 50, step=40)
    assert view.seconds_left() is None
    clock.now += 10
    view.step(41, {})
    assert view.seconds_left() == pytest.approx(90)
    assert "41/50" in picture_of(view)


@pytest.mark.parametrize("make", [PlainView, RichView])
def test_a_lost_terminal_never_reaches_the_run(make, clock):
    output = sys.stdout
    view = make(terminal(file=BrokenFile()), clock)
    exercise(view)
    assert sys.stdout is output
    assert isinstance(view.failure, OSError)


@pytest.mark.parametrize("make", [PlainView, RichView])
def test_a_terminal_without_unicode(make, clock):
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    view = make(terminal(file=file), clock)
    exercise(view)
    assert view.failure is None
    file.flush()
    assert b"0.412" in file.buffer.getvalue()


def exercise(view):
    view.advance()
    view.start(TITLE, 3)
    view.phase("générer", 0)
    view.advance(5)
    view.phase("wait")
    for step in (1, 2):
        view.step(step, ROW)
    view.message("héllo [/bold] [link=x]", "info")
    view.message("wörld", "warning")
    view.message("odd", "unheard-of")
    view.stop()
    view.stop()


@pytest.mark.parametrize("make", [PlainView, RichView])
def test_control_characters_do_not_reach_the_terminal(make, clock):
    console = terminal(200)
    view = make(console, clock)
    view.start("run\x1b[2J", 3)
    view.message("evil\x1b]0;title\x07\r", "warning")
    view.phase("x\x1b[31m")
    view.step(1, ROW)
    view.stop()
    output = console.file.getvalue()
    for sequence in ("\x1b[2J", "\x1b]0", "\x07", "\x1b[31m"):
        assert sequence not in output


def test_a_closed_pipe_does_not_end_the_run():
    code = (
        "import sys, time\n"
        "from slipstream.view import make_view\n"
        "view = make_view()\n"
        "view.start('run', 1000)\n"
        "for step in range(1000): view.step(step, {'reward/mean': 0.5}); view.message('x' * 200)\n"
        "view.stop()\n"
        "print('survived', type(view.failure).__name__, file=sys.stderr)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert "run" in process.stdout.readline()
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 0, error
    assert error.startswith("survived")


@pytest.mark.parametrize("make", [PlainView, RichView])
def test_threads_may_call_anything_at_once(make):
    view = make(terminal())
    view.start(TITLE, 100)

    def work(name):
        for step in range(100):
            view.phase(name, 10)
            view.advance(3)
            view.step(step, ROW)
            view.message(name, "warning")

    threads = [threading.Thread(target=work, args=(f"thread {number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    view.stop()
    assert view.failure is None
    assert view.num_messages["warning"] == 400


def test_which_view_is_made(monkeypatch):
    assert isinstance(make_view("auto", terminal()), RichView)
    assert isinstance(make_view("auto", Console(file=io.StringIO())), PlainView)
    assert isinstance(make_view("plain", terminal()), PlainView)
    assert isinstance(make_view("rich", Console(file=io.StringIO())), RichView)
    for variable in ("FORCE_COLOR", "TTY_COMPATIBLE"):  # as kernels of notebooks do
        monkeypatch.setenv(variable, "1")
        assert isinstance(make_view("auto"), PlainView)
    silent = make_view("none")
    assert isinstance(silent, NullView)
    exercise(silent)


def test_runs_are_listed_as_they_are():
    console = terminal(80)
    runs = [
        RunSummary("one[bold]", Path("runs/one"), "finished", 50, 50, 0.91, 0.875, 0.0, 3725.0, "", "[x]/y"),
        RunSummary("two", Path("runs/two"), "killed", 3, None, None, None, 0.0, 4.25, "line\nbreak"),
    ]
    console.print(render_runs(runs))
    heading, first, second, empty, reason = (line.strip() for line in lines_of(console))
    assert heading.split() == ["run", "status", "step", "reward", "accuracy", "time", "started", "model"]
    assert first.split()[:6] == ["one[bold]", "finished", "50/50", "0.910", "0.875", "1:02:05"]
    assert first.split()[-1] == "[x]/y"
    assert second.split()[:7] == ["two", "killed", "3/?", "-", "-", "4.2", "s"]
    assert (empty, reason) == ("", "two: line break")


@given(st.lists(st.floats(-1e6, 1e6), max_size=200), st.integers(1, 50))
def test_sparklines_fit_and_reach_from_bottom_to_top(values, width):
    line = sparkline(values, width)
    assert len(line) == min(width, len(values))
    assert set(line) <= set(BLOCK_LEVELS)
    if len(values) <= width and values and max(values) > min(values):
        assert line[values.index(min(values))] == BLOCK_LEVELS[0]
        assert line[values.index(max(values))] == BLOCK_LEVELS[-1]


def test_a_step_without_loss_says_why(plain, rich, clock):
    for view in (plain, rich):
        view.start(TITLE, 9)
        view.step(1, ROW)
        clock.now += 3
        view.step(2, {"reward/mean": 0.0, "train/skipped": 1.0})
    skipped = lines_of(plain.console)[-1]
    assert "loss       -" in skipped
    assert "skipped: no group" in skipped
    assert "skipped: no group" in picture_of(rich)
    for why, row in (("every completion was cut off", {"rollout/truncated_fraction": 1.0}),
                     ("no token had a gradient", {"reward/signal_fraction": 0.5})):  # fmt: skip
        clock.now += 3
        plain.step(3, {"train/skipped": 1.0, **row})
        assert f"skipped: {why}" in lines_of(plain.console)[-1]
    clock.now += 3
    rich.step(3, ROW)
    assert "skipped" not in picture_of(rich)
