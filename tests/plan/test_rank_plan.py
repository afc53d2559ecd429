"""Several trainer processes in the plan: whose cards, how much memory, and what is said where they do not fit."""

import pytest

from slipstream.launch.engines import engine_gpus
from slipstream.plan.memory.sizes import GIB

from .test_plan import ALONE, GENERATED, LARGE, SFT, SFT_DATA, note, plan, reasons, refusal

FOUR = {"num_gpus": 4, "gpu_memory_bytes": 80 * GIB, **LARGE}
THREE = GENERATED | {"training.ranks": 3}
TRAINER = "memory of the trainer"


def kept_gib(made):
    """What the trainer keeps of weights, moments and gradients."""
    return float(note(made, TRAINER).how.partition("gradients ")[2].partition(" ")[0])


def test_the_engine_has_the_cards_after_the_ranks():
    made = plan(THREE, **FOUR)
    assert (made.config.run.placement, made.config.weights.bridge) == ("separate", "broadcast")
    assert engine_gpus(made.config, None) == ("3",)
    assert engine_gpus(made.config, "4, 5, 6, 7") == ("7",)
    assert not any("not used" in text for text in made.warnings)
    two = plan(GENERATED | {"training.ranks": 2, "inference.tensor_parallel_size": 2}, **FOUR)
    assert engine_gpus(two.config, None) == ("2", "3")
    both = plan(GENERATED | {"training.ranks": 2}, **FOUR)
    assert both.config.inference.replicas == 2
    assert [engine_gpus(both.config, None, replica) for replica in (0, 1)] == [("2",), ("3",)]
    assert not any("not used" in text for text in both.warnings)
    spare = plan(GENERATED | {"training.ranks": 2, "inference.replicas": 1}, **FOUR)
    assert "1 of 4 GPUs are not used: the trainer uses 2 (training.ranks)" in spare.warnings


def test_a_rank_keeps_a_part_of_the_state():
    by_layer = THREE | {"training.reshard": "layer"}
    one, three = (plan(values, **FOUR) for values in (GENERATED, by_layer))
    assert "of each of 3 ranks" in note(three, TRAINER).how
    assert "ranks" not in note(one, TRAINER).how
    # Embedding, head and two layers are gathered beside it.
    assert kept_gib(one) / 3 < kept_gib(three) < kept_gib(one) / 2


def test_a_frozen_tower_is_whole_on_each_rank():
    tower = {"num_tower": 1_000_000_000, "num_frozen": 1_000_000_000}
    whole = FOUR | {"num_parameters": FOUR["num_parameters"] + tower["num_tower"]} | tower
    rows = {"training.micro_batch_tokens": 4096, "training.reshard": "layer"}
    more = plan(THREE | rows, **whole).trainer_bytes - plan(THREE | rows, **FOUR).trainer_bytes
    assert more == pytest.approx(2 * tower["num_tower"], rel=0.01), "in bfloat16"


def test_weights_stay_whole_through_a_step_where_there_is_room():
    rows = THREE | {"training.micro_batch_tokens": 4096}
    made, layer = (plan(rows | more, **FOUR) for more in ({}, {"training.reshard": "layer"}))
    assert (made.config.training.reshard, layer.config.training.reshard) == ("step", "layer")
    # bfloat16 weights and float32 gradients of all parameters, but no more than that.
    more = (made.trainer_bytes - layer.trainer_bytes) / GIB
    assert more == pytest.approx(6 * FOUR["num_parameters"] / GIB, rel=0.01)
    assert "with whole weights and gradients" in reasons(made)["training.reshard"]
    assert plan(THREE, **FOUR | {"gpu_memory_bytes": 24 * GIB}).config.training.reshard == "layer"
    assert plan({"training.ranks": 2}).config.training.reshard == "layer", "a CPU's memory is that of all ranks"
    assert "training.reshard" not in reasons(plan(GENERATED, **FOUR))


