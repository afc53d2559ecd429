import json
import os

import pytest
import torch

from slipstream.config import LoraConfig, ModelConfig, RLConfig, SFTConfig
from slipstream.errors import ConfigError
from slipstream.plan import machine
from slipstream.plan.machine import (
    free_memory_bytes,
    gpu_capability,
    measure_gpus,
    usable_cpus,
    usable_memory_bytes,
)
from slipstream.plan.measure import gather_facts, measure_adapter, measure_data, read_model
from slipstream.records import Message, Sequence, Task
from tests.plan.test_plan import GRPO
from tests.refusals import refuses

SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "vocab_size": 100,
    "dtype": "float32",
    "tie_word_embeddings": True,
}


def save_weights(file, size):
    import numpy
    from safetensors.numpy import save_file

    save_file({"a": numpy.zeros(size, "float32")}, file)


class LetterTokenizer:
    """One token for a letter, one at the start of a turn and one at its end."""

    def render(self, messages):
        return [0] * (sum(len(message.content) + 2 for message in messages) + 1)

    def training_tokens(self, messages, train_on):
        mask = []
        for place, message in enumerate(messages):
            is_trained = message.role == "assistant" and (train_on == "all" or place == len(messages) - 1)
            mask += [False] + [is_trained] * (len(message.content) + 1)
        return Sequence(token_ids=[0] * len(mask), mask=mask)


def task(prompt, answer):
    return Task(id=prompt, prompt=(Message(role="user", content=prompt),), answer=answer)


def config(algorithm, **changes):
    return GRPO.model_copy(update={"algorithm": algorithm, **changes})


def folder_with(path, shape):
    (path / "config.json").write_text(shape if isinstance(shape, str) else json.dumps(shape))
    return str(path)


class TestData:
    tasks = (task("abc", "ab"), task("abcdef", "a"), task("a", "abcd"))

    def test_grpo(self):
        facts = measure_data(self.tasks, LetterTokenizer(), [task("x" * 9, "y")], max_prompt_tokens=6)
        assert facts.num_train_tasks == 3
        assert facts.max_answer_tokens == 5
        assert facts.max_sequence_tokens is None

    def test_sft(self):
        facts = measure_data(self.tasks, LetterTokenizer(), [task("xy", "y")], lengths=[9, 11, 4], max_prompt_tokens=6)
        assert facts.num_train_tasks == 3
        assert (facts.max_sequence_tokens, facts.num_eval_rows) == (11, 0)

    def test_sft_with_held_out_rows(self):
        rows = {"lengths": [9, 11], "eval_lengths": [7, 12, 3]}
        facts = measure_data([], LetterTokenizer(), **rows, max_prompt_tokens=6)
        assert facts.num_train_tasks == 2
        assert facts.max_answer_tokens is None
        assert (facts.max_sequence_tokens, facts.num_eval_rows) == (12, 3)

    def test_no_gold_answers(self):
        facts = measure_data([task("a", None)], LetterTokenizer(), max_prompt_tokens=6)
        assert facts.max_answer_tokens is None
        turns = [Message("assistant", "abcde"), Message("tool", "a" * 20), Message("assistant", "abc")]
        facts = measure_data([task("a", None)], LetterTokenizer(), gold=lambda _: turns, max_prompt_tokens=6)
        assert facts.max_answer_tokens == 6, "the longest turn of the policy"


