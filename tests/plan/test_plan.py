import contextlib
import dataclasses
import io
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from slipstream.config import (
    DataConfig,
    EnvironmentConfig,
    EvaluationConfig,
    InferenceConfig,
    Loaded,
    LoraConfig,
    ModelConfig,
    RLConfig,
    RunConfig,
    SamplingConfig,
    SFTConfig,
    TrainingConfig,
    dump_resolved,
    load_config,
    with_values,
)
from slipstream.config.bounds import keyed
from slipstream.config.checks import contradictions, inapplicable, reason_against
from slipstream.config.parse.keys import leaves
from slipstream.config.planned import PlannedInference
from slipstream.config.recipes import RECIPES
from slipstream.errors import ConfigError
from slipstream.launch.engines import engine_gpus
from slipstream.plan import DataFacts, Facts, ModelFacts, derive, make_plan, plan_as_json, render_plan
from slipstream.plan.decided import planned_config
from slipstream.plan.facts import AdapterFacts, EngineFacts
from slipstream.plan.memory.gpu_shares import num_gpus_needed, place, replicas_that_fit
from slipstream.plan.memory.sizes import (
    GIB,
    activation_bytes_per_token,
    gib,
    kv_bytes_per_sequence,
    training_state_bytes,
    weights_bytes,
)
from slipstream.plan.memory.trainer import training_state

TINY = ModelFacts(
    num_parameters=800_000,
    hidden_size=128,
    intermediate_size=384,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    context_length=512,
    vocab_size=100,
    dtype="float32",
)
DATA = DataFacts(num_train_tasks=1000, max_prompt_tokens=60, max_answer_tokens=12)
FACTS = Facts(num_cpus=2, memory_bytes=24 * GIB, model=TINY, data=DATA)
GRPO = RunConfig(
    model=ModelConfig(path="org/name"),
    environment=EnvironmentConfig(name="x"),
    algorithm=RLConfig(),
    training=TrainingConfig(steps=40),
)
SFT = with_values(GRPO, {}).model_copy(update={"algorithm": SFTConfig()})
ALONE = SFT.model_copy(update={"evaluation": None})
"""SFT without an engine."""
LORA = GRPO.model_copy(update={"lora": LoraConfig()})
SFT_DATA = dataclasses.replace(DATA, max_sequence_tokens=90)


def facts(**changes):
    """FACTS with some fields of the facts, the model or the data replaced."""
    parts = {"model": TINY, "data": DATA}
    own = {}
    for name, value in changes.items():
        part = next((key for key in parts if hasattr(parts[key], name)), None)
        if part is None:
            own[name] = value
        else:
            parts[part] = dataclasses.replace(parts[part], **{name: value})
    return dataclasses.replace(FACTS, **parts, **own)


def plan(values=None, config=GRPO, **changes):
    return make_plan(with_values(config, values or {}), facts(**changes))


def reasons(made):
    return {item.name: item.reason for item in made.derived}


def note(made, name):
    (found,) = (each for each in made.notes if each.name == name)
    return found


def refusal(values=None, config=GRPO, **changes):
    with pytest.raises(ConfigError) as caught:
        plan(values, config, **changes)
    return str(caught.value)


def autos(made, config=GRPO):
    """Keys with an effect that a plan of `config` leaves undecided."""
    config = with_values(config, {item.name: item.value for item in made.derived})
    reasons = inapplicable(config)
    return [path for path, value in leaves(config) if value == "auto" and not reason_against(path, reasons)]


@pytest.mark.parametrize(
    ("epochs", "num_tasks", "size", "steps"),
    [
        (1.0, 1000, 32, 32),
        (3.0, 96, 32, 9),
        (0.5, 1000, 32, 16),
        (0.001, 1000, 32, 1),
        (0.07, 100, 1, 7),
        (2, 5, 32, 2),
    ],
)
def test_epochs_become_steps(epochs, num_tasks, size, steps):
    for config in (GRPO, SFT):
        values = {"training.steps": None, "training.epochs": epochs, "training.prompts_per_batch": size}
        lengths = {"max_sequence_tokens": 90} if config is SFT else {}
        made = plan(values, config, num_train_tasks=num_tasks, **lengths)
        assert made.config.training.steps == steps
        told = f" over {num_tasks} training prompts in batches of {min(size, num_tasks)}"
        assert told in reasons(made)["training.steps"]


def test_epochs_that_cannot_be():
    epochs = {"training.steps": None, "training.epochs": 1e6, "training.prompts_per_batch": 1}
    assert "are 1000000000 steps, more than 100000000: lower it" in refusal(epochs)
    warmup = {"training.steps": None, "training.epochs": 1.0, "training.warmup_steps": 32}
    assert "training.warmup_steps = 32 is not below the run's 32 optimizer steps" in refusal(warmup)


@pytest.mark.parametrize(
    ("values", "changes", "head", "residual"),
    [
        ({}, {}, True, True),
        ({}, {"architecture": "Gemma2ForCausalLM"}, False, False),
        ({}, {"architecture": ""}, False, False),
        ({"model.dtype": "float32"}, {}, False, False),
        ({}, {"num_gpus": 0}, False, False),
        ({"inference.enforce_eager": True}, {}, True, False),
        ({"model.fp32_head": False}, {}, False, True),
        ({"training.ranks": 2}, {"num_gpus": 4}, False, False),
    ],
)
def test_engine_and_trainer_come_closer_where_that_costs_little(values, changes, head, residual):
    card = {"num_gpus": 1, "gpu_memory_bytes": 80 * GIB, "architecture": "Qwen3ForCausalLM"}
    made = plan({"model.dtype": "bfloat16"} | values, **card | changes)
    assert (made.config.model.fp32_head, made.config.model.fp32_residual) == (head, residual)
    assert reasons(made).get("model.fp32_residual", "").startswith("brings the log-probabilities") is residual


MIXTURE = {"architecture": "Qwen3MoeForCausalLM", "num_experts": 8, "num_gpus": 0}


