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
from benchmarks.weight_sync.figures import BRIDGES, TOGETHER, SyncOptions
from benchmarks.weight_sync.measure import measure_sync

from slipstream.errors import ConfigError
from slipstream.trainer.model.small.tiny_qwen3 import new_model

from .conftest import Command

pytestmark = pytest.mark.engine


def weight_sync(*arguments):
    return Command(*arguments, module=("benchmarks.weight_sync",))


def test_help_names_every_bridge_and_option():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.weight_sync", "--help"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert all(name in done.stdout for name in BRIDGES)
    assert done.stdout.startswith("usage: python -m benchmarks.weight_sync ")
    assert "What one weight update costs by each bridge" in done.stdout


def test_the_command_line():
    assert program.parse([]) == program.Request(BRIDGES, False, False, SyncOptions("tiny"))
    assert program.parse(["--together"]).bridges == TOGETHER
    line = "--bridges disk broadcast+delta --model m --updates 3 --streams 2 --placement shared --replicas 2 --json"
    line += " --changed 0.5 --rank 4 --tensor-parallel-size 2 --ranks 2 --in-flight keep --context 128 --timeout 9"
    options = SyncOptions(
        *("m", 3, 2, "shared", 2, 0.5, "keep", 128, 4), tensor_parallel_size=2, ranks=2, timeout_s=9.0
    )
    assert program.parse(line.split()) == program.Request(("disk", "broadcast+delta"), False, True, options)
    again = program.parse([*line.split(), "--model", "made", "--json", "--bridges", "disk"])
    assert (again.bridges, again.options.model) == (("disk",), "made"), "as each bridge's own process is started"


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


def test_an_unknown_bridge_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        program.main(["--bridges", "disc"])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert "invalid choice: 'disc'" in err


@pytest.mark.parametrize("num_receivers", [1, 2])
def test_the_collective_alone_is_timed(num_receivers):
    assert 0 < raw_broadcast_s(1 << 20, "gloo", [()] * num_receivers, repeats=3, timeout_s=60) < 60


@pytest.mark.full
def test_bridges_are_measured_one_after_the_other_and_nothing_is_left(tmp_path):
    model = new_model(tmp_path / "model", hidden_size=64, num_layers=2)
    (tmp_path / "scratch").mkdir()
    command = weight_sync(
        *("--model", model, "--bridges", "broadcast", "lora", "--updates", 3, "--streams", 2),
        *("--scratch", tmp_path / "scratch", "--json"),
    )
    code, out, err = command.wait()
    assert code == 0, err
    found = json.loads(out)
    assert found["failures"] == []
    broadcast, lora = found["bridges"]
    assert (broadcast["bridge"], lora["bridge"]) == ("broadcast", "lora")
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    assert 0.9 * size < broadcast["num_bytes"] <= size
    assert lora["num_bytes"] < broadcast["num_bytes"]
    for row in (broadcast, lora):
        assert (row["num_updates"], row["model"], row["placement"]) == (3, str(model), "cpu")
        assert 0 < row["transfer"]["median"] <= row["transfer"]["p95"] <= row["transfer"]["largest"]
        assert row["stall"]["median"] < row["update"]["largest"] + 1
        for side in ("trainer", "engine"):
            assert size < row[side]["pss"] <= row[side]["rss"]
    assert broadcast["raw_s"] > 0
    told = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
    assert told[-1]["bridge"] == "lora", "each is told of as soon as it is there"
    assert list((tmp_path / "scratch").iterdir()) == []
    assert command.left_behind() == []


@pytest.mark.full
def test_one_engine_takes_its_weights_by_several_bridges(tmp_path):
    model = new_model(tmp_path / "model", hidden_size=64, num_layers=2)
    command = weight_sync(
        *("--model", model, "--together", "--bridges", "disk", "broadcast", "broadcast+delta"),
        *("--updates", 2, "--streams", 2, "--in-flight", "keep", "--context", 128, "--timeout", 120, "--json"),
    )
    code, out, err = command.wait()
    assert code == 0, err
    rows = json.loads(out)["bridges"]
    assert [row["bridge"] for row in rows] == ["disk", "broadcast", "broadcast+delta"]
    assert {(row["in_flight"], row["context"], row["num_updates"]) for row in rows} == {("keep", 128, 2)}
    assert rows[2]["num_bytes"] < 0.2 * rows[1]["num_bytes"] == 0.2 * rows[0]["num_bytes"]
    assert command.left_behind() == []


def test_an_adapter_needs_an_engine_of_its_own():
    with pytest.raises(ConfigError, match="lora needs an engine of its own: leave out --together"):
        measure_sync(["disk", "lora"], SyncOptions("nowhere"))


