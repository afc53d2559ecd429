"""Version folders of the bridge `disk`: when one may be a delta, what it holds, and whose the others are."""

import os
import shutil

import pytest
import torch
from safetensors.torch import load_file

from slipstream.config.traits import keeps_versions
from slipstream.records import Delta, Version
from slipstream.weights import create_publisher
from slipstream.weights.bridges import delta, disk
from slipstream.weights.bridges.delta import Changes, compare
from slipstream.weights.bridges.disk import FolderPublisher
from slipstream.weights.fingerprint import describe
from slipstream.weights.fingerprint_torch import bits_of

WEIGHTS = {"w": torch.zeros(8)}
BASE = Version(0, 0, "abc")


class Folders(FolderPublisher):
    """Writes no files."""

    def write(self, folder, weights):
        folder.mkdir(parents=True)
        return 100


def of_bytes(size):
    """A delta of so many, of a whole version of 100."""
    return Changes(Delta(BASE, ()), {"0": torch.zeros(size, dtype=torch.uint8)}, 2, 8, 100)


def publish(publisher, step, changes=None):
    announced = []
    ticket = publisher.publish(WEIGHTS.items(), step, 0, announced.append, changes)
    assert announced == [ticket]
    return ticket


def are_deltas(publisher, sizes):
    publish(publisher, 0)
    return [publish(publisher, step, of_bytes(size)).delta is not None for step, size in enumerate(sizes, start=1)]


def test_deltas_follow_until_they_are_larger_than_a_whole_version(tmp_path):
    assert are_deltas(Folders("disk", tmp_path / "a", tmp_path), [50, 50, 1, 50]) == [True, True, False, True]
    assert are_deltas(Folders("disk", tmp_path / "b", tmp_path), [50, 40, 11]) == [True, True, False]
    assert are_deltas(Folders("disk", tmp_path / "c", tmp_path), [51]) == [False], "it saves less than half"


def test_no_chain_is_longer_than_the_longest(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "LONGEST_CHAIN", 3)
    assert are_deltas(Folders("disk", tmp_path, tmp_path), [1] * 8) == [True] * 3 + [False] + [True] * 3 + [False]


def test_a_ticket_says_what_the_folder_is(tmp_path):
    publisher = Folders("restart", tmp_path, tmp_path)
    first, second, third = (
        publish(publisher, 0),
        publish(publisher, 1, of_bytes(20)),
        publish(publisher, 2, of_bytes(60)),
    )
    assert (first.bridge, first.location, first.base) == ("restart", str(tmp_path / "0.0"), ())
    assert first.parameters == tuple(describe(WEIGHTS.items()))
    assert (first.num_bytes, first.changed_fraction, first.delta) == (100, None, None)
    assert (second.num_bytes, second.changed_fraction, second.delta) == (20, 0.25, of_bytes(20).delta)
    assert (third.num_bytes, third.changed_fraction, third.delta) == (100, 0.25, None)
    assert [path.name for path in (tmp_path / "0.1").iterdir()] == ["patches.safetensors"]
    assert list((tmp_path / "0.2").iterdir()) == []


def test_only_the_first_version_removes_what_another_process_left(tmp_path):
    stale, later = tmp_path / "weights/0.9", tmp_path / "weights/mine"
    stale.mkdir(parents=True)
    publisher = Folders("disk", tmp_path / "weights", tmp_path)
    assert stale.exists(), "before it, a run may start from there"
    publish(publisher, 0)
    assert not stale.exists()
    later.mkdir()
    publish(publisher, 1)
    assert later.exists()


def test_a_folder_that_somebody_removed_is_not_missed(tmp_path):
    publisher = Folders("disk", tmp_path, tmp_path)
    publish(publisher, 0)
    shutil.rmtree(tmp_path / "0.0")
    for step in (1, 2, 3):
        publish(publisher, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.2", "0.3"]


@pytest.mark.parametrize(("held", "first"), [(0, 0), (1, 0), (2, 0), (4, 4)])
def test_a_version_stays_with_its_chain_for_as_long_as_it_is_held(tmp_path, held, first):
    publisher = Folders("disk", tmp_path, tmp_path)
    publisher.hold(held)
    for step in range(8):
        publish(publisher, step, of_bytes(1) if step in (1, 2) else None)
        assert (step < held) == (not (tmp_path / f"0.{held}").exists())
    chain = {f"0.{step}" for step in range(first, held + 1)}
    assert {path.name for path in tmp_path.iterdir()} == chain | {"0.6", "0.7"}
    publisher.hold(None)
    publish(publisher, 8)
    assert {path.name for path in tmp_path.iterdir()} == {"0.7", "0.8"}


def test_stretches_of_one_parameter_are_stored_side_by_side(tmp_path, monkeypatch):
    """As bytes of the parameter itself, where all of a stretch has changed; and nobody waits for the disk."""
    monkeypatch.setattr(delta, "STRETCH", 8)
    monkeypatch.setattr(os, "fsync", lambda descriptor: pytest.fail("a delta is not for ever"))
    old = torch.zeros(64)
    new = old.clone()
    new[:16] = torch.arange(1.0, 17.0)
    changes = compare([("w", new)], {"w": bits_of(old)}, BASE)
    assert [patch.encoding for patch in changes.delta.patches] == ["whole", "whole"]
    assert disk.write_patches(tmp_path / "0.1", changes) == 16 * 4 == changes.num_bytes
    found = load_file(tmp_path / "0.1/patches.safetensors")
    assert torch.equal(torch.cat([found["0"], found["1"]]).view(torch.float32), new[:16])


@pytest.mark.parametrize("bridge", ["disk", "restart", "broadcast", "single_copy"])
def test_what_the_plan_says_of_a_bridge_is_what_its_publisher_does(tmp_path, bridge):
    """A bridge that keeps versions writes folders; `restart` does too, but its engines end at each update."""
    publisher = create_publisher(bridge, folder=tmp_path / "weights", source=tmp_path)
    publisher.hold(3)
    assert (isinstance(publisher, FolderPublisher) and bridge != "restart") == keeps_versions(bridge)
    publisher.close()
