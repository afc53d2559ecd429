"""Rewards that do what they should not, in whole runs: each rollout is counted, and a score is its completion's."""

from pathlib import Path

import pytest

from slipstream.runlog import read_samples

HOSTILE = """
import contextlib, os, sys, tempfile
from slipstream.envs.scoring.process import Answer, encode
from slipstream.processes.channel import pack
from slipstream.envs import Score

def tasks(split, num_tasks, seed):
    return [{"prompt": f"{split} {i}", "answer": "a", "mode": MODES[i % len(MODES)]} for i in range(num_tasks)]

def reward(task, completion):
    right = float(completion == task.answer)
    mode = task.info["mode"]
    return globals()[mode](right) if mode and not right else right

def sysexit(right):
    sys.exit(3)

def exit3(right):
    os._exit(3)

def chdir(right):
    os.chdir(tempfile.gettempdir())
    return right

def odd_keys(right):
    return {"reward": right, 3: 1.0, (1, 2): 2.0, "": 3.0}

def forged(right):
    for fd in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(fd, pack(encode(Answer("score", (Score(1000.0),)))))
    return right

def many_keys(right):
    return {"reward": right, **{str(i): i for i in range(10_000)}}

def new_keys(right):
    return {"reward": right, **{os.urandom(8).hex(): 1.0 for _ in range(60)}}

def child(right):
    if os.fork() == 0:
        return 1000.0
    return right

MODES = ["", "", "sysexit", "exit3", "chdir", "odd_keys", "forged", "many_keys", "new_keys", "child"]
"""


@pytest.mark.full
@pytest.mark.parametrize("fresh", ["true", "false"])
def test_a_run_of_hostile_rewards(scripted, tmp_path, fresh):
    path = tmp_path / "hostile.py"
    path.write_text(HOSTILE)
    report = scripted.run(
        *("--environment.name", str(path), "--environment.max_reward_failures", "0.9", "--evaluation", "false"),
        *("--environment.num_train_tasks", "10", "--training.prompts_per_batch", "10", "--run.save_samples", "40"),
        *("--environment.fresh_worker", fresh),
    )
    assert (report.status, report.exit_code, report.step) == ("finished", 0, 3), report.message
    for row in scripted.metrics[1:]:
        assert row["rollout/num"] + row["dropped/reward_error"] == 40
        assert row["dropped/reward_error"] > 0
        assert 0 < row["reward/mean"] < 1
    samples = read_samples(scripted.folder)
    failed = [sample for sample in samples if sample["outcome"] == "reward_error"]
    for step, row in enumerate(scripted.metrics[1:]):
        assert sum(sample["step"] == step for sample in failed) == min(4, row["dropped/reward_error"])
    assert all(sample["error"] and sample["completion"] for sample in failed), "what fails is there to be read"
    graded = [sample for sample in samples if sample["outcome"] == "done"]
    assert len(graded) == sum(row["rollout/num"] for row in scripted.metrics[1:])
    assert [sample["reward"] for sample in graded] == [float(sample["completion"] == "a") for sample in graded]
    assert any("metrics by name" in event["message"] for event in scripted.events("warning"))
    assert sum(path.stat().st_size for path in Path(scripted.folder).glob("metrics.jsonl")) < 100_000
