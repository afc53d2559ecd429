"""One memory for two: moved once, opened by path, checked against the files, written by an optimizer."""

import os
import subprocess
import sys

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.errors import ConfigError
from slipstream.inference.plugin.weights.tensor_map import Piece, TensorMap
from slipstream.records import ParameterSpec
from slipstream.trainer.model.loading import SharedTensors, open_shared
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.optim.base import MasterAdamW
from slipstream.weights.bridges.single_copy import Exporter, SharedWeights
from slipstream.weights.model_files import stored_parameters

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")

READER = """
import sys, msgspec
from slipstream.weights.bridges.single_copy import SharedWeights, open_weights
tensors = open_weights(msgspec.json.decode(sys.argv[1], type=SharedWeights))
print([float(t.float().sum()) for t in tensors.values()])
tensors["b"].mul_(2)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return new_model(tmp_path_factory.mktemp("model") / "m", hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1)


def test_another_process_reads_and_writes_what_was_moved():
    fused = nn.Parameter(torch.arange(24.0).view(4, 6))
    tied = nn.Parameter(fused.data[:2])
    other = nn.Parameter(torch.ones(3, 5, dtype=torch.bfloat16).t())
    exporter = Exporter([fused, tied, other])
    assert tied.data_ptr() == fused.data_ptr(), "what was one memory stays one"
    assert other.stride() == (1, 5)
    shared = exporter.describe({"a": fused.data[1:3], "b": other.data, "c": tied.data}, {"d": "it is odd"})
    assert len(shared.storages) == 1
    assert os.stat(shared.storages[0].path).st_mode & 0o777 == 0o600
    text = msgspec.json.encode(shared).decode()
    result = subprocess.run([sys.executable, "-c", READER, text], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == str([fused[1:3].sum().item(), 15.0, fused[:2].sum().item()])
    assert other.float().sum() == 30
    assert msgspec.json.decode(text, type=SharedWeights).refused == {"d": "it is odd"}


def test_a_part_of_a_parameter_is_refused_with_the_reason(model):
    whole = load_file(model / "model.safetensors")
    name = next(each for each in whole if each.endswith("down_proj.weight"))
    kept = {each: nn.Parameter(tensor[:, :3] if each == name else tensor) for each, tensor in whole.items()}
    shared = Exporter(kept.values()).describe({each: parameter.data for each, parameter in kept.items()}, {})
    opened = open_shared(str(model), "float32", [shared])
    with pytest.raises(ConfigError, match=r"down_proj\.weight \(vLLM keeps only a part of it\)"):
        PolicyModel.load(model, shared=opened)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_policy_is_in_that_memory_and_computes_as_one_of_its_own(model, dtype):
    weights = {name: w.to(getattr(torch, dtype)) for name, w in load_file(model / "model.safetensors").items()}
    assert {spec.name for spec in stored_parameters(model, dtype)} == weights.keys()
    policy = PolicyModel.load(model, dtype, packing=False, shared=SharedTensors(weights, {}))
    own = PolicyModel.load(model, dtype, packing=False)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        assert torch.equal(policy.network(input_ids=ids).logits, own.network(input_ids=ids).logits)
    assert {name: w.data_ptr() for name, w in policy.named_weights()} == {n: w.data_ptr() for n, w in weights.items()}
    assert "lm_head.weight" not in weights, "the head is tied"
    before = {name: w.clone() for name, w in weights.items()}
    optimizer = MasterAdamW(policy.network.named_parameters())
    policy.network(input_ids=ids, labels=ids).loss.backward()
    optimizer.prepare(1e-2)
    assert all(torch.equal(w, before[name]) for name, w in weights.items())
    optimizer.commit()
    assert not any(torch.equal(w, before[name]) for name, w in weights.items())


def test_a_parameter_that_cannot_be_shared_is_named_with_the_reason_and_the_remedy(model):
    weights = load_file(model / "model.safetensors")
    del weights["model.norm.weight"]
    with pytest.raises(ConfigError, match=r"copy of model\.norm\.weight \(vLLM's loader transforms it\): use another"):
        PolicyModel.load(model, shared=SharedTensors(weights, {"model.norm.weight": "vLLM's loader transforms it"}))


class TestOneTensorOfItsPieces:
    """`TensorMap.part`."""

    spec = ParameterSpec("w", (4, 3), "float32", "")

    def located(self, *places):
        """Pieces of two rows each: (row of the parameter, engine's memory)."""
        pieces = [Piece(3 * row, (2, 3), (3, 1), target) for row, target in places]
        return TensorMap({"w": pieces})

    def test_pieces_that_lie_in_line(self):
        memory = torch.arange(40.0).view(8, 5)
        whole = self.located((2, memory[3:5, 1:4]), (0, memory[1:3, 1:4])).part(self.spec).tensor
        assert torch.equal(whole, memory[1:5, 1:4])
        assert whole.data_ptr() == memory[1:5, 1:4].data_ptr()

    def test_pieces_that_do_not(self):
        memory = torch.zeros(8, 5)
        for places in (
            ((0, memory[0:2, :3]), (2, memory[3:5, :3])),
            ((0, memory[2:4, :3]), (2, memory[0:2, :3])),
            ((0, memory[0:2, :3]), (2, torch.zeros(2, 5)[:, :3])),
            ((0, memory[0:2, :3]), (2, memory[2:4, 1:4])),
        ):
            with pytest.raises(ValueError, match="parts apart"):
                self.located(*places).part(self.spec)

    def test_what_is_not_all_there(self):
        memory = torch.zeros(8, 3)
        with pytest.raises(ValueError, match="no copy"):
            TensorMap().part(self.spec)
        with pytest.raises(ValueError, match="transforms"):
            TensorMap({}, {"w"}).part(self.spec)
        with pytest.raises(ValueError, match="keeps it in bfloat16, not float32"):
            self.located((0, memory[:2].bfloat16())).part(self.spec)

    def test_one_workers_rows_or_columns(self):
        memory = torch.arange(40.0).view(8, 5)
        rows = self.located((2, memory[3:5, :3])).part(self.spec)
        assert (rows.dim, rows.start, rows.tensor.data_ptr()) == (0, 2, memory[3:].data_ptr())
        assert rows.tensor.shape == (2, 3)
        columns = TensorMap({"w": [Piece(1, (4, 2), (3, 1), memory[:4, :2])]}).part(self.spec)
        assert (columns.dim, columns.start, columns.tensor.shape) == (1, 1, (4, 2))
        whole = self.located((0, memory[1:3, 1:4]), (2, memory[3:5, 1:4])).part(self.spec)
        assert (whole.dim, whole.start, whole.tensor.shape) == (0, 0, (4, 3))
        with pytest.raises(ValueError, match="only a part"):
            TensorMap({"w": [Piece(4, (2, 2), (3, 1), memory[:2, :2])]}).part(self.spec)