@pytest.mark.full
def test_an_adapter_over_a_base_that_is_shared(tmp_path):
    model = new_model(tmp_path / "model", hidden_size=64, num_layers=2)
    command = weight_sync(
        *("--model", model, "--bridges", "single_copy+lora", "--updates", 2, "--streams", 2, "--json")
    )
    code, out, err = command.wait()
    assert code == 0, err
    (row,) = json.loads(out)["bridges"]
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    assert 0 < row["num_bytes"] < size / 2
    assert row["commit"] is None, "nothing that the engine reads is written in place"


@pytest.mark.full
def test_ranks_write_what_the_workers_of_one_engine_have(tmp_path):
    model = new_model(tmp_path / "model", hidden_size=64, num_layers=2)
    (tmp_path / "scratch").mkdir()
    command = weight_sync(
        *("--model", model, "--bridges", "single_copy", "--tensor-parallel-size", 2, "--updates", 3),
        *("--streams", 2, "--context", 128, "--scratch", tmp_path / "scratch", "--json"),
    )
    command.until(lambda: len(command.engines()) == 1)
    code, out, err = command.wait()
    assert code == 0, err
    (row,) = json.loads(out)["bridges"]
    assert (row["tensor_parallel_size"], row["ranks"], row["num_updates"]) == (2, 2, 3)
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    # Norms, and words, which are no multiple of 64, go to both workers.
    assert 0 < row["num_bytes"] < size / 2
    assert 0 < row["commit"]["median"] <= row["update"]["median"]
    assert row["num_parameters"] * 4 == pytest.approx(size, rel=0.05)
    for side in ("trainer", "engine"):
        assert size < row[side]["pss"] <= row[side]["rss"]
    assert list((tmp_path / "scratch").iterdir()) == []
    assert command.left_behind() == []


@pytest.mark.full
def test_other_bridges_reach_all_workers_of_an_engine(tmp_path):
    model = new_model(tmp_path / "model", hidden_size=64, num_layers=2)
    command = weight_sync(
        *("--model", model, "--together", "--bridges", "disk", "broadcast", "broadcast+delta"),
        *("--tensor-parallel-size", 2, "--updates", 2, "--streams", 2, "--context", 128, "--timeout", 300, "--json"),
    )
    code, out, err = command.wait()
    assert code == 0, err
    rows = json.loads(out)["bridges"]
    assert [row["bridge"] for row in rows] == ["disk", "broadcast", "broadcast+delta"]
    assert {(row["tensor_parallel_size"], row["ranks"], row["gather_s"]) for row in rows} == {(2, 1, None)}
    assert [row["raw_s"] is not None for row in rows] == [False, True, False]
    assert command.left_behind() == []


@pytest.mark.full
def test_ranks_publish_to_two_engines(tmp_path):
    model = new_model(tmp_path / "model", hidden_size=64, num_layers=2)
    command = weight_sync(
        *("--model", model, "--together", "--bridges", "disk", "broadcast", "broadcast+delta"),
        *("--ranks", 2, "--replicas", 2, "--updates", 2, "--streams", 2, "--context", 128, "--timeout", 300, "--json"),
    )
    code, out, err = command.wait()
    assert code == 0, err
    rows = json.loads(out)["bridges"]
    assert [row["bridge"] for row in rows] == ["disk", "broadcast", "broadcast+delta"]
    assert [(row["ranks"], row["num_updates"], row["tensor_parallel_size"]) for row in rows] == [(2, 2, 1)] * 3
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    for row in rows:
        assert row["gather_s"] > 0
        assert size < row["trainer"]["pss"], "all its processes"
        assert row["num_parameters"] * 4 == pytest.approx(size, rel=0.05)
    assert [row["from_one_s"] is not None for row in rows] == [False, True, False]
    assert rows[2]["num_bytes"] < 0.2 * rows[1]["num_bytes"] == 0.2 * rows[0]["num_bytes"]
    assert command.left_behind() == []


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


def test_what_cannot_be_divided_is_said_before_anything_starts(tmp_path):
    model = new_model(tmp_path / "model", hidden_size=48, num_layers=1, num_heads=3, num_kv_heads=1)
    with pytest.raises(ConfigError, match=r"single_copy\+lora shares the base with one process"):
        measure_sync(["single_copy+lora"], SyncOptions(str(model), tensor_parallel_size=2))
    with pytest.raises(ConfigError, match="does not divide the model's 3 attention heads"):
        measure_sync(["single_copy"], SyncOptions(str(model), tensor_parallel_size=2))
