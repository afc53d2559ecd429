"""The crash matrix of `benchmarks/crashes.py`, in small."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "crashes.py"


@pytest.mark.engine
@pytest.mark.full
@pytest.mark.real_start
@pytest.mark.timeout(1300)
def test_ten_kills_at_random_moments():
    """Five processes: supervisor, trainer, orchestrator, engine and Redis, killed twice each."""
    command = [sys.executable, str(SCRIPT), "--runs", "2", "--faults", "5", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    runs = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert [run["wrong"] for run in runs] == [[], []]
    assert sum(len(run["faults"]) for run in runs) == 10
    assert done.returncode == 0, done.stderr
