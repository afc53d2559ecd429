"""Names of settings in other tools."""

import pytest

from slipstream.config import load_config
from slipstream.config.parse.aliases import ALSO, NEAR, REFUSED, REMARKS, TAKEN, alias_of
from slipstream.config.parse.keys import all_keys
from slipstream.errors import ConfigError

SECTIONS = """\
[model]
path = "some/model"
[environment]
name = "reasoning_gym/spell_backward"
[algorithm]
kind = "grpo"
"""


def test_the_table_names_real_settings():
    assert {*TAKEN.values(), *ALSO.values(), *NEAR.values()} <= set(all_keys())
    assert {*ALSO, *REMARKS} <= set(TAKEN)
    assert not set(TAKEN) & set(REFUSED)
    assert not {*TAKEN, *REFUSED} & set(all_keys())
    assert all(alias_of(name) == name for name in (*TAKEN, *REFUSED))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_refused_names_a_setting_or_says_remove(name):
    words = REFUSED[name].replace("[", " ").replace("]", " ").replace(":", " ").replace(",", " ").replace(";", " ")
    assert "remove it" in words or set(words.split()) & {*all_keys(), "environment.settings.eval_path"}


def test_names_at_the_top_level_of_a_file(run_file):
    text = 'max_steps = 7\nnum_generations = 4\nreport_to = "wandb"\nlora_r = 8\nepsilon = 0.1\n' + SECTIONS
    loaded = load_config(run_file(text))
    config = loaded.config
    assert config.training.steps == 7
    assert config.algorithm.group_size == 4
    assert config.run.sinks == ("wandb",)
    assert config.lora.rank == 8
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.1, 0.1)
    assert loaded.origins["training.steps"] == "run.toml:1"
    assert loaded.warnings[1] == "num_generations: in Slipstream algorithm.group_size (run.toml:2)"
    assert len(loaded.warnings) == 5
    both = load_config(run_file("max_steps = 7\nepsilon_high = 0.3\nepsilon = 0.1\n" + SECTIONS)).config
    assert (both.algorithm.clip_low, both.algorithm.clip_high) == (0.1, 0.3)


def test_names_in_our_section_and_in_sections_of_verl(run_file):
    text = SECTIONS + "beta = 0.01\n[trainer]\ntotal_training_steps = 3\n[actor_rollout_ref.rollout]\nn = 2\n"
    config = load_config(run_file(text + "[data]\ntrain_batch_size = 16\n")).config
    assert (config.algorithm.kl_coef, config.algorithm.group_size) == (0.01, 2)
    assert (config.training.steps, config.training.prompts_per_batch) == (3, 16)


def test_names_on_the_command_line(run_file):
    flags = ["--max-steps", "9", "--actor_rollout_ref.rollout.n=2", "--no-gradient_checkpointing", "--epsilon", "0.1"]
    loaded = load_config(run_file(), [*flags, "--algorithm.clip_high", "0.5", "--report_to", "none"])
    config = loaded.config
    assert (config.training.steps, config.algorithm.group_size) == (9, 2)
    assert config.training.gradient_checkpointing is False
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.1, 0.5)
    assert loaded.origins["training.steps"] == "command line"
    assert "--actor_rollout_ref.rollout.n: in Slipstream algorithm.group_size" in loaded.warnings
    assert len(loaded.warnings) == 5


@pytest.mark.parametrize(
    ("text", "flags", "sentence"),
    [
        (
            "num_train_epochs = 3\n",
            [],
            "training.epochs has no effect while training.steps is set: remove it (run.toml:1",
        ),
        ("max_length = 3\n", [], "max_length is not a setting of Slipstream; set data.max_length"),
        ("completion_only_loss = false\n", [], "set algorithm.train_on"),
        ("", ["--per_device_train_batch_size", "8"], "set training.prompts_per_batch to the prompts of a whole batch"),
        ("max_steps = 3\n", [], "max_steps and training.steps are the same setting: remove one of them (run.toml:1)"),
        ("lora_r = 3\nlora_rank = 4\n", [], "lora_rank and lora_r are the same setting: remove one of them"),
        ("", ["--beta", "1", "--algorithm.kl_coef", "1"], "--beta and --algorithm.kl_coef are the same setting"),
        ("temperature = 9.0\n", [], "sampling.temperature = 9.0 must be at most 2"),
        ("trainer.total_epochs = 3\nmax_length = 3\n", [], "max_length is not a setting of Slipstream"),
        ("", ["--val_set_size", "0.1"], "did you mean data.eval_fraction?"),
        ("trainer.max_step = 3\n", [], "trainer.max_step is not a known setting: did you mean"),
        ("evaluation = false\neval_steps = 5\n", [], "eval_steps and evaluation are the same setting"),
    ],
)
def test_what_is_refused(run_file, text, flags, sentence):
    file = run_file(text + SECTIONS + "[training]\nsteps = 20\n")
    with pytest.raises(ConfigError) as error:
        load_config(file, flags)
    assert sentence in str(error.value)


@pytest.mark.parametrize("text", ["num_train_epochs = 1.5\n", "trainer.total_epochs = 1.5\n"])
def test_epochs(run_file, text):
    loaded = load_config(run_file(text + SECTIONS))
    assert (loaded.config.training.epochs, loaded.config.training.steps) == (1.5, None)
    assert "in Slipstream training.epochs, where the last batch of a pass" in loaded.warnings[0]
    assert load_config(run_file(SECTIONS), ["--num_train_epochs", "2"]).config.training.epochs == 2.0


def test_a_command_line_replaces_what_the_file_has_under_another_name(run_file):
    path = run_file("max_steps = 7\n" + SECTIONS)
    assert load_config(path, ["--training.steps", "3"]).config.training.steps == 3
    assert load_config(run_file(), ["--max_steps", "3"]).config.training.steps == 3


def test_a_name_in_the_section_of_another_setting_is_only_suggested(run_file):
    with pytest.raises(ConfigError, match=r"did you mean sampling\.max_tokens"):
        load_config(run_file(), ["--evaluation.max_new_tokens", "8"])


def test_validation_in_the_words_of_trl_and_verl(run_file):
    trl = load_config(run_file("max_steps = 7\nnum_generations_eval = 4\n" + SECTIONS)).config
    assert trl.evaluation.samples_per_task == 4
    values = "actor_rollout_ref.rollout.val_kwargs = { n = 8, temperature = 0.6 }\n"
    verl = load_config(run_file("max_steps = 7\n" + values + SECTIONS)).config
    assert (verl.evaluation.samples_per_task, verl.evaluation.temperature) == (8, 0.6)
