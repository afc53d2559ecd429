"""`slipstream bench sync` through the real command, with real engines."""

from __future__ import annotations

import json

import pytest

from slipstream.trainer.new_model import new_model
from slipstream.weights.raw import raw_broadcast_s

from .conftest import Command

pytestmark = pytest.mark.engine


def test_the_collective_alone_is_timed():
    assert 0 < raw_broadcast_s(1 << 20, "gloo", repeats=3, timeout_s=60) < 10


@pytest.mark.slow
def test_bridges_are_measured_one_after_the_other_and_nothing_is_left(tmp_path):
    model = new_model(tmp_path / "model", hidden_size=64, num_layers=2)
    (tmp_path / "scratch").mkdir()
    command = Command(
        *("bench", "sync", "--model", model, "--bridges", "broadcast", "lora", "--updates", 3, "--streams", 2),
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
    assert list((tmp_path / "scratch").iterdir()) == []
    assert command.left_behind() == []
