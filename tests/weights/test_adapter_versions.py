"""What the bridge `lora` leaves on the disk, version by version; no engine needed."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from slipstream.weights.adapter_folder import AdapterConfig, adapter_parameter, read_adapter_config
from slipstream.weights.bridges.lora import AdapterPublisher
from slipstream.weights.fingerprint import describe


def publisher_of(folder, alpha):
    return AdapterPublisher(folder, AdapterConfig(4, alpha, ("up_proj",), "base"), [])


A, B = (adapter_parameter("model.layers.0.mlp.up_proj", half) for half in "AB")


@pytest.mark.parametrize("alpha", [4.0, 8.0])
def test_each_version_is_its_own_in_a_file_that_no_engine_holds_any_more(tmp_path, alpha):
    publisher = publisher_of(tmp_path / "weights", alpha)
    weights = {A: torch.nn.Parameter(torch.randn(4, 64)), B: torch.nn.Parameter(torch.randn(96, 4))}
    inodes, announced = [], []
    for step in range(6):
        with torch.no_grad():
            for parameter in weights.values():
                parameter.normal_()
        ticket = publisher.publish(weights.items(), step, 0, announced.append)
        file = tmp_path / "weights" / ticket.version.name / "adapter_model.safetensors"
        wanted = {A: weights[A].detach(), B: weights[B].detach() * (alpha / 4)}
        found = load_file(file)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert describe(wanted.items()) == ticket.parameters
        inodes.append(file.stat().st_ino)
    assert len(announced) == 6
    # An engine holds the last two versions, and one may be on its way.
    assert inodes == inodes[:3] * 2
    assert len(set(inodes)) == 3
    found = sorted(path.name for path in (tmp_path / "weights").iterdir())
    assert found == sorted([".spare.safetensors", *(ticket.version.name for ticket in announced[-2:])])
    publisher.close()
    assert not (tmp_path / "weights" / ".spare.safetensors").exists()


def test_a_file_that_has_another_name_is_left_as_it_is(tmp_path):
    publisher = publisher_of(tmp_path / "weights", 8.0)
    weights = {A: torch.randn(4, 64), B: torch.randn(96, 4)}
    first = publisher.publish(weights.items(), 0, 0, lambda ticket: None)
    kept = tmp_path / "kept.safetensors"
    kept.hardlink_to(tmp_path / "weights" / first.version.name / "adapter_model.safetensors")
    for step in range(1, 5):
        later = {name: weight + step for name, weight in weights.items()}
        publisher.publish(later.items(), step, 0, lambda ticket: None)
    assert torch.equal(load_file(kept)[A], weights[A])


def test_every_ticket_has_the_base_model_which_is_read_once(tmp_path):
    base = {"frozen": torch.randn(3, 4), "other": torch.ones(2)}
    config = AdapterConfig(4, 8.0, ("up_proj",), "org/base")
    publisher = AdapterPublisher(tmp_path / "weights", config, iter(base.items()))
    weights = {A: torch.randn(4, 64), B: torch.randn(96, 4)}
    for step in range(2):
        ticket = publisher.publish(weights.items(), step, 0, lambda ticket: None)
        assert ticket.base == tuple(describe(base.items()))
        assert (ticket.bridge, ticket.num_bytes) == ("lora", 4 * 4 * (64 + 96))
        assert ticket.location == str(tmp_path / "weights" / f"0.{step}")
    found = read_adapter_config(tmp_path / "weights/0.1")
    assert found == AdapterConfig(4, 4.0, ("up_proj",), "org/base"), "the scaling is in B"


def test_what_is_published_lies_where_the_version_before_lay(tmp_path):
    """The fingerprint kernel keeps a table of addresses."""
    publisher = publisher_of(tmp_path, 8.0)
    weights = {A: torch.randn(4, 64), B: torch.randn(96, 4)}
    first, second = (dict(publisher.prepare(weights.items())) for _ in range(2))
    assert [first[name].data_ptr() for name in first] == [second[name].data_ptr() for name in second]
    assert weights[B].data_ptr() != first[B].data_ptr(), "and the trainer's own stays"


def test_closing_needs_no_version(tmp_path):
    publisher_of(tmp_path / "weights", 8.0).close()


def test_an_adapter_that_is_held_is_not_written_over(tmp_path):
    publisher = publisher_of(tmp_path / "weights", 4.0)
    weights = {A: torch.randn(4, 64), B: torch.randn(96, 4)}
    publisher.publish(weights.items(), 0, 0, lambda ticket: None)
    publisher.hold(0)
    file = tmp_path / "weights/0.0/adapter_model.safetensors"
    content = file.read_bytes()
    for step in range(1, 6):
        for tensor in weights.values():
            tensor.normal_()
        publisher.publish(weights.items(), step, 0, lambda ticket: None)
    assert file.read_bytes() == content
