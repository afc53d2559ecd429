"""The parts of `benchmarks/sync_peers.py` that need neither GPUs nor an engine."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def peers() -> ModuleType:
    path = Path(__file__).parent.parent / "benchmarks/sync_peers.py"
    spec = importlib.util.spec_from_file_location("sync_peers", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
