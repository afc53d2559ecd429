"""The calls of a session with a scripted engine: what is trained on, counted, kept and refused."""

import asyncio
import contextlib
import copy
import importlib
import json
import math
import re
import sys
import weakref
from pathlib import Path

import pytest
import torch
from benchmarks.scripted_engine import ScriptedEngine

import slipstream
from slipstream.config.user_code import import_file
from slipstream.errors import ConfigError, TrainingError
from slipstream.launch import session as launched
from slipstream.runlog import read_events, read_exit, read_metrics
from slipstream.runlog.ledger import balance

from . import loops
from .test_session import figures

SMALL = {"environment": {"settings": {"parity": True}}, "progress": False}


@pytest.fixture
def opened(scripted, run_file, tmp_path, monkeypatch):
    """Opens sessions whose engine is scripted."""

    def make_engine(plan, logs, on_event, ahead=None):
        scripted.engine = ScriptedEngine(scripted.letter, scripted._logprobs, on_event=on_event)
        return scripted.engine

    monkeypatch.setattr(launched, "create_engine", make_engine)
    monkeypatch.setattr(launched, "preimport_vllm", lambda config: contextlib.nullcontext())
    num_threads = torch.get_num_threads()
    yield lambda folder=tmp_path / "session", **more: slipstream.session(run_file, folder=folder, **{**SMALL, **more})
    torch.set_num_threads(num_threads)


def ended(folder):
    return {(entry.state, entry.reason): entry.num_groups for entry in balance(folder).entries}


def test_the_order_of_a_run_gives_its_figures(scripted, opened, run_file, tmp_path):
    scripted.finish(3, "--environment.settings", "{parity = true}")
    with opened() as s:
        s.evaluate()
        while s.step < 3:
            s.train(s.rollouts())
            s.sync()
        s.evaluate()
        s.save()
    assert figures(tmp_path / "session") == figures(scripted.folder)
    assert balance(tmp_path / "session").entries == balance(scripted.folder).entries


def test_losses_and_tasks_of_the_callers(opened, run_file, tmp_path, capsys):
    folder = tmp_path / "chosen"
    loops.chosen_losses(run_file, folder)
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["sizes"] == [3, 3]
    assert said["names"] == ["0.4", "0.5"], "the first four were the run's own"
    assert all(value < 0 for value in said["logprobs"])
    old, no_gradient, raised, unknown, nothing = said["refused"]
    assert old == "the engine has version 0 at step 1 (training.staleness = 0): call s.sync() first"
    assert "loops.py:no_gradient returned a loss without a gradient" in no_gradient
    assert "loops.py:raises raised AttributeError" in raised
    assert f"line {loops.raises.__code__.co_firstlineno + 1} of" in raised
    assert "'no_such_loss'" in unknown
    assert nothing.startswith("loss = 3 is no loss")
    assert ended(folder) == {("trained", ""): 3, ("dropped", "unused"): 8}
    rows = read_metrics(folder)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert sum(row.get("dropped_groups/unused") or 0 for row in rows) == 8
    assert (read_exit(folder).status, read_exit(folder).step) == ("finished", 2)


def test_an_exception_of_the_callers_ends_the_session(opened, scripted, run_file, tmp_path):
    folder = tmp_path / "failed"
    with pytest.raises(KeyError, match="the caller's own"):
        loops.caller_fails(run_file, folder)
    report = read_exit(folder)
    assert (report.status, report.error) == ("failed", "KeyError")
    assert not scripted.engine.is_up
    assert ended(folder) == {("dropped", "unused"): 4}


def test_a_loss_that_is_wrong_later_is_named_with_its_step(opened, run_file, tmp_path):
    with pytest.raises(TrainingError, match=r"loops\.py:nan_at_step\.<locals>\.late gave a loss of nan in .* step 2"):
        loops.nan_at_step(run_file, tmp_path / "nan")
    assert read_exit(tmp_path / "nan").error == "TrainingError"