class TestModel:
    def test_shape_and_count_before_there_are_weights(self, tmp_path):
        model = read_model(folder_with(tmp_path, SHAPE))
        assert (model.hidden_size, model.num_layers, model.num_kv_heads, model.head_dim) == (128, 4, 2, 32)
        assert (model.context_length, model.vocab_size, model.dtype) == (512, 100, "float32")
        layer = 128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 384 + 2 * 128 + 2 * 32  # and the norms of queries and keys
        assert model.num_parameters == 4 * layer + 100 * 128 + 128
        untied = read_model(folder_with(tmp_path, SHAPE | {"tie_word_embeddings": False}))
        assert untied.num_parameters == model.num_parameters + 100 * 128

    def test_defaults_of_older_shapes(self, tmp_path):
        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 99, "vocab_size": 100}
        shape = {"model_type": "gpt2", "torch_dtype": "bfloat16", **sizes}
        model = read_model(folder_with(tmp_path, shape))
        assert (model.num_kv_heads, model.head_dim, model.intermediate_size) == (4, 16, 256)
        assert (model.context_length, model.dtype) == (99, "bfloat16")

    def test_text_part_of_a_larger_model(self, tmp_path):
        nested = {"text_config": SHAPE, "vision_config": {"hidden_size": 7}, "dtype": "bfloat16"}
        path = folder_with(tmp_path, nested)
        save_weights(tmp_path / "model.safetensors", 3)
        model = read_model(path)
        assert (model.hidden_size, model.dtype) == (128, "bfloat16")

    @pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
    def test_experts_by_each_of_their_names(self, name, tmp_path):
        assert read_model(folder_with(tmp_path, SHAPE | {name: 8})).num_experts == 8
        assert read_model(folder_with(tmp_path, SHAPE)).num_experts == 0

    def test_every_expert_is_counted(self, tmp_path):
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        model = read_model(folder_with(tmp_path, SHAPE | experts | {"model_type": "qwen3_moe"}))
        attention = 128 * 128 * 2 + 128 * 64 * 2 + 2 * 128 + 2 * 32
        layer = attention + 8 * 128 + 8 * 3 * 128 * 16  # with the router
        assert model.num_parameters == 4 * layer + 100 * 128 + 128
        assert model.num_experts == 8

    def test_parameters_are_counted_in_all_files(self, tmp_path):
        path = folder_with(tmp_path, SHAPE)
        for number, size in ((1, (3, 4)), (2, 5)):
            save_weights(tmp_path / f"model-{number}.safetensors", size)
        assert read_model(path).num_parameters == 17
        (tmp_path / "model-2.safetensors").write_bytes(b"short")
        with pytest.raises(ConfigError, match=r"model-2\.safetensors cannot be read"):
            read_model(path)

    def test_what_the_library_has_as_default_is_asked_of_it(self, tmp_path):
        shape = {key: value for key, value in SHAPE.items() if key != "max_position_embeddings"}
        model = read_model(folder_with(tmp_path, shape | {"model_type": "qwen3"}))
        assert model.context_length == 32_768

    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            ("{", "cannot be read"),
            ("[" * 100_000, "cannot be read"),
            ("[]", "is not a JSON object"),
            ("{}", "neither a local folder nor a hub id"),
        ],
    )
    def test_bad_config_files(self, tmp_path, content, expected):
        with pytest.raises(ConfigError, match=expected):
            read_model(folder_with(tmp_path, content))

    def test_no_such_place(self, tmp_path):
        with pytest.raises(ConfigError, match=r"has no config\.json"):
            read_model(str(tmp_path))
        with pytest.raises(ConfigError, match="is not a folder"):
            read_model(str(tmp_path / "none"))
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match="is not a folder"):
            read_model(str(tmp_path / "file"))


class TestMachine:
    def test_what_there_is(self):
        assert 1 <= usable_cpus() <= (os.cpu_count() or 1)
        assert usable_memory_bytes() > 1 << 20

    @pytest.mark.parametrize(
        ("membership", "files"),
        [
            ("0::/", {"cpu.max": "{cpus}00000 100000", "memory.max": "{bytes}"}),
            ("0::/jobs/mine", {"jobs/mine/cpu.max": "{cpus}00000 100000", "jobs/memory.max": "{bytes}"}),
            (
                "4:memory:/mine\n3:cpu,cpuacct:/mine",
                {
                    "cpu,cpuacct/mine/cpu.cfs_quota_us": "{cpus}50000",
                    "cpu,cpuacct/mine/cpu.cfs_period_us": "100000",
                    "memory/mine/memory.limit_in_bytes": "{bytes}",
                },
            ),
            (
                "3:cpu:/elsewhere",
                {
                    "cpu/cpu.cfs_quota_us": "{cpus}00000",
                    "cpu/cpu.cfs_period_us": "100000",
                    "memory/memory.limit_in_bytes": "{bytes}",
                },
            ),
        ],
    )
    def test_a_control_group_may_have_less(self, tmp_path, monkeypatch, membership, files):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
        groups, member = tmp_path / "cgroup", tmp_path / "membership"
        member.write_text(f"{membership}\n")
        for name, text in files.items():
            (groups / name).parent.mkdir(parents=True, exist_ok=True)
            (groups / name).write_text(text.replace("{cpus}", "2").replace("{bytes}", "1000") + "\n")
        monkeypatch.setattr(machine, "_GROUPS", groups)
        monkeypatch.setattr(machine, "_MEMBERSHIP", member)
        assert usable_cpus() == 2
        assert usable_memory_bytes() == 1000

    def test_free_memory_is_what_the_control_group_leaves(self, tmp_path, monkeypatch):
        stat = "anon 1\ninactive_file 300\n"
        for name, text in {"max": "1000\n", "current": "900\n", "stat": stat}.items():
            (tmp_path / f"memory.{name}").write_text(text)
        monkeypatch.setattr(machine, "_MEMBERSHIP", tmp_path / "none")
        monkeypatch.setattr(machine, "_GROUPS", tmp_path / "none")
        assert 1 << 20 < free_memory_bytes() < usable_memory_bytes()
        monkeypatch.setattr(machine, "_GROUPS", tmp_path)
        assert free_memory_bytes() == 400

    @pytest.mark.parametrize("quota", ["max 100000", "-1 100000", "50000 100000", ""])
    def test_a_quota_leaves_a_core_at_least(self, tmp_path, monkeypatch, quota):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
        (tmp_path / "memory.max").write_text("max\n")
        monkeypatch.setattr(machine, "_MEMBERSHIP", tmp_path / "none")
        monkeypatch.setattr(machine, "_GROUPS", tmp_path / "none")
        whole = usable_memory_bytes()
        monkeypatch.setattr(machine, "_GROUPS", tmp_path)
        assert usable_cpus() == (1 if quota.startswith("5") else 64)
        assert usable_memory_bytes() == whole

    def test_gpus(self):
        count, memory = measure_gpus()
        assert (count == 0) == (memory == 0)
        assert (count == 0) <= (gpu_capability() == 0)

    @pytest.mark.parametrize(("cards", "expected"), [([(9, 0), (9, 0)], 9), ([(9, 0), (8, 6)], 0), ([], 0)])
    def test_gpus_of_one_capability(self, monkeypatch, cards, expected):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(cards))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards) or 1)  # a driver that is too old has some
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: cards[index])
        assert gpu_capability() == expected


