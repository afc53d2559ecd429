"""The parts of `benchmarks/sync_peers.py` that need neither GPUs nor an engine."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from .programs import program

PATH = Path(__file__).parents[1] / "benchmarks" / "sync_peers.py"


@pytest.fixture(scope="module")
def peers():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PATH.parent))  # as for a program that runs there
        with program(PATH, "sync_peers") as module:
            yield module


def test_it_runs_from_any_folder(tmp_path):
    done = subprocess.run(
        [sys.executable, str(PATH), "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_slipstreams_row_is_of_the_benchmark_of_weight_updates(peers, tmp_path, monkeypatch):
    options = SimpleNamespace(updates=0, streams=2, context=128, timeout=60.0, in_flight="keep")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match=r"^error: --updates 0 leaves nothing to measure: use 1 or more$"):
        peers.ours("model", options)


def test_a_stall_is_the_longest_gap_that_the_update_is_in(peers):
    ticks = [0.0, 3.0, 1.0, 4.0, 4.5, 4.6, 9.0]  # of several generations, in any order
    assert peers.longest_gap(ticks, began=3.5, ended=4.55) == 1.0
    assert peers.longest_gap(ticks, began=4.2, ended=4.3) == 0.5
    assert peers.longest_gap(ticks, began=4.2, ended=4.7) == pytest.approx(4.4)
    assert peers.longest_gap([], began=0.0, ended=1.0) == 0.0


def test_a_system_that_fails_leaves_the_others_their_rows(peers):
    def fails():
        raise RuntimeError("Traceback ...\nRuntimeError: no NCCL here")

    options = peers.parse(["--systems", "slipstream", "trl", "--model", "tiny"])
    assert options.in_flight == "keep"
    spread = {"median": 0.0101, "p95": 0.012, "largest": 0.2}
    good = {"system": "slipstream", "num_bytes": 3_090_000_000, "transfer": spread, "stall": spread, "raw_s": 0.009}
    rows = [peers.attempt("slipstream", lambda: good), peers.attempt("trl", fails)]
    text = peers.table(json.loads(json.dumps(rows)))
    assert "| slipstream | 3.090 |  | 10.1, 12.0 |  | 10.1, 12.0 |  |" in text
    assert "trl failed: RuntimeError: no NCCL here" in text
    assert "The collective alone: 9.0 ms." in text