@pytest.mark.parametrize(
    ("values", "changes", "reason"),
    [
        ({}, {}, "where engine and trainer choose other experts"),
        ({"model.dtype": "float16"}, {}, "where engine and trainer choose other experts"),
        ({"model.dtype": "float32"}, {}, "all is in float32"),
        ({}, {"num_gpus": 1, "gpu_memory_bytes": 80 * GIB}, "not tried on a GPU"),
        ({"sampling.stop": ("x",)}, {}, "completions that end with a string of sampling.stop"),
        ({}, {"architecture": "MixtralForCausalLM"}, "not tried for MixtralForCausalLM"),
        ({}, {"architecture": "", "num_experts": 0}, "the model has no experts"),
        ({"training.ranks": 2}, {}, "not tried over training.ranks"),
        ({"inference.tensor_parallel_size": 2}, {}, "from a single worker only"),
        ({}, {"engine": EngineFacts("0.25.0", returns_experts=False)}, "vLLM 0.25.0 does not return them"),
    ],
)
def test_experts_are_replayed_where_that_was_tried(values, changes, reason):
    made = plan({"model.dtype": "bfloat16"} | values, **MIXTURE | changes)
    assert reason in reasons(made)["model.replay_experts"]
    assert made.config.model.replay_experts is reason.startswith("where")


def test_replay_that_is_asked_for_and_cannot_be():
    asked = {"model.replay_experts": True}
    assert refusal(asked | {"training.ranks": 2}, **MIXTURE) == (
        "model.replay_experts = true is not possible (not tried over training.ranks): set it to false"
    )
    assert "(the model has no experts)" in refusal(asked)
    for values in ({"model.dtype": "float32"}, {"sampling.stop": ("x",)}):
        assert plan(asked | values, **MIXTURE).config.model.replay_experts is True


def test_what_does_not_fit_into_float16_is_refused_before_anything_starts():
    text = refusal({"model.dtype": "float16"}, architecture="Gemma3ForCausalLM")
    assert text.startswith("Gemma3ForCausalLM computes values that float16 cannot hold, and vLLM refuses it: set")
    values = {"model.dtype": "float16", "training.optimizer": "adamw_bf16"}
    (rounding,) = contradictions(with_values(GRPO, values))
    assert 'rounds weights to bfloat16, and model.dtype = "float16" does not' in rounding
    assert plan({"model.dtype": "float16"}).config.model.dtype == "float16"


H100 = {
    "num_gpus": 1, "gpu_memory_bytes": 80 * GIB, "architecture": "LlamaForCausalLM", "head_dim": 64, "vocab_size": 128,
    "gpu_capability": 9, "engine": EngineFacts("0.26.0", has_flash3=True),
}  # fmt: skip


def test_kernels_are_shared_where_that_was_shown_to_give_the_same_bits():
    length = {"inference.max_model_len": 512}
    made = plan(length, **H100)
    assert made.config.model.shared_kernels
    assert reasons(made)["model.shared_kernels"].endswith("the same log-probabilities bit for bit, at little cost")
    assert (made.config.weights.probe_warn, made.config.weights.probe_stop) == (0.001, 0.2)
    for changes in ({"architecture": "Gemma3ForCausalLM", "head_dim": 256, "window": 512}, {"head_dim": 128}):
        assert plan(length, **H100 | changes).config.model.shared_kernels
    assert plan(length, **H100 | {"architecture": "Qwen3ForCausalLM"}).config.model.shared_kernels
    assert plan(**H100).config.model.shared_kernels, "also where a context is shorter than the number of sequences"
    assert plan(length | {"weights.probe_warn": 0.3}, **H100).config.weights.probe_stop == 1.2
    apart = plan(length | {"model.shared_kernels": False}, **H100).config
    assert (apart.model.shared_kernels, apart.weights.probe_warn) == (False, 0.05)


@pytest.mark.parametrize(
    ("values", "changes", "reason"),
    [
        ({}, {"gpu_capability": 8}, "it takes GPUs of compute capability 9"),
        ({}, {"gpu_capability": 0, "num_gpus": 0}, "it takes GPUs of compute capability 9"),
        ({}, {"engine": EngineFacts("0.26.0")}, "no vLLM is installed here that brings FlashAttention 3"),
        ({}, {"engine": None}, "no vLLM is installed here that brings FlashAttention 3"),
        ({}, {"window": 64}, "contexts of up to 80 tokens are longer than its sliding"),
        ({"lora": LoraConfig()}, {}, "not tried with LoRA adapters"),
        ({"model.dtype": "float16"}, {}, 'not tried with model.dtype = "float16"'),
        ({"model.fp32_head": False}, {}, "not tried with model.fp32_head = false"),
        ({"inference.enforce_eager": True}, {}, "not tried with model.fp32_residual = false"),
        ({"training.packing": False}, {}, "not tried with training.packing = false"),
        ({"inference.options": {"kv-cache-dtype": "fp8"}}, {}, "inference.options has kv-cache-dtype"),
        ({"inference.options": {"attention_backend": "TRITON_ATTN"}}, {}, "inference.options has attention_backend"),
        ({"training.ranks": 2}, {"num_gpus": 4}, "not tried with model.fp32_head = false"),
        ({}, {"architecture": "Gemma2ForCausalLM"}, "not tried for Gemma2ForCausalLM"),
        ({}, {"architecture": ""}, "not tried for "),
        ({}, {"head_dim": 96}, "not tried with attention heads of 96 numbers"),
        ({}, {"vocab_size": 130}, "the engine pads a vocabulary of 130 tokens"),
        ({}, {"rotary": "llama3"}, "not tried with rotary embeddings of the type llama3"),
    ],
)
def test_elsewhere_kernels_are_not_shared_nor_runs_exact(values, changes, reason):
    apart = {name: values.pop(name) for name in list(values) if "." not in name}
    config = GRPO.model_copy(update=apart)
    made = plan(values, config, **H100 | changes)
    assert not made.config.model.shared_kernels
    assert reasons(made)["model.shared_kernels"].startswith(reason)
    text = refusal(values | {"model.shared_kernels": True}, config, **H100 | changes)
    assert text.startswith(f"model.shared_kernels = true is not possible ({reason}")
    assert text.endswith("): set it to false")
    text = refusal(values | {"run.exact": True}, config, **H100 | changes)
    assert text.startswith(f"run.exact = true is not possible ({reason}")
    assert text.endswith("): remove it")