def test_what_cannot_be_trained_on(opened):
    with opened(training={"staleness": 1}) as s:
        first, second = s.rollouts()[:2]
        for bad, words in (([], "nothing to train on"), (3, "int is nothing"), ([[3]], "int is nothing")):
            with pytest.raises(ConfigError, match=words):
                s.train(bad)
        with pytest.raises(ConfigError, match='sequence 0 has no stream "advantages"'):
            s.train(second[0].sequences)
        with pytest.raises(ConfigError, match="n = 0"):
            s.rollouts(n=0)
        with pytest.raises(ConfigError, match="tasks is empty"):
            s.rollouts([])
        s.train([first])
        s.train([second])  # of version 0 at step 1
        with pytest.raises(TrainingError, match=r"training\.staleness = 1 allows only"):
            s.train([second])
        with pytest.raises(ConfigError, match=r"the engine has version 0 at step 2.*staleness = 1"):
            s.rollouts()
        s.train([first], "sft")
        with pytest.raises(ConfigError, match=r"training\.steps = 3"):
            s.train([first], "sft")
        with pytest.raises(ConfigError, match="call it before anything else"):
            s.resume()


def test_a_loss_reads_what_it_asks_for(opened):
    def distance(inputs):
        seen.append(inputs.streams["old_logprobs"])
        return (inputs.logprobs_N - inputs.streams["old_logprobs"] + 0.1) ** 2

    seen = []
    distance.reads = ("old_logprobs",)
    with opened() as s:
        groups = s.rollouts()
        before = torch.cat(s.forward(groups).logprobs)
        assert s.train(groups, distance)["train/loss"] == pytest.approx(0.01, rel=1e-3)
        assert torch.cat(seen[1:]).sort().values.tolist() == pytest.approx(before.sort().values.tolist(), rel=1e-5)


def test_a_copy_with_advantages_of_its_own_is_of_its_group(opened, tmp_path):
    with opened() as s:
        group = s.rollouts(s.tasks[:1])[0]
        sequence = copy.copy(group[0].sequences[0])
        sequence.streams = {}
        sequence.put("advantages", [0.5] * len(sequence))
        metrics = s.train([sequence])
    assert metrics["train/grad_norm"] > 0
    assert ended(tmp_path / "session") == {("trained", ""): 1}


def test_a_session_goes_on_from_its_checkpoint(opened, tmp_path):
    folder = tmp_path / "session"
    with opened() as s:
        assert s.resume() == 0
        for _ in range(2):
            s.train(s.rollouts())
            s.sync()
        s.state["place"] = [s.step, "two"]
        s.save()
        s.train(s.rollouts())
    rows = read_metrics(folder)
    with opened() as s:
        with pytest.raises(ConfigError, match=r"holds a run at step 2: call s\.resume\(\)"):
            s.rollouts()
        assert (s.resume(), s.step, s.state) == (2, 2, {"place": [2, "two"]})
        s.train(s.rollouts())
    assert (s.step, s.folder) == (3, folder), "as it ended"
    with pytest.raises(ConfigError, match="the session has ended"):
        s.rollouts()
    with pytest.raises(ConfigError, match="opened once"), s:
        pass
    again = read_metrics(folder)
    assert [row["step"] for row in again] == [0, 1, 2, 3]
    assert again[3]["train/loss"] == rows[3]["train/loss"]
    assert [event["resume"] for event in read_events(folder) if event["kind"] == "start"] == [False, True]


def test_a_session_without_a_checkpoint_begins_again(opened, tmp_path):
    with pytest.raises(KeyboardInterrupt), opened() as s:  # noqa: PT012
        s.rollouts()
        raise KeyboardInterrupt
    assert read_exit(tmp_path / "session").status == "interrupted"
    with opened() as s:
        with pytest.raises(ConfigError, match=r"holds a run at step 0: call s\.resume\(\)"):
            s.rollouts()
        assert s.resume() == 0
        s.train(s.rollouts())
    assert [row["step"] for row in read_metrics(tmp_path / "session")] == [0, 1]


def test_state_that_cannot_be_kept(opened):
    with opened() as s:
        for bad in (object(), math.inf, math.nan, "\ud83d", {1, 2}):
            s.state["what"] = bad
            with pytest.raises(ConfigError, match=r"s\.state cannot be kept"):
                s.save()


def test_a_task_whose_rollouts_all_fail_has_an_empty_list(opened, model, tmp_path):
    """Beside it the groups of the others are in the order of their tasks."""

    def reward(task, completion):
        return 1.0 if task.answer != "bad" else completion.no_such_attribute

    tasks = [{"prompt": text, "answer": answer} for text, answer in (("one", "a"), ("two", "bad"), ("three", "b"))]
    settings = {"run": {"threads": 1}, "evaluation": False, "environment": {"max_reward_failures": 1.0}}
    with slipstream.session(
        model=model, tasks=tasks * 20, reward=reward, steps=1, folder=tmp_path / "own", progress=False, **settings
    ) as s:
        groups = s.rollouts(tasks, n=2)
    assert [len(group) for group in groups] == [2, 0, 2]
    assert [group[0].prompt for group in groups if group] == ["one", "three"]