def test_ranks_and_workers_that_have_one_copy():
    beside = GENERATED | {"training.ranks": 2, "inference.tensor_parallel_size": 2}
    one_copy = beside | {"weights.bridge": "single_copy"}
    made, apart = plan(one_copy, **FOUR), plan(beside, **FOUR)
    assert made.config.run.placement == "shared"
    assert engine_gpus(made.config, None) == (), "it sees all, and takes the first, as the ranks do"
    assert "2 of 4 GPUs are not used: the trainer uses 2 (training.ranks)" in made.warnings
    own_words = plan(one_copy, **FOUR | {"vocab_size": 151_937, "num_gpus": 2})
    assert kept_gib(made) < kept_gib(own_words) < kept_gib(apart)
    assert reasons(own_words)["run.placement"] == "trainer and engine have one copy of the weights"
    assert reasons(own_words)["inference.replicas"] == "trainer and engine are on the same 2 GPUs"
    experts = FOUR | {"num_experts": 4}
    why = "divide the 4 experts of this model's layers in different ways: use another bridge"
    assert why in refusal(one_copy, **experts)
    assert plan(beside, **experts).config.training.ranks == 2
    assert "needs 2 GPUs, and there is 1" in refusal(one_copy, **FOUR | {"num_gpus": 1})


def test_too_few_cards():
    why = "training.ranks = 4 needs 5 GPUs, one for each and 1 for the engine, and there are 4: lower it"
    assert why in refusal(GENERATED | {"training.ranks": 4}, **FOUR)
    assert 'leave run.placement = "shared" to one rank' in refusal(THREE | {"run.placement": "shared"}, **FOUR)
    made = plan({"training.ranks": 4}, ALONE, max_sequence_tokens=90, **FOUR)
    assert not any("not used" in text for text in made.warnings)
    assert "needs 5 GPUs" in refusal({"training.ranks": 5}, ALONE, max_sequence_tokens=90, **FOUR)


def test_on_a_cpu_they_share_cores_and_memory():
    one, two, three = (plan({"training.ranks": ranks}) for ranks in (1, 2, 3))
    assert (two.config.run.placement, two.config.weights.bridge) == ("shared", "disk")
    assert two.config.training.micro_batch_tokens <= one.config.training.micro_batch_tokens
    assert note(two, TRAINER).value >= note(one, TRAINER).value
    assert note(two, TRAINER).how.endswith("of all 2 ranks")
    assert two.warnings == ()
    assert three.warnings == ("training.ranks = 3 processes share 2 cores: lower it",)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_data_is_planned_as_for_one(ranks):
    made = plan({"training.ranks": ranks}, SFT, max_sequence_tokens=SFT_DATA.max_sequence_tokens)
    assert made.config.training.micro_batch_tokens >= SFT_DATA.max_sequence_tokens


def test_ranks_that_hold_a_row_together():
    """Half the activations of a row on each, and so nearly twice the row in the same memory."""
    values = {"training.ranks": 2, "training.reshard": "layer", "training.compile": False}
    two = values | {"training.context_parallel": 2}
    long = {"max_sequence_tokens": 40_000, "context_length": 1 << 16, "gpu_memory_bytes": 8000 * GIB}
    apart, together = (plan(each, ALONE, **FOUR | long) for each in (values, two))
    working = [float(note(e, TRAINER).how.partition("activations ")[2].partition(" ")[0]) for e in (apart, together)]
    assert working[1] == pytest.approx(working[0] / 2, rel=0.04), "attention's output is there twice"
    assert together.config.training.micro_batch_tokens == 40_000
    assert "every 2 ranks hold a row together (training.context_parallel)" in note(together, TRAINER).how
    assert "training.context_parallel" not in note(apart, TRAINER).how
    small = FOUR | {"max_sequence_tokens": 4000, "gpu_memory_bytes": 24 * GIB}
    rows = [plan(each, ALONE, **small).config.training.micro_batch_tokens for each in (values, two)]
    assert rows[1] >= 1.9 * rows[0]
    why = "does not divide the model's 4 attention heads (and 2 of keys and values) evenly"
    assert why in refusal({"training.ranks": 3, "training.context_parallel": 3})
    assert plan({"training.ranks": 4, "training.context_parallel": 4}).config.training.context_parallel == 4
    on_nodes = {"training.ranks": 4, "training.context_parallel": 4, "cluster.nodes": 2}
    assert "ranks hold a row on one node, and here on two" in refusal(on_nodes)
    assert "the model has recurrent layers: use 1" in refusal(two, unpackable="recurrent layers", num_gpus=0)


def test_layers_are_compiled_where_it_pays_for_so_many_cards():
    def compiled(ranks, steps):
        made = plan({"training.ranks": ranks, "training.steps": steps}, ALONE, max_sequence_tokens=2000, **FOUR)
        return made.config.training.compile, reasons(made)["training.compile"]

    # As many seconds of training: so many steps for each card.
    assert compiled(1, 1000) == compiled(4, 4000)
    assert [compiled(4, steps)[0] for steps in (1, 10_000)] == [False, True]