@pytest.mark.parametrize(
    ("values", "changes", "reason"),
    [
        ({"inference.max_model_len": 16384}, {}, "in contexts of up to 16384 tokens"),
        ({}, {"engine": EngineFacts("0.30.1", has_flash3=True)}, "not tried on a GPU with vLLM 0.30.1"),
        ({"algorithm.kind": "ppo", "algorithm.group_size": 1}, {}, "not tried with a teacher or a critic"),
    ],
)
def test_kernels_that_are_shared_only_if_asked_for(values, changes, reason):
    shape = H100 | {"context_length": 32768} | changes
    values = {"inference.max_model_len": 512} | values
    assert reasons(plan(values, **shape))["model.shared_kernels"].startswith(reason)
    assert plan(values | {"model.shared_kernels": True}, **shape).config.model.shared_kernels
    if "algorithm.kind" not in values:
        assert plan(values | {"run.exact": True}, **shape).config.model.shared_kernels


def test_exact_decides_what_it_needs():
    made = plan({"run.exact": True}, **H100)
    model = made.config.model
    assert (model.fp32_head, model.fp32_residual, model.shared_kernels, model.dtype) == (True, True, True, "bfloat16")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"algorithm.old_policy": "engine"}, 'true compares them: use "trainer"'),
        ({"sampling.temperature": 0.7}, "sampling.temperature = 0.7 is not among what .* use 1.0"),
        ({"sampling.top_p": 0.9}, "sampling.top_p = 0.9"),
        ({"training.staleness": 1}, "training.staleness = 1"),
        ({"training.optimizer": "adamw_8bit"}, "training.optimizer = .* is not among"),
        ({"model.shared_kernels": False}, "model.shared_kernels = false .* use true"),
        ({"algorithm.kind": "ppo", "algorithm.group_size": 1}, 'critic only, not under algorithm.kind = "ppo"'),
    ],
)
def test_exact_refuses_what_nothing_has_shown_to_be_exact(values, sentence):
    apart = {name: values.pop(name) for name in list(values) if "." not in name}
    config = with_values(GRPO, {"run.exact": True} | values).model_copy(update=apart)
    found = [text for _, text in keyed(contradictions(config))]
    assert any(re.search(sentence, text) for text in found), found


@pytest.mark.parametrize(("dtype", "warn"), [("float32", 0.01), ("float16", 0.02), ("bfloat16", 0.05)])
def test_the_limits_of_the_probe_depend_on_the_type(dtype, warn):
    made = plan({"model.dtype": dtype}).config.weights
    assert (made.probe_warn, made.probe_stop) == (warn, 4 * warn)
    assert plan({"model.dtype": dtype, "weights.probe_warn": 0.3}).config.weights.probe_stop == 1.2
    text = refusal({"model.dtype": dtype, "weights.probe_stop": warn})
    assert text.startswith(f"weights.probe_stop = {warn:g} is not above weights.probe_warn = {warn:g}, so no warning")


def test_no_engine_has_to_agree_with_sft():
    made = plan({"model.dtype": "bfloat16"}, SFT, num_gpus=1, gpu_memory_bytes=80 * GIB, max_sequence_tokens=90)
    assert (made.config.model.fp32_head, made.config.model.fp32_residual) == (False, False)


@pytest.mark.parametrize("step", ["_plan_learning_rate", "plan_deadlines", "plan_patches"])
def test_what_is_left_undecided_becomes_no_default_unseen(monkeypatch, step):
    monkeypatch.setattr(derive, step, lambda builder: None)
    with pytest.raises(AssertionError, match="decided nothing for"):
        plan()


def test_every_auto_gets_its_value_and_reason():
    made = plan()
    assert autos(made) == []
    derived = {item.name: item.value for item in made.derived}
    measured = {
        "model.dtype": "float32", "weights.bridge": "disk", "weights.probe_warn": 0.01,
        "sampling.max_tokens": 19,  # 1.25 * 12 + 4
        "inference.max_model_len": 80,  # 60 + 19, in multiples of 16
        "inference.max_num_seqs": 256,  # 32 * 8
        "inference.kv_cache_gib": 0.25, "environment.num_train_tasks": 1000, "training.micro_batch_tokens": 8192,
        "run.threads": 2,
    }  # fmt: skip
    assert derived | measured == derived
    assert all(item.reason for item in made.derived)
    assert made.warnings == ()


def test_where_episodes_are_played():
    one, agents = (1, "run() may block"), (8, "it takes long")
    (found,) = [item for item in plan(processes=one).derived if item.name == "environment.processes"]
    assert (found.value, found.reason) == (1, "run() may block")
    assert plan({"environment.processes": 0}, processes=one).config.environment.processes == 0
    assert plan({"environment.processes": 3}, processes=one).config.environment.processes == 3
    assert plan().config.environment.processes == 0
    for values, num_cpus, number in [
        *(({}, 2, 1), ({}, 8, 4), ({}, 128, 8)),
        *(({"run.orchestrators": 2}, 8, 2), ({"inference.max_num_seqs": 3}, 64, 3)),
    ]:
        made = plan(values, processes=agents, num_cpus=num_cpus)
        (found,) = [item for item in made.derived if item.name == "environment.processes"]
        assert (found.value, made.config.environment.processes) == (number, number), values
        assert found.reason.startswith(f"it takes long: a process for 2 of {num_cpus} cores, at most 8")


@pytest.mark.parametrize(
    ("num_parameters", "num_gpus", "dtype"),
    [(19_999_999, 0, "float32"), (20_000_000, 0, "bfloat16"), (1_000_000, 1, "bfloat16")],
)
def test_dtype(num_parameters, num_gpus, dtype):
    made = plan(num_parameters=num_parameters, num_gpus=num_gpus, gpu_memory_bytes=80 * GIB)
    assert made.config.model.dtype == dtype