@pytest.mark.parametrize("reward", [math.nan, None, "1", torch.zeros(2)])
def test_a_changed_reward_is_a_number(opened, reward):
    with opened() as s:
        groups = s.rollouts()
        groups[0][0].reward = torch.tensor(2.0)
        groups[0][1].reward = True
        assert s.train(groups[:1])["reward/max"] == 2.0
        groups[1][0].reward = reward
        with pytest.raises(ConfigError, match=r"rollout \S+ has the reward .*: give a finite number"):
            s.train(groups[1:], "sft")


def test_a_session_that_was_left_open_ends_with_the_program(opened, tmp_path):
    s = opened()
    s.__enter__()
    s.sync()
    with pytest.warns(UserWarning, match="a session was open at the end of the program"):
        importlib.import_module("slipstream.python.session")._close(weakref.ref(s))
    assert read_exit(tmp_path / "session").status == "finished"


async def test_coroutines_leave_the_event_loop_alone(opened, run_file, tmp_path):
    async with opened() as s:
        groups = await s.rollouts()
        metrics = await s.train(groups)
        assert (s.step, metrics["reward/mean"]) == (1, pytest.approx(metrics["reward/mean"]))
        waiting = asyncio.create_task(s.sync())
        await asyncio.sleep(0)
        assert not waiting.done()
        await waiting
        assert (await s.forward(groups)).logprobs
        assert await s.save() == s.folder / "checkpoints" / "step-000001" / "weights"
        assert await s.evaluate()
    assert read_exit(s.folder).status == "finished"


async def test_a_call_that_waits_ends_with_the_session(opened, scripted, tmp_path):
    started = []

    async def leave_while_one_waits():
        async with opened() as s:
            await s.sync()
            scripted.engine.generate = lambda request: asyncio.sleep(600)
            started.append(asyncio.create_task(s.rollouts()))
            await asyncio.sleep(0.5)
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        await leave_while_one_waits()
    with pytest.raises(Exception, match="stopped while waiting for the rollouts"):
        await started[0]
    assert read_exit(tmp_path / "session").error == "RuntimeError"


def test_a_session_needs_a_run_that_it_can_order(opened, run_file, tmp_path):
    for settings, words in (
        ({"algorithm": "sft"}, "makes no rollouts"),
        ({"run": {"streams": "files"}}, "has a supervisor"),
    ):
        with pytest.raises(ConfigError, match=words), opened(**settings):
            pass
    with pytest.raises(ConfigError, match="needs a model"):
        slipstream.session()
    with pytest.raises(ConfigError, match="belong to tasks"):
        slipstream.session(run_file, reward="exact")
    with pytest.raises(ConfigError, match="is not open"):
        opened().rollouts()


def test_objects_of_the_caller_make_a_session(opened, model, tmp_path):
    def reward(task, completion):
        return float(len(completion) % 2)

    rows = [{"prompt": f"say {n}", "answer": "a"} for n in range(40)]
    settings = {"training": {"prompts_per_batch": 2}, "run": {"threads": 1}, "evaluation": False}
    more = {"algorithm": {"kind": "grpo", "group_size": 4}, "folder": tmp_path / "own", "progress": False}
    with slipstream.session(model=model, tasks=rows, reward=reward, steps=1, **settings, **more) as s:
        groups = s.rollouts()
        assert [len(group) for group in groups] == [4, 4]
        s.train(groups)


def test_a_stream_at_staleness_0_gives_the_figures_of_the_run(scripted, opened, tmp_path):
    scripted.finish(3, "--environment.settings", "{parity = true}")
    with opened() as s:
        s.evaluate()
        for groups in s.stream():
            s.train(groups)
            s.sync()
        s.evaluate()
    assert figures(tmp_path / "session") == figures(scripted.folder)


