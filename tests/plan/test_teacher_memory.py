"""What the plan gives a teacher's engine: on a CPU, on one GPU, beside the engine, on a GPU of its own."""

import dataclasses

import pytest

from slipstream.config import RLConfig, with_values
from slipstream.config.schema import TeacherConfig
from slipstream.errors import ConfigError
from slipstream.launch.engines import engine_gpus
from slipstream.plan import make_plan
from slipstream.plan.memory.sizes import GIB
from slipstream.plan.memory.trainer import row_memory

from . import test_plan, test_trainer_memory

STUDENT = test_trainer_memory.MODEL
TEACHER = dataclasses.replace(STUDENT, num_parameters=7_000_000_000, hidden_size=3584, num_kv_heads=4)
CONFIG = test_plan.GRPO.model_copy(
    update={"teacher": TeacherConfig(path="org/teacher"), "algorithm": RLConfig(kind="distill")}
)


def facts(**changes):
    made = test_plan.facts(num_cpus=8, memory_bytes=256 * GIB, max_prompt_tokens=200, max_answer_tokens=400)
    return dataclasses.replace(made, **{"model": STUDENT, "teacher": TEACHER} | changes)


def note(plan):
    return test_plan.note(plan, "memory of the teacher")


def test_on_a_cpu_it_shares_the_memory_and_the_plan_says_so():
    plan = make_plan(CONFIG, facts())
    room = plan.teacher
    assert (room.gpu, room.has_own_gpu) == (None, False)
    assert room.max_model_len > plan.config.inference.max_model_len
    assert note(plan).value == pytest.approx(room.total / GIB, abs=0.01)
    assert "threads of run.threads" in note(plan).how
    with pytest.raises(ConfigError, match=r"\(trainer .*, engine .*, teacher .*\)"):
        make_plan(CONFIG, facts(memory_bytes=40 * GIB))


@pytest.mark.parametrize(
    ("num_gpus", "gpu", "own"), [(1, 0, False), (2, 1, False), (3, 2, True), (8, 7, True)]
)  # fmt: skip
def test_on_gpus_it_has_one_of_its_own_where_there_is_one(num_gpus, gpu, own):
    plan = make_plan(CONFIG, facts(num_gpus=num_gpus, gpu_memory_bytes=140 * GIB))
    assert (plan.teacher.gpu, plan.teacher.has_own_gpu) == (gpu, own)
    assert plan.config.run.placement == ("shared" if num_gpus == 1 else "separate")
    assert 0 < plan.teacher.gpu_memory_utilization < 0.3
    assert (f"GPU {gpu}, its own" in note(plan).how) is own
    unused = [text for text in plan.warnings if "not used" in text]
    assert unused == []


@pytest.mark.parametrize(
    ("num_gpus", "ranks", "engines", "gpu", "own"),
    [(4, 1, ["1", "2"], 3, True), (3, 2, ["2"], 2, False), (4, 2, ["2"], 3, True), (4, 3, ["3"], 3, False)],
)
def test_it_is_on_no_card_of_the_trainers(num_gpus, ranks, engines, gpu, own):
    config = with_values(CONFIG, {"training.ranks": ranks})
    plan = make_plan(config, facts(num_gpus=num_gpus, gpu_memory_bytes=140 * GIB))
    assert (plan.teacher.gpu, plan.teacher.has_own_gpu) == (gpu, own)
    each = [engine_gpus(plan.config, None, number) for number in range(plan.config.inference.replicas)]
    assert each == [(name,) for name in engines]


def test_what_shares_a_card_leaves_it_its_room():
    alone = make_plan(CONFIG.model_copy(update={"teacher": None, "algorithm": RLConfig()}),
                      facts(num_gpus=1, gpu_memory_bytes=80 * GIB, teacher=None)).config  # fmt: skip
    plan = make_plan(CONFIG, facts(num_gpus=1, gpu_memory_bytes=80 * GIB))
    config = plan.config
    assert config.training.micro_batch_tokens <= alone.training.micro_batch_tokens
    assert config.inference.gpu_memory_utilization + plan.teacher.gpu_memory_utilization < 1.0
    with pytest.raises(ConfigError, match="teacher"):
        make_plan(CONFIG, facts(num_gpus=1, gpu_memory_bytes=24 * GIB))


def test_one_that_cannot_read_its_student_is_refused():
    short = dataclasses.replace(TEACHER, context_length=512)
    with pytest.raises(ConfigError, match=r"context of 512 tokens, and scoring .* takes one more"):
        make_plan(CONFIG, facts(teacher=short))


def test_a_teacher_elsewhere_takes_nothing_here():
    config = CONFIG.model_copy(update={"teacher": TeacherConfig(url="http://h/v1")})
    plan = make_plan(config, facts(teacher=None))
    assert plan.teacher is None
    assert all(each.name != "memory of the teacher" for each in plan.notes)


def test_its_likeliest_tokens_are_counted():
    config = CONFIG.model_copy(update={"teacher": TeacherConfig(path="org/teacher", top_k=32)})
    gpu = facts(num_gpus=1, gpu_memory_bytes=140 * GIB)
    few, many = make_plan(CONFIG, gpu), make_plan(config, gpu)
    training, sampling = many.config.training, many.config.sampling
    num_tokens = training.prompts_per_batch * many.config.algorithm.group_size * sampling.max_tokens
    shown = test_plan.note(many, "the teacher's likeliest tokens in a batch")
    assert shown.value == pytest.approx(num_tokens * 32 * 12 / GIB, abs=1e-3)
    assert many.teacher.reserve > few.teacher.reserve
    rows = [row_memory(each.config, gpu, checkpointing=False).each for each in (few, many)]
    assert rows[1] - rows[0] == 32 * 44


@pytest.mark.parametrize(
    ("top_k", "streams", "says"),
    [
        (STUDENT.vocab_size + 1, "memory", f"more than the vocabulary of {STUDENT.vocab_size}"),
        (20_000, "memory", r"batches of up to .* GiB, and 1\.00 GiB is the most: lower it to \d+"),
        (20_000, "redis", r"and 0\.50 GiB is the most"),
    ],
)
def test_too_many_likeliest_tokens_are_refused(top_k, streams, says):
    config = with_values(CONFIG, {"run.streams": streams})
    config = config.model_copy(update={"teacher": TeacherConfig(url="http://h/v1", top_k=top_k)})
    with pytest.raises(ConfigError, match=says):
        make_plan(config, facts(teacher=None))
