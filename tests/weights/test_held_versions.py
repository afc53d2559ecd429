"""Which versions stay on the disk while an engine stays on one; no engine needed."""

import pytest
import torch
from test_disk import WEIGHTS, Folders

from slipstream.config.traits import keeps_versions
from slipstream.records import Delta
from slipstream.weights import create_publisher
from slipstream.weights.adapter_folder import AdapterConfig, adapter_parameter
from slipstream.weights.bridges.delta import Changes
from slipstream.weights.bridges.disk import FolderPublisher
from slipstream.weights.bridges.lora import AdapterPublisher


class Small(Changes):
    """A delta of one byte."""

    num_bytes = 1
    pays = True


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_whole_version_stays_while_it_is_held_and_those_between_go(tmp_path):
    publisher = Folders("disk", tmp_path, tmp_path)
    for step in range(3):
        publisher.publish(WEIGHTS.items(), step, 0, lambda ticket: None)
    publisher.hold(2)
    for step in range(3, 7):
        publisher.publish(WEIGHTS.items(), step, 0, lambda ticket: None)
        assert names(tmp_path) == sorted({"0.2", f"0.{step - 1}", f"0.{step}"})
    publisher.hold(None)
    publisher.publish(WEIGHTS.items(), 7, 0, lambda ticket: None)
    assert names(tmp_path) == ["0.6", "0.7"]


def test_a_delta_stays_with_all_that_it_needs(tmp_path):
    publisher = Folders("disk", tmp_path, tmp_path)
    before = None
    for step, is_delta in enumerate([False, True, True, True, False, True, True, False, False]):
        changes = Small(Delta(before, ()), {}, 1, 4, 100) if is_delta else None
        before = publisher.publish(WEIGHTS.items(), step, 0, lambda ticket: None, changes).version
        if step == 2:
            publisher.hold(2)
    assert names(tmp_path) == ["0.0", "0.1", "0.2", "0.7", "0.8"]
    publisher.hold(None)
    publisher.publish(WEIGHTS.items(), 9, 0, lambda ticket: None)
    assert names(tmp_path) == ["0.8", "0.9"]


def test_an_adapter_that_is_held_is_not_written_over(tmp_path):
    publisher = AdapterPublisher(tmp_path / "weights", AdapterConfig(4, 4.0, ("up_proj",), "base"), [])
    names_ = [adapter_parameter("model.layers.0.mlp.up_proj", half) for half in "AB"]
    weights = dict(zip(names_, (torch.randn(4, 64), torch.randn(96, 4)), strict=True))
    publisher.publish(weights.items(), 0, 0, lambda ticket: None)
    publisher.hold(0)
    file = tmp_path / "weights/0.0/adapter_model.safetensors"
    content = file.read_bytes()
    for step in range(1, 6):
        for tensor in weights.values():
            tensor.normal_()
        publisher.publish(weights.items(), step, 0, lambda ticket: None)
    assert file.read_bytes() == content


@pytest.mark.parametrize("bridge", ["disk", "restart", "broadcast", "single_copy"])
def test_what_the_plan_says_of_a_bridge_is_what_its_publisher_does(tmp_path, bridge):
    """A bridge that keeps versions writes folders; `restart` does too, but its engines end at each update."""
    publisher = create_publisher(bridge, folder=tmp_path / "weights", source=tmp_path)
    publisher.hold(3)
    assert (isinstance(publisher, FolderPublisher) and bridge != "restart") == keeps_versions(bridge)
    publisher.close()
