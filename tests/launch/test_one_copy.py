"""Two ranks in the memory of two workers that have divided the model as vLLM does: the same training as without, and
all that it makes is in the workers."""

import os

import pytest
import torch
from safetensors.torch import load_file

from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.errors import ConfigError, WeightsError
from slipstream.weights.bridges.single_copy import Exporter
from slipstream.weights.fingerprint import describe

from ..trainer.test_vision_towers import save_with_tower
from .test_ranks import BATCHES, make_config, one_step, trained

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create") or torch.cuda.is_available(), reason="needs Linux and ranks on a CPU"
)
COLUMNS, ROWS = ("o_proj", "down_proj"), ("q_proj", "gate_proj", "up_proj")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # One head of keys, which both workers have, and 97 words.
    shape = {"hidden_size": 48, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1}
    return new_model(tmp_path_factory.mktemp("models") / "tiny", **shape, intermediate_size=96, context_length=256)


class Worker:
    """What a worker of vLLM's has, in memory that others can open."""

    def __init__(self, weights, rank, refused=None):
        self.tensors, self.places, fused = {}, {}, {}
        for name, whole in weights.items():
            kind = name.split(".")[-2]
            dim, start, length = 0, 0, whole.shape[0]
            if kind in COLUMNS or kind in ROWS:
                dim = int(kind in COLUMNS)
                length = whole.shape[dim] // 2
                start = rank * length
            elif kind == "embed_tokens":
                # Filled up to a multiple of 64 and then halved.
                start, length = 64 * rank, min(64, whole.shape[0] - 64 * rank)
            layer = name.rsplit(".", 2)[0]
            part = whole.narrow(dim, start, length).clone()
            key = f"{layer}.fused" if kind in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj") else name
            fused.setdefault(key, []).append((name, part))
            self.places[name] = (dim, start)
        parameters = []
        for parts in fused.values():
            memory = torch.nn.Parameter(torch.cat([part for _, part in parts]), requires_grad=False)
            parameters.append((memory, parts))
        exporter = Exporter([memory for memory, _ in parameters])
        for memory, parts in parameters:
            for (name, _), view in zip(parts, memory.data.split([len(part) for _, part in parts]), strict=True):
                self.tensors[name] = view
        for name in refused or ():
            del self.tensors[name]
        self.shared = exporter.describe(self.tensors, refused or {}, self.places)


def run(config, folder, workers=()):
    """Numbers of each step, the weights, and what they are proved by."""
    with trained(config, folder / "logs", workers) as (parts, _):
        memory = parts.learner._sharded.local.memory
        assert (memory is not None) == bool(workers)
        rows = [one_step(parts, config, batch) for batch in BATCHES[:2]]
        parts.learner.save(folder)
        rows += [one_step(parts, config, batch) for batch in BATCHES[2:]]
        described = describe(parts.learner.named_weights())
        weights = {name: weight.clone() for name, weight in parts.learner.named_weights()}
        assert describe(weights.items()) == described
        check(workers, weights)
        if workers:
            # Of what is divided alike there is one copy.
            own = dict(memory._live)
            for name, parameter in parts.learner.model.network.named_parameters():
                address = parameter.to_local().untyped_storage().data_ptr()
                assert (address == own[name].untyped_storage().data_ptr()) == (name in memory.dims), name
            alone = {name.split(".")[-2] for name in own if name not in memory.dims}
            assert alone >= {"embed_tokens", "norm", "input_layernorm", "k_proj", "v_proj"}
            assert not alone & {*COLUMNS, *ROWS}
            parts.learner.load(folder)
            check(workers, dict(parts.learner.named_weights()))
            assert [one_step(parts, config, batch) for batch in BATCHES[2:]] == rows[2:]
        return rows, weights


def check(workers, weights):
    for worker in workers:
        for name, tensor in worker.tensors.items():
            dim, start = worker.places[name]
            assert torch.equal(tensor, weights[name].narrow(dim, start, tensor.shape[dim])), name


@pytest.mark.full
def test_ranks_train_what_the_workers_have(model, tmp_path):
    stored = load_file(model / "model.safetensors")
    config = make_config(model, 2)
    (tmp_path / "own").mkdir()
    (tmp_path / "shared").mkdir()
    expected = run(config, tmp_path / "own")
    rows, weights = run(config, tmp_path / "shared", [Worker(stored, rank) for rank in range(2)])
    for row, other in zip(rows, expected[0], strict=True):
        for name in row:
            assert row[name] == pytest.approx(other[name], rel=1e-5, abs=1e-6), name
    assert weights.keys() == expected[1].keys()
    for name, tensor in weights.items():
        assert not torch.equal(tensor, stored[name])
        torch.testing.assert_close(tensor, expected[1][name], atol=2e-4, rtol=1e-3)


def test_a_tower_that_is_not_trained_is_not_copied(tmp_path):
    model = save_with_tower(tmp_path / "model", "qwen3-vl", vocab_size=97)
    stored, config = load_file(model / "model.safetensors"), make_config(model, 2)
    workers = [Worker(stored, rank) for rank in range(2)]
    with trained(config, tmp_path, workers) as (parts, _):
        part = parts.learner._sharded.local
        assert {name for name in stored if "visual" in name} <= part.memory._live.keys() - part.memory.dims.keys()
        assert {name.split(".")[-2] for name in part.memory.copied} >= {"embed_tokens", "norm", "k_proj"}
        assert not [name for name in part.memory.copied if "visual" in name]
        one_step(parts, config, BATCHES[0])
        weights = {name: weight.clone() for name, weight in parts.learner.named_weights()}
    check(workers, weights)
    for name, tensor in weights.items():
        assert torch.equal(tensor, stored[name]) == ("visual" in name), name


def test_what_the_workers_must_have_loaded_and_must_be_able_to_share(model, tmp_path):
    stored = load_file(model / "model.safetensors")
    config = make_config(model, 2)
    reason = {"model.norm.weight": "vLLM keeps its parts apart"}
    workers = [Worker(stored, rank, reason) for rank in range(2)]
    says = r"model\.norm\.weight \(vLLM keeps its parts apart\)"
    with pytest.raises(ConfigError, match=says), trained(config, tmp_path, workers):
        pass
    stored["model.layers.1.mlp.down_proj.weight"][0, -1] += 1
    workers = [Worker(stored, rank) for rank in range(2)]
    says = r"another model\.layers\.1\.mlp\.down_proj\.weight than the files"
    with pytest.raises(WeightsError, match=says), trained(config, tmp_path, workers):
        pass
