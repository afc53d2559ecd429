"""A run that is killed and resumed ends with the bits of one that nobody disturbed; see the benchmark."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "kill_resume.py"


@pytest.mark.full
def test_sft_killed_three_times_ends_with_the_same_weights():
    result = subprocess.run(
        [sys.executable, str(BENCHMARK), "--kills", "3", "--steps", "100"],
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    undisturbed, killed = ([cell.strip() for cell in row.split("|")[1:-1]] for row in result.stdout.splitlines()[2:])
    assert (undisturbed[0], killed[0]) == ("undisturbed", "killed")
    assert int(killed[2]) + int(killed[3]) == 3
    assert int(killed[3]) >= 1
    assert killed[4] == undisturbed[4]
