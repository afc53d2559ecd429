"""Several trainer processes in the plan: whose cards, how much memory, and what is said where they do not fit."""

import pytest

from slipstream.launch.engines import engine_gpus
from slipstream.plan.memory.sizes import GIB

from .test_plan import GENERATED, LARGE, SFT, SFT_DATA, plan, refusal

FOUR = {"num_gpus": 4, "gpu_memory_bytes": 80 * GIB, **LARGE}
THREE = GENERATED | {"training.ranks": 3}


def memory_of(made, who):
    return next(note for note in made.notes if note.name == f"memory of the {who}")


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
    one, three = (memory_of(plan(values, **FOUR), "trainer").how for values in (GENERATED, by_layer))
    assert "of each of 3 ranks" in three
    assert "ranks" not in one
    kept = [float(how.partition("gradients ")[2].partition(" ")[0]) for how in (one, three)]
    # Embedding, head and two layers are gathered beside it.
    assert kept[0] / 3 < kept[1] < kept[0] / 2


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
    reason = next(item.reason for item in made.derived if item.name == "training.reshard")
    assert "with whole weights and gradients" in reason
    assert plan(THREE, **FOUR | {"gpu_memory_bytes": 24 * GIB}).config.training.reshard == "layer"
    assert plan({"training.ranks": 2}).config.training.reshard == "layer", "a CPU's memory is that of all ranks"
    assert "training.reshard" not in {item.name for item in plan(GENERATED, **FOUR).derived}


def test_ranks_and_workers_that_have_one_copy():
    beside = GENERATED | {"training.ranks": 2, "inference.tensor_parallel_size": 2}
    made, apart = plan(beside | {"weights.bridge": "single_copy"}, **FOUR), plan(beside, **FOUR)
    assert made.config.run.placement == "shared"
    assert engine_gpus(made.config, None) == (), "it sees all, and takes the first, as the ranks do"
    assert "2 of 4 GPUs are not used: the trainer uses 2 (training.ranks)" in made.warnings
    kept = [
        float(memory_of(each, "trainer").how.partition("gradients ")[2].partition(" ")[0]) for each in (made, apart)
    ]
    assert kept[0] < kept[1]
    odd = FOUR | {"vocab_size": 151_937, "num_gpus": 2}
    own_words = plan(beside | {"weights.bridge": "single_copy"}, **odd)
    assert kept[0] < float(memory_of(own_words, "trainer").how.partition("gradients ")[2].partition(" ")[0]) < kept[1]
    reasons = {item.name: item.reason for item in own_words.derived}
    assert reasons["run.placement"] == "trainer and engine have one copy of the weights"
    assert reasons["inference.replicas"] == "trainer and engine are on the same 2 GPUs"
    assert "divide the 4 experts of this model's layers in different ways: use another bridge" in refusal(
        beside | {"weights.bridge": "single_copy"}, **FOUR | {"num_experts": 4}
    )
    assert plan(beside, **FOUR | {"num_experts": 4}).config.training.ranks == 2
    assert "needs 2 GPUs, and there is 1" in refusal(
        beside | {"weights.bridge": "single_copy"}, **FOUR | {"num_gpus": 1}
    )


def test_too_few_cards():
    assert "training.ranks = 4 needs 5 GPUs, one for each and 1 for the engine, and there are 4: lower it" in refusal(
        GENERATED | {"training.ranks": 4}, **FOUR
    )
    assert 'leave run.placement = "shared" to one rank' in refusal(THREE | {"run.placement": "shared"}, **FOUR)
    config = SFT.model_copy(update={"evaluation": None})
    made = plan({"training.ranks": 4}, config, max_sequence_tokens=90, **FOUR)
    assert not any("not used" in text for text in made.warnings)
    assert "needs 5 GPUs" in refusal({"training.ranks": 5}, config, max_sequence_tokens=90, **FOUR)


def test_on_a_cpu_they_share_cores_and_memory():
    one, two, three = (plan({"training.ranks": ranks}) for ranks in (1, 2, 3))
    assert (two.config.run.placement, two.config.weights.bridge) == ("shared", "disk")
    assert two.config.training.micro_batch_tokens <= one.config.training.micro_batch_tokens
    assert memory_of(two, "trainer").value >= memory_of(one, "trainer").value
    assert memory_of(two, "trainer").how.endswith("of all 2 ranks")
    assert two.warnings == ()
    assert three.warnings == ("training.ranks = 3 processes share 2 cores: lower it",)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_data_is_planned_as_for_one(ranks):
    made = plan({"training.ranks": ranks}, SFT, max_sequence_tokens=SFT_DATA.max_sequence_tokens)
    assert made.config.training.micro_batch_tokens >= SFT_DATA.max_sequence_tokens


def test_layers_are_compiled_where_it_pays_for_so_many_cards():
    config = SFT.model_copy(update={"evaluation": None})

    def compiled(ranks, steps):
        made = plan({"training.ranks": ranks, "training.steps": steps}, config, max_sequence_tokens=2000, **FOUR)
        return made.config.training.compile, next(i.reason for i in made.derived if i.name == "training.compile")

    # As many seconds of training: so many steps for each card.
    assert compiled(1, 1000) == compiled(4, 4000)
    assert [compiled(4, steps)[0] for steps in (1, 10_000)] == [False, True]
