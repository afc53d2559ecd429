"""What the trainers of earlier runs took corrects a plan: less room where they took more, more where they took less."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config import (
    EnvironmentConfig,
    ModelConfig,
    RLConfig,
    RunConfig,
    SamplingConfig,
    TrainingConfig,
    with_values,
)
from slipstream.launch import DataFacts, Facts, ModelFacts, make_plan, plan_as_json
from slipstream.launch.plan.facts import Peak
from slipstream.launch.plan.memory.sizes import GIB
from slipstream.launch.plan.memory.trainer import MOST_LESS, Rows

MODEL = ModelFacts(
    num_parameters=1_543_714_304,
    hidden_size=1536,
    intermediate_size=8960,
    num_layers=28,
    num_heads=12,
    num_kv_heads=2,
    head_dim=128,
    context_length=32_768,
    vocab_size=151_936,
    dtype="bfloat16",
)
FACTS = Facts(
    num_cpus=16,
    memory_bytes=128 * GIB,
    model=MODEL,
    data=DataFacts(num_train_tasks=1000, max_prompt_tokens=128, max_answer_tokens=None),
    num_gpus=1,
    gpu_memory_bytes=80 * GIB,
    card="A card",
    torch="2.11.0",
)
CONFIG = with_values(
    RunConfig(
        model=ModelConfig(path="org/name"),
        environment=EnvironmentConfig(name="x"),
        algorithm=RLConfig(),
        training=TrainingConfig(steps=400),
        sampling=SamplingConfig(max_tokens=512),
    ),
    {"weights.bridge": "single_copy"},
)


def plan(*peaks, values=None, **facts):
    return make_plan(with_values(CONFIG, values or {}), dataclasses.replace(FACTS, peaks=peaks, **facts))


def peak_of(made, more_gib, row_tokens=None, run="runs/before"):
    """A run that carried out the plan and held so much more than it expected."""
    held = made.trainer_bytes + int(more_gib * GIB)
    return Peak(run, held - GIB, held, row_tokens or tokens(made), made.memory_settings)


def tokens(made):
    return made.config.training.micro_batch_tokens


def reason(made, name="training.micro_batch_tokens"):
    return next(item.reason for item in made.derived if item.name == name)


def trainer(made):
    return next(note for note in made.notes if note.name == "memory of the trainer")


FIRST = plan()


def test_the_first_plan_is_bound_by_memory():
    assert 4096 < tokens(FIRST) < 16_384
    assert "corrected" not in plan_as_json(FIRST)
    assert FIRST.told == ()


def test_what_was_more_leaves_shorter_rows():
    made = plan(peak := peak_of(FIRST, 6.5))
    assert 4096 < tokens(made) < tokens(FIRST)
    says = (
        f"corrected by runs/before: with rows of {tokens(FIRST)} tokens its trainer took {peak.held / GIB:.2f} GiB of "
        f"this card where {FIRST.trainer_bytes / GIB:.2f} GiB are counted"
    )
    assert reason(made).endswith(f"; {says}")
    assert reason(made).startswith(reason(FIRST))
    assert made.told == (says,)
    assert says in trainer(made).how
    assert plan_as_json(made).count(says) == 3, "the setting, the memory of the trainer, and the earlier run"
    assert ["corrected" in item.reason for item in made.derived].count(True) == 1, "nothing else was"


def test_what_was_less_leaves_longer_rows_within_a_bound():
    little, much, more = (plan(peak_of(FIRST, less)) for less in (-2, -6, -15))
    assert tokens(FIRST) < tokens(little) < tokens(much) <= tokens(more)
    # Rows are of multiples of 256 tokens.
    assert tokens(FIRST) + MOST_LESS * tokens(FIRST) - 256 <= tokens(more) <= 256 + (1 + MOST_LESS) * tokens(FIRST)
    assert "corrected by runs/before" in reason(more)


@pytest.mark.parametrize(
    ("values", "facts", "told"),
    [
        ({}, {"card": "Another"}, "card was A card and is Another"),
        ({}, {"torch": "2.12.0"}, "torch was 2.11.0 and is 2.12.0"),
        ({}, {"model": dataclasses.replace(MODEL, num_layers=30)}, "num_layers was 28 and is 30"),
        ({"training.optimizer": "adamw_8bit"}, {}, "training.optimizer was adamw and is adamw_8bit"),
        ({"algorithm.kl_coef": 0.1}, {}, "reference was False and is True"),
        ({"weights.bridge": "disk"}, {}, "weights.bridge was single_copy and is disk"),
    ],
)
def test_runs_of_another_kind_correct_nothing(values, facts, told):
    peak = peak_of(FIRST, 6.5)
    made, alone = plan(peak, values=values, **facts), plan(values=values, **facts)
    assert dataclasses.replace(made, told=()) == alone
    assert made.told == (f"runs/before took {peak.held / GIB:.2f} GiB and corrects nothing: {told}",)


def test_what_does_not_decide_memory_may_differ():
    made = plan(peak_of(FIRST, 6.5), values={"training.learning_rate": 1e-4, "training.prompts_per_batch": 8})
    assert "corrected by" in made.told[0]


def test_layers_are_computed_again_because_of_what_others_took():
    """Sequences so long that one of them is all that fits; the earlier run had none as long."""
    long = {"sampling.max_tokens": 10_000, "inference.max_num_seqs": 4}
    first = plan(values=long)
    assert first.config.training.gradient_checkpointing is False
    made = plan(peak_of(first, 12, row_tokens=9000), values=long)
    assert made.config.training.gradient_checkpointing is True
    assert "corrected by runs/before" in reason(made, "training.gradient_checkpointing")
    assert [way in made.told[0] for way in ("corrected by", "9000 tokens")] == [True, True]
    # Then it has shorter ones of its own kind to rest on, and each setting names what it rests on.
    both = plan(peak_of(first, 12, row_tokens=9000), peak_of(made, 1, run="runs/again"), values=long)
    assert both.config.training.gradient_checkpointing is True
    assert "corrected by runs/before" in reason(both, "training.gradient_checkpointing")
    assert "corrected by runs/again" in both.told[0]
    # One that had is known to fit.
    made = plan(peak_of(first, 2, row_tokens=10_200), values=long)
    assert made.config.training.gradient_checkpointing is False


@pytest.mark.parametrize("more_gib", [-3, 5])
def test_the_same_rows_are_expected_to_take_what_they_took(more_gib):
    peak = peak_of(FIRST, more_gib)
    made = plan(peak, values={"training.micro_batch_tokens": tokens(FIRST)})
    assert made.trainer_bytes == peak.held
    assert trainer(made).value == pytest.approx(peak.held / GIB + 2, abs=0.01), "and the reserve"


@pytest.mark.parametrize("more_gib", [-3, 6])
def test_a_run_that_kept_to_a_corrected_plan_does_not_undo_it(more_gib):
    first = peak_of(FIRST, more_gib)
    second = plan(first)
    third = plan(first, peak_of(second, 0, run="runs/second"))
    assert third.config == second.config
    worse = plan(first, peak_of(second, 5, run="runs/second"))
    assert tokens(worse) < tokens(second)
    assert "corrected by runs/second" in reason(worse)


def test_what_was_taken_refuses_nothing():
    values = {"training.micro_batch_tokens": 18_000, "inference.max_num_seqs": 32}
    values["training.gradient_checkpointing"] = False
    first = plan(values=values)
    made = plan(peak_of(first, 14), values=values)
    assert made.config == first.config
    assert "may end for want of memory, as an earlier one took more than is counted" in made.warnings[-1]
    assert "corrected by runs/before" in made.told[0]


def test_a_plan_of_a_corrected_plan_changes_nothing():
    peak = peak_of(FIRST, 6.5)
    made = plan(peak)
    assert make_plan(made.config, dataclasses.replace(FACTS, peaks=(peak,))).derived == ()


def test_a_plan_says_what_it_rests_on():
    """With these alone it is made again, whatever has been measured since."""
    rests, other = peak_of(FIRST, 6.5), peak_of(plan(values={"training.optimizer": "muon"}), 1)
    made = plan(rests, other)
    assert made.peaks == (rests,)
    assert plan(*made.peaks).config == made.config


@pytest.mark.parametrize(
    ("more", "expected"), [(3000, {500: 3000, 1000: 3000, 1500: 4500, 9000: 6000}), (-3000, {500: -1500, 9000: -3000})]
)
def test_the_dearer_attribution_is_taken(more, expected):
    """A row of 1,000 tokens, at 100 bytes each, took so much more."""
    rows = Rows(100, 10_000, (Peak("runs/a", 1, 110_000 + more, 1000, {}),))
    assert {tokens: rows.num_bytes(tokens) - 100 * tokens for tokens in expected} == expected


held = st.floats(min_value=0.0, max_value=80.0)
row = st.integers(min_value=1, max_value=20_000)


@given(first=held, second=held, row_tokens=row, wanted=row, other=st.none() | st.tuples(held, row))
def test_the_correction_is_monotone_in_what_was_held(first, second, row_tokens, wanted, other):
    def rows(gib):
        took = [(gib, row_tokens)] + ([other] if other is not None else [])
        return Rows(2_600_000, 24 * GIB, tuple(Peak("runs/a", 1, int(g * GIB), t, {}) for g, t in took), 0.6)

    low, high = (rows(gib) for gib in sorted((first, second)))
    assert low.num_bytes(wanted) <= high.num_bytes(wanted)
    assert low.needed(wanted) <= high.needed(wanted)
    for room in (10, 40):
        assert low.fitting(room * GIB, 16_384) >= high.fitting(room * GIB, 16_384)


@settings(max_examples=8)
@given(first=held, second=held, row_tokens=row)
def test_so_is_a_plan(first, second, row_tokens):
    values = {"training.gradient_checkpointing": False}
    settings = plan(values=values).memory_settings
    less, more = (
        plan(Peak("runs/a", 1, int(gib * GIB), row_tokens, settings), values=values) for gib in sorted((first, second))
    )
    assert tokens(less) >= tokens(more)


@given(row_tokens=row, more=st.integers(-(30 * GIB), 30 * GIB), shorter=row, longer=row)
def test_longer_rows_never_take_less(row_tokens, more, shorter, longer):
    each, state = 2_600_000, 24 * GIB
    rows = Rows(each, state, (Peak("runs/a", 1, max(0, state + each * row_tokens + more), row_tokens, {}),), 0.6)
    shorter, longer = sorted((shorter, longer))
    assert rows.num_bytes(shorter) <= rows.num_bytes(longer)
    fitting = rows.fitting(40 * GIB, 16_384)
    assert fitting == 0 or rows.num_bytes(fitting) <= 0.6 * 40 * GIB
    assert fitting == 16_384 or rows.num_bytes(fitting + 1) > 0.6 * 40 * GIB


def test_weights_stay_whole_where_an_earlier_run_says_that_there_is_room():
    """What decided against it is what the plan rests on, and a resumed run decides alike."""
    cards = {"num_gpus": 4, "gpu_memory_bytes": 46 * GIB}
    ranks = {"training.ranks": 2, "weights.bridge": "auto"}
    first = plan(values=ranks, **cards)
    assert first.config.training.reshard == "step"
    peak = peak_of(first, 8)
    made = plan(peak, values=ranks, **cards)
    assert made.config.training.reshard == "layer"
    assert made.peaks == (peak,)
    assert "corrected by runs/before" in reason(made, "training.reshard")
    assert "corrected by runs/before" in made.told[0]
    assert plan(*made.peaks, values=ranks, **cards).config == made.config
    # Asked for, it rests on nothing.
    asked = plan(peak, values=ranks | {"training.reshard": "layer"}, **cards)
    assert (asked.peaks, asked.config) == ((), made.config)
    assert "training.reshard was step and is layer" in asked.told[0]


def test_one_process_does_not_care_for_how_ranks_would_spread():
    assert plan(peak_of(FIRST, 6.5), values={"training.reshard": "layer"}).peaks


def test_a_shared_card_is_divided_alike_whether_how_ranks_spread_is_asked_for_or_derived():
    cards = {"num_gpus": 2, "gpu_memory_bytes": 30 * GIB}
    values = {"training.ranks": 2, "inference.tensor_parallel_size": 2, "training.gradient_checkpointing": True}
    asked = values | {"training.reshard": "layer"}
    first = plan(values=asked, **cards)
    peak = peak_of(first, 4)
    divided, derived = (plan(peak, values=each, **cards).config.inference.kv_cache_gib for each in (asked, values))
    assert derived == divided < first.config.inference.kv_cache_gib
