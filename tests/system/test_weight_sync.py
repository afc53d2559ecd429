"""`python -m benchmarks.weight_sync`: its command line, and the real program with real engines."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import psutil
import pytest
from benchmarks.weight_sync import __main__ as program
from benchmarks.weight_sync import measure
from benchmarks.weight_sync.collective import raw_broadcast_s
from benchmarks.weight_sync.figures import BRIDGES, SyncOptions

from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.errors import ConfigError

from .conftest import Command

pytestmark = pytest.mark.engine


def test_help_names_every_bridge_and_option():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.weight_sync", "--help"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert all(name in done.stdout for name in BRIDGES)
    assert done.stdout.startswith("usage: python -m benchmarks.weight_sync ")
    assert "What one weight update costs by each bridge" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--updates 0", "--updates 0 leaves nothing to measure: use 1 or more"),
        ("--ranks 0", "--ranks 0 leaves nothing to measure: use 1 or more"),
        ("--changed 2", "--changed 2 leaves nothing to measure: use a fraction above 0 and up to 1"),
        ("--timeout 0", "--timeout 0 leaves no time: use some hundred seconds"),
        ("--scratch none", "--scratch none is not a folder: make it first"),
        ("--bridges disk --model ./none", "none does not exist: name the folder of a model"),
        ("--bridges disk --placement separate --model model", "needs two GPUs, and there are"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence_and_nothing_is_left(arguments, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "measure_gpus", lambda: (0, None))
    new_model(tmp_path / "model", hidden_size=32, num_layers=1)
    before, children = sorted(tmp_path.rglob("*")), set(psutil.Process().children(recursive=True))
    code = program.main(arguments.split())
    out, err = capsys.readouterr()
    assert (code, out) == (2, ""), err
    assert re.match("error: ", err)
    assert re.search(said, err), err
    assert len(err.strip().splitlines()) == 1, err
    assert sorted(tmp_path.rglob("*")) == before
    assert set(psutil.Process().children(recursive=True)) <= children


@pytest.mark.full
@pytest.mark.parametrize("num_receivers", [1, 2])
def test_the_collective_alone_is_timed(num_receivers):
    assert 0 < raw_broadcast_s(1 << 20, "gloo", [()] * num_receivers, repeats=3, timeout_s=60) < 60


THREE = ("--together", "--bridges", "disk", "broadcast", "broadcast+delta", "--updates", 2, "--context", 128)


def measured(tmp_path, *options):
    """What the real program says of each bridge on a small model; that, and the model's size."""
    model = new_model(tmp_path / "model", hidden_size=64, num_layers=2)
    (tmp_path / "scratch").mkdir()
    options += ("--streams", 2, "--timeout", 300, "--scratch", tmp_path / "scratch", "--json")
    command = Command("--model", model, *options, module=("benchmarks.weight_sync",))
    code, out, err = command.wait()
    assert code == 0, err
    assert command.left_behind() == []
    assert list((tmp_path / "scratch").iterdir()) == []
    found = json.loads(out)
    assert found["failures"] == []
    told = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
    assert told[-1]["bridge"] == found["bridges"][-1]["bridge"], "each is told of as soon as it is there"
    return found["bridges"], sum(file.stat().st_size for file in model.glob("*.safetensors"))


SAME = {"tensor_parallel_size": 1, "ranks": 1, "num_updates": 2, "context": 128}


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--in-flight", "keep"), {"in_flight": "keep", "gather_s": None}),
        (("--tensor-parallel-size", 2), {"tensor_parallel_size": 2, "gather_s": None}),
        (("--ranks", 2, "--replicas", 2), {"ranks": 2}),
    ],
    ids=["one", "two workers", "two ranks, two engines"],
)
def test_engines_take_their_weights_by_several_bridges(tmp_path, options, expected):
    rows, size = measured(tmp_path, *THREE, *options)
    assert [row["bridge"] for row in rows] == ["disk", "broadcast", "broadcast+delta"]
    assert [{name: row[name] for name in SAME | expected} for row in rows] == [SAME | expected] * 3
    assert [row["raw_s"] is not None for row in rows] == [False, True, False]
    assert rows[2]["num_bytes"] < 0.2 * rows[1]["num_bytes"] == 0.2 * rows[0]["num_bytes"]
    if expected.get("ranks") == 2:
        assert [row["from_one_s"] is not None for row in rows] == [False, True, False]
        for row in rows:
            assert row["gather_s"] > 0
            assert size < row["trainer"]["pss"], "all its processes"
            assert row["num_parameters"] * 4 == pytest.approx(size, rel=0.05)


@pytest.mark.parametrize(
    ("bridge", "num_gpus", "options", "found"),
    [
        ("broadcast", 0, {"ranks": 2, "replicas": 2}, ("shared", 2)),
        ("broadcast", 4, {"ranks": 2, "replicas": 2}, ("separate", 2)),
        ("disk", 4, {"ranks": 2, "tensor_parallel_size": 2}, ("separate", 2)),
        ("disk", 2, {}, ("separate", 1)),
        ("single_copy", 2, {"tensor_parallel_size": 2}, ("shared", 2)),
        ("disk", 3, {"ranks": 2, "replicas": 2}, "--replicas 2 beside --ranks 2 needs 4 GPUs, and there are 3"),
        ("broadcast", 1, {"ranks": 2}, "beside --ranks 2 needs 3 GPUs, and there are 1: use fewer"),
        ("disk", 4, {"ranks": 2, "placement": "shared"}, "--ranks 2 have GPUs of their own: leave out"),
        ("single_copy", 4, {"ranks": 2}, "one trainer process for each worker, and --ranks 2 is not .* 1: leave out"),
        ("lora", 4, {"ranks": 2}, "lora is measured with one trainer process: leave out --ranks"),
    ],
)
def test_who_is_on_which_gpu(bridge, num_gpus, options, found, monkeypatch):
    monkeypatch.setattr(measure, "measure_gpus", lambda: (num_gpus, 1 << 37))
    if isinstance(found, tuple):
        assert measure._placement(bridge, "", SyncOptions("nowhere", **options)) == found
        return
    with pytest.raises(ConfigError, match=found):
        measure._placement(bridge, "", SyncOptions("nowhere", **options))