def test_gather(tmp_path):
    settings = config(RLConfig(), model=ModelConfig(path=folder_with(tmp_path, SHAPE)))
    facts = gather_facts(settings, measure_data([task("abc", "ab")], LetterTokenizer(), max_prompt_tokens=6))
    assert (facts.num_cpus, facts.model.hidden_size, facts.data.max_prompt_tokens) == (usable_cpus(), 128, 6)


def test_the_adapter_is_measured_and_checked_without_the_models_weights(tmp_path):
    from slipstream.commands.small_models.tiny_qwen3 import new_model
    from slipstream.trainer.model.policy import PolicyModel
    from slipstream.weights.adapter_folder import AdapterConfig, write_adapter_folder

    folder = new_model(tmp_path / "model", hidden_size=64, num_layers=2)
    adapter = PolicyModel.load(folder).add_adapter(AdapterConfig(8, 16.0, ("q_proj", "o_proj"), str(folder)))
    write_adapter_folder(tmp_path / "adapter", adapter.named_weights(), adapter.config)
    (folder / "model.safetensors").unlink()

    def measured(**lora):
        return measure_adapter(config(SFTConfig(), lora=LoraConfig(**lora), model=ModelConfig(path=str(folder))))

    assert measure_adapter(config(SFTConfig())) is None
    fitting = {"rank": 8, "alpha": 16.0, "target_modules": ("q_proj", "o_proj"), "path": str(tmp_path / "adapter")}
    found = measured(**fitting)
    assert found.num_parameters == adapter.num_parameters
    assert found.target_modules == ("o_proj", "q_proj")
    assert len(measured().target_modules) == 7
    with pytest.raises(ConfigError, match=r"does not fit model.path and lora.target_modules \(missing .*down_proj"):
        measured(**fitting | {"target_modules": "all-linear"})
    with refuses("lora.rank"):
        measured(**fitting | {"rank": 4})
    with pytest.raises(ConfigError, match=r"is a LoRA adapter: give its base as model.path"):
        read_model(str(tmp_path / "adapter"))


@pytest.mark.parametrize("num_files", [1, 2])
def test_weights_that_lie_there_once_more_are_not_counted(num_files, tmp_path):
    """As Mistral's own format beside the files of transformers."""
    from safetensors.torch import save_file

    from slipstream.commands.small_models.tiny_qwen3 import new_model
    from slipstream.weights.model_files import read_model_folder, stored_parameters

    folder = new_model(tmp_path / "model", hidden_size=16, num_layers=1, num_heads=1, num_kv_heads=1)
    weights = dict(read_model_folder(folder))
    count, stored = read_model(str(folder)).num_parameters, stored_parameters(folder, "float32")
    if num_files == 2:
        names = list(weights)
        parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
        for file, part in parts.items():
            save_file({name: weights[name] for name in part}, folder / file)
        index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "model.safetensors").unlink()
    save_file({f"theirs.{name}": weight for name, weight in weights.items()}, folder / "consolidated.safetensors")
    assert read_model(str(folder)).num_parameters == count
    assert {spec.name for spec in stored_parameters(folder, "float32")} == {spec.name for spec in stored}
    assert dict(read_model_folder(folder)).keys() == weights.keys()
