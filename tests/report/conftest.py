"""Run folders of every state, written through the run log, and reports on them."""

from __future__ import annotations

import math

import pytest

from slipstream.errors import EngineError
from slipstream.runlog import RunLog

SETTINGS = """
[model]
path = "models/tiny"  # run.toml:2
dtype = "float32"     # derived: few parameters
[environment]
name = "reasoning_gym/{task}"  # run.toml:4
api_key = "hunter2-secret"     # command line
[algorithm]
kind = "grpo"             # run.toml:7
# arguments.kl_estimator = "k3"     # has no effect while algorithm.kl_coef is 0
[training]
steps = {steps}           # command line
# max_seconds is not set  # default
"""
HOSTILE = '</script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 1">&amp;\x00\x1b[31m\u202e'


def write_run(folder, *, steps=6, total=6, task="spell_backward", learns=True, error=None, ends=True, **_):
    """A run of `steps` steps as the training loop writes one."""
    log = RunLog.create(folder)
    log.resolved(SETTINGS.format(steps=total, task=task))
    log.event("start", resume=False, dropped={}, warnings=[], changed=[])
    for step in range(steps + 1):
        accuracy = 0.2 + 0.1 * step if learns else 0.2
        log.event("publish", version=f"0.{step}", digest=f"{step:016x}")
        log.event("apply", version=f"0.{step}", digest=f"{step:016x}", transfer_s=0.1, verify_s=0.2, num_bytes=9)
        row = {"probe/abs_logprob_diff": 1e-6 * (step + 1), "probe/max_logprob_diff": 1e-5, "time/update_s": 0.2}
        if step % 3 == 0:
            row |= {"eval/accuracy": accuracy, "eval/accuracy_low": accuracy - 0.05, "eval/num_tasks": 100.0}
            row |= {"eval/accuracy_high": accuracy + 0.05, "time/evaluate_s": 0.3}
            for task_id in ("held/1", HOSTILE):
                sample = {"step": step, "id": "e", "task": task_id, "prompt": f"ask {HOSTILE}", "split": "eval"}
                log.sample(sample | {"completion": HOSTILE, "reward": accuracy, "outcome": "done", "version": "0.0"})
        if step:
            row |= {"reward/mean": accuracy, "reward/std": 0.1, "rollout/length": 5.0, "rollout/length_max": 7.0}
            row |= {"train/loss": math.nan if step == 2 else -0.1, "train/entropy": 1.0 / step, "rollout/num": 8.0}
            row |= {"train/grad_norm": 0.5, "train/learning_rate": 1e-3 * step, "reward/signal_fraction": 0.5}
            row |= {"throughput/generated_tokens_per_s": 900.0 + step, "mismatch/abs_logprob_diff": 1e-6}
            row |= {"time/batch_s": 1.0, "time/generate_s": 1.0, "time/train_s": 0.5, "time/probe_s": 0.01}
            row |= {"train/ratio": 1.0 + 0.01 * step} | ({"dropped/reward_timeout": 2.0} if step == 3 else {})
        log.metrics(step, row)
    if steps:
        log.warning("something to know <b>", step=1)
    if error or ends:
        log.exit(error)
    return log


@pytest.fixture
def write(tmp_path):
    """Writes runs below the test's folder; their logs are closed at the end at the latest."""
    logs = []

    def make(name, **options):
        logs.append(write_run(tmp_path / name, **options))
        if not options.get("open", False):
            logs[-1].close()
        return tmp_path / name

    yield make
    for log in logs:
        log.close()


@pytest.fixture
def failed():
    return EngineError("the engine died: look at logs/engine.log")
