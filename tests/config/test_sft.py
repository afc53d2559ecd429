"""Steps or epochs, and what [data] holds out."""

import pytest

from slipstream.config import Derived, dump_resolved, load_config, load_settings
from slipstream.config.sft import is_hub_name
from slipstream.errors import ConfigError

SFT = """\
[model]
path = "some/model"
[data]
path = "rows.jsonl"
{data}
[algorithm]
kind = "sft"
[training]
{training}
"""
EPOCHS = SFT.format(data="", training="epochs = 2")
STEPS = SFT.format(data="", training="steps = 20")


def refusal(path, flags=()):
    with pytest.raises(ConfigError) as error:
        load_config(path, flags)
    return str(error.value)


def test_either_steps_or_epochs(run_file):
    training = load_config(run_file(EPOCHS)).config.training
    assert (training.steps, training.epochs) == (None, 2.0)
    both = refusal(run_file(SFT.format(data="", training="steps = 20\nepochs = 2")))
    assert both == "training.epochs has no effect while training.steps is set: remove it (run.toml:10)"
    for text in (SFT.format(data="", training=""), SFT.format(data="", training="").replace("[training]", "")):
        neither = refusal(run_file(text))
        assert neither.startswith("training.steps is missing: set it to a positive whole number, or training.epochs")
    for wrong in ("0", "-1", "true"):
        assert "training.epochs = " in refusal(run_file(EPOCHS), ["--training.epochs", wrong])


def test_the_command_line_replaces_one_by_the_other(run_file):
    loaded = load_config(run_file(STEPS), ["--training.epochs", "2"])
    assert (loaded.config.training.steps, loaded.config.training.epochs) == (None, 2.0)
    assert loaded.warnings == ("training.steps has no effect beside --training.epochs (run.toml:9)",)
    assert loaded.origins["training.steps"] == "default"
    loaded = load_config(run_file(EPOCHS), ["--training.steps", "3"])
    assert loaded.config.training.steps == 3
    assert loaded.warnings == ("training.epochs has no effect while training.steps is set (run.toml:9)",)
    both = ["--training.steps", "3", "--training.epochs", "2"]
    assert "training.epochs has no effect" in refusal(run_file(STEPS), both)


def test_a_resolved_file_has_the_steps_and_loads_again(run_file):
    loaded = load_config(run_file(EPOCHS))
    text = dump_resolved(loaded, [Derived("training.steps", 7, "2 passes")])
    assert "# epochs = 2.0" in text
    assert load_config(run_file(text, "resolved.toml")).config.training.steps == 7


def test_a_warm_up_is_checked_only_against_known_steps(run_file):
    load_config(run_file(EPOCHS), ["--training.warmup_steps", "50"])
    assert "training.warmup_steps = 50 is not below" in refusal(run_file(STEPS), ["--training.warmup_steps", "50"])


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ("eval_fraction = 1.0", "data.eval_fraction = 1.0 must be less than 1"),
        ('eval_fraction = 0.1\neval_path = "a"', "and data.eval_path names those to hold out: give one of the two"),
        ('eval_split = "train"', 'data.eval_split = "train" is the split that is trained on: name another one'),
        ('eval_path = ""', 'data.eval_path = "" is empty'),
        ('subset = "main"', 'data.subset = "main" is a part of a data set, and data.path is a file'),
        ("max_length = 0", "data.max_length = 0 must be greater than 0"),
        ('too_long = "cut"', 'data.too_long = "cut" is not a choice'),
    ],
)
def test_contradictions_of_data(run_file, data, sentence):
    assert sentence in refusal(run_file(SFT.format(data=data, training="steps = 3")))


def test_held_out_rows_keep_the_evaluation_on(run_file):
    assert load_config(run_file(STEPS)).config.evaluation is None
    text = SFT.format(data="eval_fraction = 0.1", training="steps = 3")
    assert load_config(run_file(text), ["--evaluation.every", "5"]).config.evaluation.every == 5
    assert load_config(run_file(text)).config.evaluation.every == 0
    for given, flags, said in (
        ("evaluation = false\n" + text, [], "data.eval_fraction has no effect while evaluation is off"),
        (text, ["--evaluation.num_tasks", "5"], "evaluation.num_tasks has no effect without an environment"),
        (text, ["--sampling.top_p", "0.5"], "sampling.top_p has no effect under sft without an environment"),
        (STEPS, ["--evaluation.every", "5"], "or data.eval_path for the loss"),
    ):
        assert said in refusal(run_file(given), flags)


def test_names_on_the_hub_stay_as_they_are(run_file, tmp_path):
    def path_of(path):
        return load_config(run_file(STEPS.replace("rows.jsonl", path))).config.data.path

    assert path_of("org/name") == "org/name"
    assert path_of("rows.jsonl") == str(tmp_path / "rows.jsonl")
    assert path_of("data/rows.jsonl") == str(tmp_path / "data" / "rows.jsonl")
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert path_of("org/name") == str(tmp_path / "org" / "name")
    assert is_hub_name("openai/gsm8k")
    assert not any(map(is_hub_name, ("gsm8k", "./a/b", "a/b/c", "/a/b", "a/b.parquet")))


def test_settings_of_a_python_call():
    tree = {
        "model": {"path": "m"},
        "algorithm": {"kind": "sft", "train_on": "everything"},
        "data": {"path": "python:rows@1", "eval_path": "python:rows@2", "max_length": 8, "too_long": "truncate"},
        "training": {"epochs": 1},
    }
    config = load_settings(tree, algorithm="sft").config
    assert (config.data.eval_path, config.data.max_length, config.training.epochs) == ("python:rows@2", 8, 1.0)
    assert config.algorithm.train_on == "everything"