def test_a_stream_is_ahead_by_the_staleness_and_leaves_no_open_group(opened, scripted, tmp_path):
    asked = []
    with opened(training={"staleness": 1}, steps=6) as s:
        s.sync()
        scripted.engine.on_request = lambda request: asked.append((s.step, request.group_id))
        tasks = ({"prompt": f"say {n}", "answer": "a", **s.tasks[0].info} for n in range(1000))
        for groups in s.stream(tasks, n=2):
            assert [len(group) for group in groups] == [2, 2, 2, 2]
            s.train(groups)
            s.sync()
            if s.step == 4:
                break
    rows = read_metrics(tmp_path / "session")
    assert max(row["staleness/max"] for row in rows[1:]) == 1.0, "some were generated while the trainer trained"
    assert {int(group.split(".")[0]) - step for step, group in asked if group} <= {0, 1}
    assert balance(tmp_path / "session").num_open == 0
    assert ended(tmp_path / "session")["trained", ""] == 16


def test_a_stream_ends_with_its_tasks_and_asks_for_a_sync(opened, tmp_path):
    with opened() as s:
        tasks = s.tasks[:6]
        sizes = []
        for groups in s.stream(tasks):  # two batches of one version
            sizes.append(len(groups))
        assert sizes == [4, 2]
        stream = s.stream()
        s.train(next(stream))
        with pytest.raises(ConfigError, match=r"call s\.sync\(\) first"):
            next(stream)
    assert ended(tmp_path / "session") == {("trained", ""): 4, ("dropped", "unused"): 6}


async def test_a_stream_of_coroutines(opened):
    async with opened() as s:
        async for groups in s.stream():
            await s.train(groups)
            await s.sync()
        assert s.step == 3


EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name):
    return import_file(EXAMPLES / "algorithms" / f"{name}.py", "test")


@pytest.mark.parametrize("name", sorted(path.stem for path in (EXAMPLES / "algorithms").glob("*.py")))
def test_an_example_is_short_and_imports_public_names(name):
    text = (EXAMPLES / "algorithms" / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 60
    imported = set(re.findall(r"^(?:from|import) ([\w.]+)", text, re.M))
    assert imported <= {"argparse", "collections", "copy", "itertools", "msgspec", "slipstream", "torch"}


def with_parity(run_file):
    text = run_file.read_text().replace("reward_timeout_s = 60", "reward_timeout_s = 60\nsettings = {parity = true}")
    run_file.write_text(text)


def test_the_best_of_n_answers_are_imitated(opened, run_file, tmp_path):
    folder = tmp_path / "best"
    opened()
    with_parity(run_file)
    for rounds in (1, 2):  # the second call goes on
        example("best_of_n").main(run_file, folder, rounds, tasks=4, answers=4, size=8)
    rows = read_metrics(folder)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["train/grad_norm"] > 0 for row in rows[1:])
    found = ended(folder)
    assert sum(found.values()) == 8
    assert balance(folder).num_open == 0


def test_two_models_play_against_each_other(opened, model, tmp_path):
    opened()
    example("self_play").main(str(model), str(tmp_path), 2)
    rewards = [[row["reward/mean"] for row in read_metrics(tmp_path / name)[1:]] for name in ("matcher", "hider")]
    assert [sum(pair) for pair in zip(*rewards, strict=True)] == [1.0, 1.0]
    assert [read_exit(tmp_path / name).status for name in ("matcher", "hider")] == ["finished", "finished"]


@pytest.mark.full
def test_a_loss_of_two_ranks_is_imported(opened, tmp_path):
    own = tmp_path / "own_losses.py"
    own.write_text("def half(inputs):\n    return -0.5 * inputs.advantages_N * inputs.logprobs_N\n")
    sys.path.insert(0, str(tmp_path))
    try:
        half = importlib.import_module("own_losses").half
    finally:
        sys.path.remove(str(tmp_path))
    losses = []
    for number in (1, 2):
        with opened(tmp_path / f"ranks-{number}", training={"ranks": number}, run={"threads": 2}, steps=4) as s:
            for loss in (half, "sft", None):
                losses.append(s.train(s.rollouts(), loss)["train/grad_norm"])
                s.sync()
            if number == 2:
                with pytest.raises(ConfigError, match=r"<lambda> is no function at the top level.*ranks = 2"):
                    s.train(s.rollouts(), lambda inputs: -inputs.logprobs_N)
    assert losses[3:] == pytest.approx(losses[:3], rel=1e-3)


async def test_plain_calls_work_below_a_running_event_loop(opened):
    """As in the cell of a notebook."""
    with opened() as s:
        s.train(s.rollouts())
        s.sync()
    assert s.step == 1
