"""The file that `write_tensors` makes is one that the format's own reader reads, bit for bit."""

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from slipstream.weights.files import write_tensors


def test_other_readers_read_it(tmp_path):
    torch.manual_seed(0)
    tensors = {
        "odd": torch.randn(3, 5, dtype=torch.bfloat16),
        "a.b.weight": torch.randn(7, 4),
        "turned": torch.randn(4, 6, dtype=torch.float64).t(),
        "half": torch.randn(9, dtype=torch.float16)[1:],
        "empty": torch.empty(0, 4),
        "number": torch.tensor(2.5),
        "learnt": torch.nn.Parameter(torch.ones(2, 2)),
    }
    write_tensors(tmp_path / "t.safetensors", tensors)
    found = load_file(tmp_path / "t.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor.detach())
    with safe_open(tmp_path / "t.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_nothing_is_a_file_too(tmp_path):
    write_tensors(tmp_path / "t.safetensors", {})
    assert load_file(tmp_path / "t.safetensors") == {}
