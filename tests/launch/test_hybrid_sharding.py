"""Weights of which each node has a copy: the losses, gradients, weights and files of ranks that share one."""

import contextlib

import pytest
import torch

from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.launch.build import build_sharded
from slipstream.launch.ranks.processes import RankProcesses
from slipstream.processes.launchers import LOCAL
from slipstream.trainer.checkpoints.state_files import read_state
from slipstream.weights.fingerprint import describe
from tests.launch.test_ranks import BATCHES, GSPO, SAMPLING, make_config, one_step

LORA = {"rank": 4, "target_modules": ["q_proj", "down_proj"]}


class Here:
    """Nodes that are all this host."""

    lost = ""

    def launch(self, program, arguments, environment, resources, _node, *, output):
        return LOCAL.launch(program, arguments, environment, resources, output=output)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return new_model(folder, hidden_size=48, num_layers=2, intermediate_size=95, context_length=256)


@contextlib.contextmanager
def trained(config, nodes, sharding, folder):
    config = config.model_copy(
        update={
            "cluster": config.cluster.model_copy(update={"nodes": nodes, "gpus_per_node": 4 // nodes}),
            "training": config.training.model_copy(update={"sharding": sharding}),
        }
    )
    torch.manual_seed(0)
    crew = RankProcesses(config, SAMPLING, folder / "logs", nodes=Here())
    try:
        yield build_sharded(config, SAMPLING, crew, 0)
    finally:
        crew.close()


def three_steps(config, nodes, sharding, folder):
    """Losses and gradient norms, first moments, weights and fingerprints, after a checkpoint in the middle."""
    folder.mkdir()
    with trained(config, nodes, sharding, folder) as parts:
        rows = [one_step(parts, config, BATCHES[0])]
        parts.learner.save(folder / "state")
        rows.append(one_step(parts, config, BATCHES[3]))
        parts.learner.load(folder / "state")
        rows.append(one_step(parts, config, BATCHES[3]))
        weights = parts.learner.adapter_weights() if config.lora else parts.learner.named_weights()
        described, tensors = describe(weights), dict(weights)
    assert describe(tensors.items()) == described, "fingerprints of shards are those of the whole"
    moments = {name: each for name, each in read_state(folder / "state").items() if ".exp_avg." in name}
    return rows, moments, tensors


CASES = {
    "all parameters": (2, {"algorithm": GSPO}),
    "lora, step": (2, {"lora": LORA, "reshard": "step"}),
    "a rank on each node": (4, {}),
    "rows of two ranks": (2, {"algorithm": GSPO, "context_parallel": 2}),
}


@pytest.mark.quick("all parameters")
@pytest.mark.parametrize("case", CASES)
def test_losses_and_weights_are_those_of_flat_sharding(case, model, tmp_path):
    nodes, options = CASES[case]
    config = make_config(model, 4, **options)
    flat = three_steps(config, 1, "full", tmp_path / "flat")
    ours = three_steps(config, nodes, "hybrid", tmp_path / "hybrid")
    for row, expected in zip(ours[0], flat[0], strict=True):
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert ours[1].keys() == flat[1].keys()
    for name, moment in flat[1].items():
        assert (ours[1][name] - moment).norm() <= 1e-6 * moment.norm(), name
    for name, tensor in flat[2].items():
        torch.testing.assert_close(ours[2][name], tensor, atol=1e-4, rtol=1e-3)
    files = len(list((tmp_path / "hybrid/state").glob("shard-*.safetensors")))
    assert files == 4 // nodes, "one copy is saved"


@pytest.mark.full
def test_copies_stay_equal_where_rounding_is_by_chance(model, tmp_path):
    config = make_config(model, 4, dtype="bfloat16", optimizer="adamw_bf16")
    with trained(config, 2, "hybrid", tmp_path) as parts:
        for batch in BATCHES:
            one_step(parts, config, batch)
        sequence = max(BATCHES[0].sequences, key=len)
        # One for each rank, which computes it by the weights of its copy.
        first, *others = parts.learner.forward([sequence] * 4, SAMPLING, micro_batch_tokens=len(sequence)).logprobs
    assert all(torch.equal(each, first) for each in others)
