"""How long rows fit into the memory that the trainer has on a GPU."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from slipstream.config import with_values
from slipstream.plan import make_plan
from slipstream.plan.memory.sizes import GIB
from slipstream.plan.memory.trainer import RowMemory

from .test_plan import GENERATED, GRPO, LARGE, facts

MEMORY = {"num_cpus": 16, "memory_bytes": 128 * GIB, "num_gpus": 1, "gpu_memory_bytes": 80 * GIB}
FACTS = facts(dtype="bfloat16", **LARGE | MEMORY)
MODEL = FACTS.model
CONFIG = with_values(GRPO, GENERATED | {"training.steps": 400, "weights.bridge": "single_copy"})


def plan(values=None, **facts):
    return make_plan(with_values(CONFIG, values or {}), dataclasses.replace(FACTS, **facts))


def tokens(made):
    return made.config.training.micro_batch_tokens


FIRST = plan()


def test_the_plan_is_bound_by_memory():
    assert 4096 < tokens(FIRST) < 16_384
    assert 4096 < tokens(plan(gpu_memory_bytes=70 * GIB)) < tokens(FIRST)
    assert FIRST.notices == ()


def test_what_earlier_runs_took_changes_no_value():
    made = plan(notices=("runs/before took 70 GiB",))
    assert made.notices == ("runs/before took 70 GiB",)
    assert dataclasses.replace(made, notices=()) == FIRST


def test_a_plan_of_a_plan_changes_nothing():
    assert make_plan(FIRST.config, FACTS).derived == ()


@given(each=st.integers(1, 10**7), shorter=st.integers(1, 20_000), longer=st.integers(1, 20_000))
def test_longer_rows_take_more_and_the_longest_that_fits_is_found(each, shorter, longer):
    rows = RowMemory(each, 24 * GIB, 0.6)
    shorter, longer = sorted((shorter, longer))
    assert rows.num_bytes(shorter) <= rows.num_bytes(longer)
    fitting = rows.fitting(40 * GIB, 16_384)
    assert fitting == 0 or rows.num_bytes(fitting) <= 0.6 * 40 * GIB
    assert fitting == 16_384 or rows.num_bytes(fitting + 1) > 0.6 * 40 * GIB
    assert rows.fitting(-GIB, 16_384) == 0


def test_ranks_keep_weights_whole_where_there_is_memory_for_it():
    ranks = {"training.ranks": 2, "weights.bridge": "auto"}
    wide, tight = (plan(ranks, num_gpus=4, gpu_memory_bytes=size * GIB).config.training for size in (46, 38))
    assert (wide.reshard, tight.reshard) == ("step", "layer")


def test_a_shared_card_is_divided_alike_whether_how_ranks_spread_is_asked_for_or_derived():
    cards = {"num_gpus": 2, "gpu_memory_bytes": 30 * GIB}
    values = {"training.ranks": 2, "inference.tensor_parallel_size": 2, "training.gradient_checkpointing": True}
    asked = values | {"training.reshard": "layer"}
    divided, derived = (plan(each, **cards).config.inference.kv_cache_gib for each in (asked, values))
    assert derived == divided