class TestLengths:
    @pytest.mark.parametrize(
        ("values", "measured", "tokens"),
        [
            *(({}, {"max_answer_tokens": answer}, tokens) for answer, tokens in ((1, 8), (4, 9), (12, 19), (100, 129))),
            # Without gold answers it is what is left.
            ({}, {"max_answer_tokens": None}, 512 - 60),
            ({"inference.max_model_len": 100}, {"max_answer_tokens": None}, 40),
        ],
    )
    def test_max_tokens_from_gold_answers(self, values, measured, tokens):
        assert plan(values, **measured).config.sampling.max_tokens == tokens

    def test_context_cuts_both(self):
        made = plan(max_prompt_tokens=500)
        assert made.config.sampling.max_tokens == 12
        assert made.config.inference.max_model_len == 512

    def test_the_context_need_not_be_a_multiple_of_sixteen(self):
        assert plan(context_length=83, max_prompt_tokens=64).config.inference.max_model_len == 83

    def test_errors(self):
        assert "leaves no room for a completion in the model's context of 512" in refusal(max_prompt_tokens=512)
        shorter = refusal({"inference.max_model_len": 60})
        assert "in inference.max_model_len of 60" in shorter
        assert "raise inference.max_model_len" in shorter
        assert "use at most 512" in refusal({"inference.max_model_len": 513})
        assert refusal({"sampling.max_tokens": 453}) == (
            "sampling.max_tokens = 453 and the longest prompt of 60 tokens do not fit into "
            "the model's context of 512: use at most 452"
        )

    def test_too_few_tokens_for_the_answer_is_a_warning(self):
        assert "below the longest gold answer of 12" in plan({"sampling.max_tokens": 11}).warnings[0]


class TestBatch:
    def test_few_prompts_lower_the_batch_and_say_so(self):
        made = plan(num_train_tasks=12)
        assert made.config.training.prompts_per_batch == 12
        lowered = reasons(made)["training.prompts_per_batch"]
        assert lowered == "lowered from 32: the training data has only 12 prompts"
        assert made.warnings == (f"training.prompts_per_batch was {lowered}",)
        assert made.config.inference.max_num_seqs == 256, "the evaluation still has 500 tasks"

    def test_updates_have_to_divide_the_lowered_batch(self):
        assert plan({"training.updates_per_batch": 4}, num_train_tasks=12).config.training.prompts_per_batch == 12
        message = refusal({"training.updates_per_batch": 8}, num_train_tasks=12)
        assert message.startswith("training.prompts_per_batch = 32 is more than the 12 prompts")
        assert message.endswith("use training.prompts_per_batch = 8")

    def test_no_tasks(self):
        assert "no tasks" in refusal(num_train_tasks=0)

    def test_totals(self):
        made = plan({"training.updates_per_batch": 2, "training.epochs_per_batch": 3, "evaluation.every": 10})
        notes = {note.name: note.value for note in made.notes}
        assert notes["sequences per batch"] == 256
        assert notes["tokens per batch, at most"] == 256 * 80
        assert notes["optimizer steps"] == 240
        assert notes["samples"] == 40 * 256
        assert notes["passes over the data"] == 1.28
        assert notes["evaluations"] == 5, "at the start, after 10, 20 and 30, and at the end"

    def test_clip_bounds_that_never_act(self):
        assert "never act" in plan({"algorithm.clip_low": 0.1}).warnings[0]
        assert plan({"algorithm.clip_low": 0.1, "training.updates_per_batch": 2}).warnings == ()


