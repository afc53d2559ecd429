"""Ranks and engines on several nodes: who is where, and what does not fit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.launch.engines import engine_gpus, engine_plan
from slipstream.plan.memory.gpu_shares import num_gpus_needed, place, replicas_that_fit
from slipstream.plan.memory.sizes import GIB
from slipstream.plan.nodes import assign

from .test_plan import GENERATED, LARGE, note, plan, reasons, refusal

CLUSTER = {"cluster.address": "10.0.0.1:29400", "cluster.run_id": "run-7"}
EIGHT = {"num_gpus": 8, "gpu_memory_bytes": 80 * GIB, **LARGE}


def on_nodes(nodes, ranks=1, **values):
    return GENERATED | CLUSTER | {"cluster.nodes": nodes, "training.ranks": ranks} | values


@pytest.mark.parametrize(
    ("nodes", "ranks", "replicas", "of_ranks", "of_engines"),
    [
        (1, 2, 2, (0, 0), (0, 0)),
        (2, 2, 2, (0, 0), (1, 1)),
        (4, 2, "auto", (0, 1), (2, 3)),
        (3, 2, 2, (0, 0), (1, 2)),
        (2, 1, "auto", (0,), (1,)),
    ],
)
def test_without_gpus_ranks_come_first_and_engines_last(nodes, ranks, replicas, of_ranks, of_engines):
    more = {"inference.replicas": replicas, "run.threads": 8, "sampling.max_tokens": 64}
    made = plan(on_nodes(nodes, ranks, **more), num_cpus=8)
    found = assign(made.config)
    assert (found.ranks, found.engines) == (of_ranks, of_engines)
    engines = engine_plan(made.config, "m", on_cpu=True)
    assert [place.node for place in engines.places] == [f"node-{number}" * (number > 0) for number in of_engines]
    assert engines.settings.threads == 8 // max(map(of_engines.count, of_engines))


def test_gpus_are_those_of_all_nodes():
    made = plan(on_nodes(4, 12, **{"inference.tensor_parallel_size": 4}), **EIGHT)
    found = assign(made.config)
    assert found.ranks == (0,) * 8 + (1,) * 4
    assert found.engines == (1, 2, 2, 3, 3)
    for visible in (None, "7,6,5,4,3,2,1,0"):
        assert [engine_gpus(made.config, visible, replica)[0] for replica in range(5)] == ["4", "0", "4", "0", "4"]
    assert (made.config.weights.bridge, made.config.run.placement) == ("broadcast", "separate")
    assert reasons(made)["cluster.gpus_per_node"] == "as many as this host has"
    assert note(made, "nodes").how == (
        "node-0: the orchestrator, ranks 0 to 7; node-1: ranks 8 to 11, engine 0; node-2: engines 1 to 2; "
        "node-3: engines 3 to 4"
    )
    assert not any("not used" in text for text in made.warnings)


def test_a_large_run_on_absent_nodes_says_how_long_updates_and_starts_take():
    large = EIGHT | {"num_parameters": 70_000_000_000, "num_layers": 80, "num_heads": 64, "num_kv_heads": 8}
    row = {"training.micro_batch_tokens": 512, "inference.tensor_parallel_size": 8}
    made = plan(on_nodes(32, 64, **row), **large)
    assert (assign(made.config).engines[0], made.config.inference.replicas) == (8, 24)
    # 140 GB at 40 GB/s, and at 0.84 GB/s; the engines' GPUs verify an eighth each.
    assert note(made, "update").value == pytest.approx(140 / 40 + 140 / 64 / 150 + 140 / 8 / 430, rel=0.05)
    assert note(made, "start of vLLM").value == pytest.approx(26 + 140 / 0.84 + 3, rel=0.05)
    assert "not measured" in note(made, "update").how


@pytest.mark.parametrize(
    ("values", "facts", "said"),
    [
        (on_nodes(2, 8, **{"inference.tensor_parallel_size": 16}), EIGHT, "more than cluster.gpus_per_node = 8"),
        (on_nodes(2, 8, **{"cluster.gpus_per_node": 4}), EIGHT, "gpus_per_node = 4, and this host has 8"),
        (on_nodes(3, 8, **{"inference.replicas": 8}), EIGHT, "leaves node-2 without a rank or engine"),
        (on_nodes(2, 16), EIGHT, "training.ranks = 16 needs 17 GPUs"),
        (
            on_nodes(3, 1, **{"inference.replicas": 1, "sampling.max_tokens": 64}),
            {},
            "leaves node-2 without a rank or engine",
        ),
        (on_nodes(2, 1, **{"run.placement": "shared"}), EIGHT, 'needs run.placement = "separate"'),
    ],
)
def test_what_does_not_fit(values, facts, said):
    assert said in refusal(values, **facts)


@given(st.integers(1, 20), st.integers(1, 8), st.integers(1, 6), st.integers(1, 8))
def test_as_many_engines_fit_as_can_be_placed(ranks, size, nodes, per_node):
    def gpus(replicas):
        return num_gpus_needed(
            place(ranks=ranks, replicas=replicas, tensor_parallel_size=size, separate=True, gpus_per_node=per_node)
        )

    if size <= per_node:
        most = replicas_that_fit(nodes * per_node, ranks=ranks, tensor_parallel_size=size, gpus_per_node=per_node)
        assert most == 0 or gpus(most) <= nodes * per_node
        assert gpus(most + 1) > nodes * per_node


def test_a_node_with_room_has_a_copy_of_the_weights():
    made = plan(on_nodes(3, 16), **EIGHT)
    assert made.config.training.sharding == "hybrid"
    assert "with a copy on each node" in reasons(made)["training.sharding"]
    full = plan(on_nodes(3, 16, **{"training.sharding": "full"}), **EIGHT)
    assert made.trainer_bytes > full.trainer_bytes
    large = EIGHT | {"num_parameters": 32_000_000_000, "num_layers": 64, "num_heads": 16, "num_kv_heads": 8}
    row = {"training.micro_batch_tokens": 4096, "inference.tensor_parallel_size": 8}
    assert plan(on_nodes(3, 16, **row), **large).config.training.sharding == "full"
    for ranks, why in ((8, "the ranks are on one node"), (12, "nodes have unequal numbers of ranks (8, 4)")):
        made = plan(on_nodes(3, ranks), **EIGHT)
        assert (made.config.training.sharding, reasons(made)["training.sharding"]) == ("full", why)
        assert why in refusal(on_nodes(3, ranks, **{"training.sharding": "hybrid"}), **EIGHT)
    made = plan(on_nodes(4, 2, **{"sampling.max_tokens": 64}), num_cpus=8)
    assert (made.config.training.sharding, reasons(made)["training.sharding"]) == ("full", "not by default on CPUs")
    assert "training.sharding" not in reasons(plan(GENERATED | {"training.ranks": 2}, **EIGHT))
