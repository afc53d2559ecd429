"""examples/self_distillation with real vLLM, for a few steps."""

import json
from pathlib import Path

import pytest

from slipstream.runlog import read_exit, read_metrics

pytestmark = [pytest.mark.engine, pytest.mark.full]


@pytest.mark.parametrize("hint", ["right", "shuffled"])
def test_it_trains(hint, command, tmp_path):
    small = ("--sft-steps", 5, "--steps", 2, "--hint", hint, "--folder", tmp_path)
    out = command(*small, module=("examples.self_distillation.run",)).ok()
    found = json.loads(out.splitlines()[-1])
    assert (found["hint"], len(found["before"]), len(found["after"])) == (hint, 3, 3)
    assert read_exit(tmp_path / hint).status == "finished"
    assert all(row["train/grad_norm"] > 0 for row in read_metrics(tmp_path / hint)[1:])
    assert Path(tmp_path / hint / "checkpoints").is_dir()