class TestCache:
    def test_sequences_at_once(self):
        few = {"training.prompts_per_batch": 4, "evaluation.num_tasks": 10}
        assert plan(few).config.inference.max_num_seqs == 32
        assert plan(few | {"evaluation.num_tasks": 50}).config.inference.max_num_seqs == 50
        several = plan(few | {"evaluation.num_tasks": 50, "evaluation.samples_per_task": 4})
        assert several.config.inference.max_num_seqs == 200
        assert "the tasks of an evaluation, 4 completions of each" in reasons(several).values()
        assert note(several, "evaluations").how == "of 50 held-out tasks, 4 completions of each"

    def test_size_is_that_of_all_sequences(self):
        made = plan({"inference.max_num_seqs": 1000}, max_answer_tokens=None)
        each = 2 * 4 * 2 * 32 * 4 * 512
        assert kv_bytes_per_sequence(TINY, "float32", 512) == each
        assert each * 1000 / GIB <= made.config.inference.kv_cache_gib <= each * 1000 / GIB + 0.1

    def test_fewer_sequences_when_memory_is_short(self):
        made = plan(memory_bytes=GIB // 2, max_answer_tokens=None)
        each = kv_bytes_per_sequence(TINY, "float32", 512)
        num_sequences = made.config.inference.max_num_seqs
        assert 1 <= num_sequences < 256
        assert num_sequences * each <= GIB // 8
        assert "a quarter of the memory" in reasons(made)["inference.max_num_seqs"]

    def test_a_given_cache_bounds_the_sequences(self):
        made = plan({"inference.kv_cache_gib": 0.02}, max_answer_tokens=None)
        assert made.config.inference.max_num_seqs == 20

    def test_errors(self):
        message = refusal({"inference.max_num_seqs": 100_000})
        assert "more than a quarter of the memory (6.00 GiB): use inference.max_num_seqs = " in message
        assert "raise inference.kv_cache_gib" in refusal({"inference.kv_cache_gib": 1e-4})
        message = refusal(context_length=10**8, max_answer_tokens=None)
        assert message.startswith("one sequence of inference.max_model_len = 100000000 tokens takes")
        assert "lower sampling.max_tokens" in message


LARGE = {
    "num_parameters": 1_543_714_304, "hidden_size": 1536, "intermediate_size": 8960, "num_layers": 28, "num_heads": 12,
    "num_kv_heads": 2, "head_dim": 128, "context_length": 32_768, "vocab_size": 151_936, "max_prompt_tokens": 128,
    "max_answer_tokens": None,
}  # fmt: skip
GENERATED = {"sampling.max_tokens": 512}


class TestGPU:
    """A model of 1.5 B parameters, 256 sequences of 640 tokens."""

    def test_side_by_side(self):
        made = plan(GENERATED, num_gpus=1, gpu_memory_bytes=139 * GIB, **LARGE)
        inference = made.config.inference
        assert (made.config.run.placement, inference.sleep, inference.max_num_seqs) == ("shared", False, 256)
        assert inference.kv_cache_gib == pytest.approx(256 * 656 * 28 * 1024 / GIB, abs=1 / 16)
        assert inference.enforce_eager is False
        assert made.config.weights.bridge == "single_copy"
        total = 1.54e9 * 2 / GIB + 4 + inference.kv_cache_gib
        assert inference.gpu_memory_utilization == pytest.approx(total / 139, abs=0.01)
        assert made.config.training.micro_batch_tokens >= 4096

    def test_they_take_turns_where_both_do_not_fit(self):
        made = plan(GENERATED, num_gpus=1, gpu_memory_bytes=44 * GIB, **LARGE)
        assert made.config.inference.sleep is True
        assert any("frees its memory" in item.reason for item in made.derived)
        assert "freed while the trainer works" in note(made, "memory of the engine").how
        assert sum(note.value for note in made.notes if note.unit == "GiB") > 44

    def test_with_staleness_they_share_what_there_is(self):
        made = plan(GENERATED | {"training.staleness": 1}, num_gpus=1, gpu_memory_bytes=56 * GIB, **LARGE)
        assert made.config.inference.sleep is False
        assert sum(note.value for note in made.notes if note.unit == "GiB") <= 56
        assert "turn off one of them" in refusal_of_file({"inference.sleep": True, "training.staleness": 1})

    def test_with_staleness_the_groups_that_finish_first_make_a_batch(self):
        assert plan(GENERATED, **CARD).config.training.order == "data"
        made = plan(GENERATED | {"training.staleness": 2}, **CARD)
        assert made.config.training.order == "ready"
        assert "groups for 3 batches at once" in reasons(made)["training.order"]
        restarts = {"training.staleness": 1, "weights.bridge": "restart"}
        assert plan(GENERATED | restarts, **CARD).config.training.order == "data"
        assert "ends the engine at every update" in refusal(GENERATED | restarts | {"training.order": "ready"}, **CARD)
        further = {"training.overprovision": 0.25}
        assert plan(GENERATED | further | {"training.staleness": 2}, **CARD).config.training.order == "ready"
        assert "use another bridge, or remove it" in refusal(GENERATED | restarts | further, **CARD)

    def test_two_cards(self):
        made = plan(GENERATED, num_gpus=2, gpu_memory_bytes=80 * GIB, **LARGE)
        assert (made.config.run.placement, made.config.weights.bridge) == ("separate", "broadcast")
        assert made.config.inference.sleep is False
        together = plan(GENERATED | {"run.placement": "shared"}, num_gpus=2, gpu_memory_bytes=80 * GIB, **LARGE)
        assert together.config.weights.bridge == "single_copy"
        assert "1 of 2 GPUs are not used" in together.warnings[0]
        assert made.config.training.micro_batch_tokens >= together.config.training.micro_batch_tokens

    def test_one_copy_of_the_weights(self):
        values = GENERATED | {"weights.bridge": "single_copy"}
        made = plan(values, num_gpus=2, gpu_memory_bytes=139 * GIB, **LARGE)
        assert (made.config.run.placement, made.config.weights.bridge) == ("shared", "single_copy")
        shared = {"run.placement": "shared", "weights.bridge": "disk"}
        two = plan(GENERATED | shared, num_gpus=2, gpu_memory_bytes=139 * GIB, **LARGE)
        ours, theirs = (note(each, "memory of the trainer").how for each in (made, two))
        assert ("weights" in ours, "weights" in theirs) == (False, True)
        # They take turns where both do not fit, and one copy cannot.
        small = {"num_gpus": 1, "gpu_memory_bytes": 48 * GIB, **LARGE}
        assert plan(GENERATED, **small).config.inference.sleep is True
        assert plan(values, **small).config.inference.sleep is False

    def test_the_engine_over_several(self):
        values = GENERATED | {"inference.tensor_parallel_size": 2}
        assert plan(values, num_gpus=3, gpu_memory_bytes=80 * GIB, **LARGE).config.run.placement == "separate"
        assert plan(values, num_gpus=2, gpu_memory_bytes=80 * GIB, **LARGE).config.run.placement == "shared"
        message = refusal(values, num_gpus=1, gpu_memory_bytes=80 * GIB, **LARGE)
        assert "tensor_parallel_size = 2 needs 2 GPUs, and there is 1" in message

    def test_several_engines(self):
        four = {"num_gpus": 4, "gpu_memory_bytes": 80 * GIB, **LARGE}
        made = plan(GENERATED, **four)
        assert (made.config.run.placement, made.config.weights.bridge) == ("separate", "broadcast")
        assert (made.config.inference.replicas, made.config.inference.max_num_seqs) == (3, 167)  # 500 / 3
        assert not any("not used" in warning for warning in made.warnings)
        few = plan(GENERATED | {"training.prompts_per_batch": 2}, **four)
        assert few.config.inference.replicas == 2
        assert "1 of 4 GPUs are not used" in few.warnings[0]
        divided = plan(GENERATED | {"inference.tensor_parallel_size": 2}, **four | {"num_gpus": 5})
        assert divided.config.inference.replicas == 2
        assert "on each of its GPUs" in note(divided, "memory of the engine").how
        assert plan(GENERATED | {"weights.bridge": "single_copy"}, **four).config.inference.replicas == 1
        both = GENERATED | {"inference.replicas": 2, "run.placement": "separate"}
        assert "needs 3 GPUs" in refusal(both, **four | {"num_gpus": 2})
        two = {"inference.replicas": 2}
        assert "needs 2 GPUs, and there is 1" in refusal(GENERATED | two, **four | {"num_gpus": 1})
        message = refusal(GENERATED | {"inference.tensor_parallel_size": 8}, **four | {"num_gpus": 9})
        assert "does not divide the model's 12 attention heads" in message
        assert "keeps the weights 2 times" in refusal_of_file(two | {"weights.bridge": "single_copy"})

    def test_what_cannot_be(self):
        alone = {"num_gpus": 1, "gpu_memory_bytes": 80 * GIB, **LARGE}
        assert "needs 2 GPUs" in refusal(GENERATED | {"run.placement": "separate"}, **alone)
        assert "there is no GPU" in refusal({"inference.sleep": True})
        message = refusal(GENERATED, **alone | {"gpu_memory_bytes": 24 * GIB})
        assert "a smaller model, set [lora]" in message
        assert plan(GENERATED | {"inference.gpu_memory_utilization": 0.1}, **alone).config.inference.max_num_seqs < 256


def refusal_of_file(values):
    return " ".join(sentence for _, sentence in keyed(contradictions(with_values(GRPO, values))))


def test_several_engines_on_a_cpu():
    one, two = plan(), plan({"inference.replicas": 2})
    assert (one.config.inference.max_num_seqs, two.config.inference.max_num_seqs) == (256, 250)
    assert any("divided among 2 engines" in item.reason for item in two.derived)
    assert "2 processes together" in note(two, "memory of the engine").how
    small = {"num_layers": 40, "num_kv_heads": 32, "memory_bytes": 4 * GIB}
    one, two = plan(**small), plan({"inference.replicas": 2}, **small)
    assert two.config.inference.max_num_seqs <= one.config.inference.max_num_seqs / 2
    assert two.config.inference.kv_cache_gib <= one.config.inference.kv_cache_gib / 2 + 0.0625


def test_the_first_cards_are_the_trainers():
    four = place(ranks=2, replicas=2, separate=True)
    assert (four.trainer, four.engines) == ((0, 1), ((2,), (3,)))
    divided = place(replicas=2, tensor_parallel_size=2, separate=True)
    assert (divided.engines, num_gpus_needed(divided)) == (((1, 2), (3, 4)), 5)
    together = place(replicas=2, separate=False)
    assert (together.trainer, together.engines, num_gpus_needed(together)) == ((0,), ((0,), (1,)), 2)
    assert replicas_that_fit(8, ranks=2, tensor_parallel_size=2) == 3
    assert replicas_that_fit(1) == 0
    config = with_values(GRPO, {"inference.replicas": 2, "run.placement": "separate"})
    assert [engine_gpus(config, visible, 1) for visible in (None, "4, 5,7")] == [("2",), ("7",)]
    assert engine_gpus(with_values(GRPO, {"inference.replicas": 1}), None) == ()


class TestMicroBatch:
    def test_an_eighth_of_the_memory(self):
        each = activation_bytes_per_token(TINY, "float32")
        tokens = plan(memory_bytes=2 * GIB).config.training.micro_batch_tokens
        assert tokens % 256 == 0
        assert 0 < GIB // 4 - tokens * each < 256 * each

    def test_never_less_than_the_longest_sequence(self):
        made = plan(vocab_size=10_000_000)
        assert made.config.training.micro_batch_tokens == 80
        assert "the longest sequence" in made.warnings[0]

    def test_layers_are_computed_again_where_the_longest_sequence_does_not_fit_otherwise(self):
        deep = {"num_layers": 64, "memory_bytes": 2 * GIB}
        made = plan({"training.micro_batch_tokens": 8000}, **deep)
        assert made.config.training.gradient_checkpointing is True
        assert plan({"training.micro_batch_tokens": 80}, **deep).config.training.gradient_checkpointing is False
        made = plan({"training.gradient_checkpointing": False}, **deep)
        more = plan({"training.gradient_checkpointing": True}, **deep)
        assert more.config.training.micro_batch_tokens > 5 * made.config.training.micro_batch_tokens

    def test_logits_count(self):
        large = dataclasses.replace(TINY, vocab_size=150_000)
        assert activation_bytes_per_token(large, "bfloat16") > 4 * 150_000

    def test_what_attention_and_matrices_gave_is_kept_where_that_fits(self):
        deep = {"num_layers": 64, "memory_bytes": 2 * GIB}
        row = {"training.micro_batch_tokens": 520}
        made = plan(row, **deep)
        assert made.config.training.gradient_checkpointing == "selective"
        assert "do not fit" in (reason := reasons(made)["training.gradient_checkpointing"])
        assert reason.endswith("they do")
        # Compiled layers do so by themselves.
        made = plan(row | {"training.compile": True}, **deep)
        assert made.config.training.gradient_checkpointing is True

    def test_each_way_keeps_less_than_the_one_before(self):
        ways = [{}, {"compiled": True}, {"checkpointing": "selective"}, {"checkpointing": True}]
        ways.append({"checkpointing": True, "offload": True})
        deep = dataclasses.replace(TINY, num_layers=32)
        sizes = [activation_bytes_per_token(deep, "bfloat16", **way) for way in ways]
        assert sizes == sorted(set(sizes), reverse=True)
        assert activation_bytes_per_token(deep, "bfloat16", checkpointing="selective", compiled=True) == sizes[1]

    def test_moving_activations_needs_a_gpu_and_layers_that_are_computed_again(self):
        values = {"training.offload_activations": True}
        assert "there is no GPU: remove it" in refusal(values)
        made = plan(values, num_gpus=1, gpu_memory_bytes=80 * GIB)
        assert made.config.training.gradient_checkpointing is True
        for other in (False, "selective"):
            asked = values | {"training.gradient_checkpointing": other}
            assert "set training.gradient_checkpointing = true" in refusal_of_file(asked)


CARD = {"num_gpus": 1, "gpu_memory_bytes": 139 * GIB, **LARGE}


class TestCompile:
    def test_where_training_is_long_enough(self):
        long = plan(GENERATED | {"training.steps": 500}, **CARD)
        short = plan(GENERATED | {"training.steps": 5}, **CARD)
        assert long.config.training.compile is True
        assert short.config.training.compile is False
        assert "compiling takes about 60 s" in reasons(short)["training.compile"]
        # Compiled layers keep less, so rows are longer, or the same.
        assert long.config.training.micro_batch_tokens >= short.config.training.micro_batch_tokens

    def test_small_layers_are_not_compiled(self):
        small = {"num_gpus": 1, "gpu_memory_bytes": 139 * GIB, "num_parameters": 134_515_008, "hidden_size": 576}
        small |= {"intermediate_size": 1536, "num_layers": 30, "vocab_size": 49_152, "max_prompt_tokens": 500}
        made = plan({"training.steps": 50_000}, **small)
        assert (made.config.training.compile, reasons(made)["training.compile"]) == (
            False,
            "layers as small as these train faster as CUDA graphs",
        )
        assert plan({"training.steps": 50_000, "lora": {"rank": 8}}, **small).config.training.compile is True

    def test_what_was_asked_for_stays(self):
        values = {"training.steps": 5000, "training.packing": False}
        assert plan(GENERATED | values, **CARD).config.training.compile is False
        assert plan({"training.compile": True}).config.training.compile is True
        assert plan({"training.steps": 50_000}).config.training.compile is False, "there is no GPU"


class TestSFT:
    def test_without_an_engine_its_keys_stay(self):
        made = make_plan(ALONE, dataclasses.replace(FACTS, data=SFT_DATA))
        assert autos(made, ALONE) == []
        assert made.config.inference == PlannedInference(), "no engine"
        assert {item.name for item in made.derived} == {
            "model.dtype", "model.fp32_head", "model.fp32_residual", "model.replay_experts", "model.shared_kernels",
            "environment.num_train_tasks", "training.micro_batch_tokens", "training.learning_rate",
            "training.gradient_checkpointing", "training.compile", "training.packing", "run.threads",
            "run.checkpoint_every", "run.async_checkpoints",
        }  # fmt: skip
        assert [note.name for note in made.notes if note.unit] == ["memory of the trainer", "size of a checkpoint"]
        on_gpu = dataclasses.replace(FACTS, data=SFT_DATA, num_gpus=1, gpu_memory_bytes=8 * GIB)
        assert make_plan(ALONE, on_gpu).config.training.micro_batch_tokens == 8192, (
            "rows of small layers are CUDA graphs"
        )

    def test_with_evaluation_it_has_one(self):
        made = make_plan(SFT, dataclasses.replace(FACTS, data=SFT_DATA))
        assert autos(made, SFT) == []
        assert made.config.inference.max_num_seqs == 256

    def test_a_conversation_longer_than_the_context(self):
        assert "longest training conversation has 513 tokens" in refusal(config=SFT, max_sequence_tokens=513)

    def test_nothing_to_imitate(self):
        assert "has none: use grpo" in refusal(config=SFT)


def test_memory_of_everything_together():
    assert weights_bytes(TINY, "bfloat16") == 1_600_000
    passing = (800_000 - 100 * 128) // 4  # the gradients of one of four layers
    assert training_state_bytes(TINY, "bfloat16", with_reference=False, on_gpu=True) == 800_000 * (2 + 16) + 2 * passing
    copied = 4 * 100 * 128  # the head's gradient on its way into a sum in float32
    assert training_state_bytes(TINY, "bfloat16", with_reference=False) == 800_000 * (2 + 16) + 2 * passing + copied
    assert training_state_bytes(TINY, "float32", with_reference=True) == 800_000 * (4 + 16 + 4) + 4 * passing
    message = refusal(num_parameters=2_000_000_000)
    assert message.startswith("the run needs about ")
    assert "there are 24.00 GiB: " in message


def test_the_plan_can_be_shown():
    made = plan(num_train_tasks=12)
    out = io.StringIO()
    Console(file=out, width=160).print(render_plan(made))
    text = out.getvalue()
    assert "sampling.max_tokens" in text
    assert "warning: training.prompts_per_batch was lowered from 32" in text
    Console(file=out, width=80).print(render_plan(made))
    assert all(f" {item.name} " in out.getvalue()[len(text) :] for item in made.derived)
    content = json.loads(plan_as_json(made))
    assert content["config"]["training"]["prompts_per_batch"] == 12
    assert content["derived"][0] == {
        "name": "model.dtype",
        "value": "float32",
        "reason": "on a CPU 0.8 M parameters are few: full precision costs little",
    }
    assert len(content["notes"]) == len(made.notes)
    assert content["warnings"] == list(made.warnings)


@pytest.mark.parametrize("kind", RECIPES)
def test_a_recipe_is_shown_with_its_source(kind):
    config = with_values(GRPO, {"algorithm.kind": kind, "algorithm.clip_high": 0.3})
    made = plan(config=config)
    told = {name: reason for name, reason in reasons(made).items() if name.startswith("algorithm.")}
    assert told["algorithm.advantage"] == RECIPES[kind].source
    assert "arXiv" in told["algorithm.loss"]
    assert "algorithm.clip_high" not in told
    assert "algorithm.arguments.kl_in" not in told, "it has no effect while kl_coef is 0"
    assert autos(made, config) == []
    assert any("never act with one update" in text for text in made.warnings)


def test_an_estimator_that_holds_nothing_back_is_a_warning():
    values = {"algorithm.kl_coef": 0.1, "algorithm.arguments.kl_estimator": "k1"}
    assert any("zero on average" in text for text in plan(values).warnings)
    assert not plan({**values, "algorithm.arguments.kl_in": "reward"}).warnings


def test_deltas_cost_a_copy_of_the_weights():
    values = {"weights.delta": True, "model.dtype": "bfloat16"}
    made, without = plan(values, num_parameters=2**29), plan({"model.dtype": "bfloat16"}, num_parameters=2**29)
    ours, theirs = (note(each, "memory of the trainer") for each in (made, without))
    assert ours.value == pytest.approx(theirs.value + 1)
    assert "a copy of the version published last (1.00 GiB, for weights.delta to find what changed)" in ours.how
    assert not made.warnings
    assert "saves nothing while" in plan({"weights.delta": True}).warnings[0]
    without_engine = plan({"weights.delta": True}, ALONE, max_sequence_tokens=90)
    assert "copy" not in note(without_engine, "memory of the trainer").how
    assert not without_engine.warnings


def test_lora():
    adapter = AdapterFacts(num_parameters=10_000, target_modules=("down_proj", "q_proj"))
    made = plan(config=LORA, adapter=adapter)
    derived = {item.name: item.value for item in made.derived}
    assert derived["weights.bridge"] == "lora"
    assert derived["lora.target_modules"] == made.config.lora.target_modules == ("down_proj", "q_proj")
    assert note(made, "trainable parameters").value == 10_000
    assert "1.25 % of the model's 800,000" in note(made, "trainable parameters").how
    assert "frozen weights" in note(made, "memory of the trainer").how
    chosen = GRPO.model_copy(update={"lora": LoraConfig(target_modules=("q_proj",))})
    assert plan({"weights.bridge": "disk"}, chosen, adapter=adapter).config.lora.target_modules == ("q_proj",)


def test_an_adapter_in_float32_is_for_vllm_on_cpus():
    adapter = AdapterFacts(num_parameters=10_000, target_modules=("q_proj",))
    card, wanted = {"num_gpus": 1, "gpu_memory_bytes": 80 * GIB}, {"model.dtype": "float32"}
    assert 'use model.dtype = "bfloat16"' in refusal(wanted, LORA, adapter=adapter, **card)
    assert plan(wanted | {"weights.bridge": "disk"}, LORA, adapter=adapter, **card)
    assert plan(wanted, LORA, adapter=adapter)


def test_a_thinking_budget_that_never_acts_is_a_warning():
    assert any("never acts" in text for text in plan({"algorithm.arguments.thinking_budget": 19}).warnings)
    assert not plan({"algorithm.arguments.thinking_budget": 18}).warnings


def test_a_critic_is_counted_and_gets_the_policys_rate():
    ppo = with_values(GRPO, {"algorithm.kind": "ppo", "training.learning_rate": 3e-4})
    made, without = plan(config=ppo), plan()
    assert made.config.critic.learning_rate == 3e-4
    assert made.config.algorithm.scale_rewards == "whiten"
    assert autos(made, ppo) == []
    assert "critic.learning_rate" not in {item.name for item in without.derived}
    own = gib(training_state_bytes(TINY, "float32", with_reference=False))
    assert f"the critic's own {own}" in note(made, "memory of the trainer").how
    alone = training_state(with_values(GRPO, {}), "float32", FACTS)
    assert training_state(ppo, "float32", FACTS) == 2 * alone
    # One copy of the policy's weights for trainer and engine; the critic's are its own.
    one_copy = with_values(ppo, {"weights.bridge": "single_copy"})
    assert training_state(one_copy, "float32", FACTS) == 2 * alone - weights_bytes(TINY, "float32")


def test_lora_needs_no_reference_and_no_state_for_the_base():
    whole = training_state_bytes(TINY, "bfloat16", with_reference=True, on_gpu=True)
    adapter = training_state_bytes(TINY, "bfloat16", with_reference=True, num_adapter_parameters=1000)
    assert whole == 800_000 * (2 * 2 + 16) + 2 * (800_000 - 100 * 128) // 4
    assert adapter == 800_000 * 2 + 1000 * (2 * 2 + 16)


sizes = st.integers(min_value=1, max_value=10**5)
any_config = st.builds(
    RunConfig,
    model=st.just(ModelConfig(path="org/name")),
    environment=st.just(EnvironmentConfig(name="x")),
    algorithm=st.just(RLConfig()) | st.just(SFTConfig()),
    training=st.builds(TrainingConfig, steps=sizes, prompts_per_batch=sizes),
    sampling=st.builds(SamplingConfig, max_tokens=st.just("auto") | sizes),
    inference=st.builds(
        InferenceConfig,
        max_model_len=st.just("auto") | sizes,
        max_num_seqs=st.just("auto") | sizes,
        kv_cache_gib=st.just("auto") | st.floats(min_value=0.001, max_value=10),
    ),
    evaluation=st.none() | st.builds(EvaluationConfig, num_tasks=sizes),
    data=st.none() | st.just(DataConfig(path="/x")),
    lora=st.none() | st.just(LoraConfig()),
)
any_facts = st.builds(
    Facts,
    num_cpus=st.integers(min_value=1, max_value=256),
    memory_bytes=st.integers(min_value=1, max_value=1 << 42),
    num_gpus=st.integers(min_value=0, max_value=8),
    gpu_memory_bytes=st.integers(min_value=1, max_value=1 << 38),
    model=st.builds(dataclasses.replace, st.just(TINY), num_parameters=st.integers(1, 10**10), context_length=sizes),
    data=st.builds(
        DataFacts,
        num_train_tasks=sizes,
        max_prompt_tokens=st.integers(min_value=0, max_value=10**5),
        max_answer_tokens=st.none() | sizes,
        max_sequence_tokens=st.none() | sizes,
    ),
)


@given(any_config, any_facts)
def test_a_plan_is_whole_or_refused(config, measured):
    try:
        made = make_plan(config, measured)
    except ConfigError:
        return
    assert autos(made, config) == []
    assert make_plan(made.config, measured).derived == (), "a plan of a plan changes nothing"
    if made.config.algorithm.kind == "grpo":
        limit = made.config.inference.max_model_len
        assert measured.data.max_prompt_tokens + made.config.sampling.max_tokens <= limit
        assert limit <= measured.model.context_length


@given(any_config, any_facts)
def test_a_plan_reads_back_from_its_text(tmp_path_factory, config, measured):
    path = tmp_path_factory.getbasetemp() / "resolved.toml"
    with contextlib.suppress(ConfigError):
        path.write_text(dump_resolved(Loaded(config, {})))
        loaded = load_config(path)
        made = make_plan(loaded.config, measured)
        path.write_text(dump_resolved(loaded, made.derived))
        assert planned_config(load_config(path).config) == made.config
