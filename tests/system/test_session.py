"""A session on real vLLM: the figures of a run, losses and tasks of the caller's, and every way out."""

import pytest

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
